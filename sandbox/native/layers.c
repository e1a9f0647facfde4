/* A workspace over bases: an overlay whose lower directories are sealed layers of the host.
 *
 * Invariant: a layer is opened by the engine's user, before anything of the sandbox is entered, as a
 * detached read-only copy of its mount in which the store's owner is the sandbox's uid; what the
 * sandbox writes goes to its own sized tmpfs, and the bases have no name inside once this has ended. */
#define _GNU_SOURCE
#include "layers.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SYS_OPEN_TREE 428 /* Linux 5.2 */
#define SYS_MOVE_MOUNT 429
#define SYS_MOUNT_SETATTR 442 /* Linux 5.12 */
#define CLONE_TREE 1
#define CLONE_CLOEXEC O_CLOEXEC
#define EMPTY_FROM_PATH 4
#define ATTR_READ_ONLY 1
#define ATTR_NOSUID 2
#define ATTR_NODEV 4
#define ATTR_IDMAP 0x100000
#define PATH_BYTES 4096

static int trees[MAX_LAYERS];
static int num_trees;
static int upper = -1;

static int write_map(pid_t pid, const char *name, unsigned inside, unsigned outside)
{
    char path[64], map[64];

    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    snprintf(map, sizeof map, "%u %u 1", inside, outside);
    return file_write(path, map);
}

/* A user namespace in which the store's owner is the sandbox; its only process is killed at once. */
static int map_namespace(const uint32_t ids[2])
{
    char path[64];
    int fd = -1, ready[2];
    char byte = 0;
    pid_t pid;

    if (pipe2(ready, O_CLOEXEC) < 0)
        return -1;
    if ((pid = fork()) == 0) {
        byte = unshare(CLONE_NEWUSER) < 0 ? (char)errno : 0;
        if (write(ready[1], &byte, 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(ready[1]);
    if (pid > 0 && read(ready[0], &byte, 1) == 1 && byte == 0) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", (int)pid);
        if (write_map(pid, "uid_map", geteuid(), ids[0]) == 0 && write_map(pid, "gid_map", getegid(), ids[1]) == 0)
            fd = open(path, O_RDONLY | O_CLOEXEC);
    } else if (byte != 0) {
        errno = byte;
    }
    int error = errno;
    close(ready[0]);
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    return errno = error, fd;
}

static int open_layer(const char *path, int map)
{
    uint64_t attributes[4] = {ATTR_READ_ONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0};
    int tree = (int)syscall(SYS_OPEN_TREE, AT_FDCWD, path, CLONE_TREE | CLONE_CLOEXEC);

    if (tree < 0)
        return -1;
    if (map >= 0) {
        attributes[0] |= ATTR_IDMAP;
        attributes[3] = (uint64_t)map;
    }
    if (syscall(SYS_MOUNT_SETATTR, tree, "", AT_EMPTY_PATH, attributes, sizeof attributes) == 0)
        return tree;
    int error = errno;
    close(tree);
    return errno = error, -1;
}

int layers_open(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    uint32_t ids[2];
    int map = -1;

    while (wire_next(&cursor, &entry) == 1) {
        if (entry.tag == TAG_IDS && entry.length == sizeof ids)
            memcpy(ids, entry.data, sizeof ids);
        if (entry.tag != TAG_LAYER)
            continue;
        const char *path = wire_string(&entry);
        if (path == NULL || num_trees == MAX_LAYERS)
            return errno = EPROTO, -1;
        if (map < 0 && (map = map_namespace(ids)) < 0)
            return -1;
        if ((trees[num_trees] = open_layer(path, map)) < 0)
            return -1;
        num_trees++;
    }
    if (map >= 0)
        close(map);
    return 0;
}

/* Names in the options are relative, so that the mount table inside tells no more than their number. */
static int mount_overlay(const char *target)
{
    char options[PATH_BYTES], name[16];
    int length = snprintf(options, sizeof options, "userxattr,upperdir=up,workdir=work,lowerdir=");

    for (int i = 0; i < num_trees; i++) {
        snprintf(name, sizeof name, "%d", i);
        if (mkdir(name, 0555) < 0 ||
            syscall(SYS_MOVE_MOUNT, trees[i], "", AT_FDCWD, name, EMPTY_FROM_PATH) < 0)
            return -1;
        length += snprintf(options + length, sizeof options - (size_t)length, i ? ":%d" : "%d", i);
    }
    return mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options);
}

int layers_bind(const char *base, const struct wire_entry *entry)
{
    const char *name, *target;
    char path[PATH_BYTES];
    uint32_t mode;

    if (base == NULL || !wire_u32(entry, &mode) || !wire_pair(entry, 4, &name, &target) || num_trees == 0)
        return errno = EPROTO, -1;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", base, name) >= sizeof path)
        return errno = ENAMETOOLONG, -1;
    if (mkdir(path, 0700) < 0 || chdir(path) < 0 || mkdir("up", mode) < 0 || mkdir("work", 0700) < 0 ||
        mount_overlay(target) < 0)
        return -1;
    upper = open("up", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return upper < 0 ? -1 : chdir("/");
}

int layers_hand(int socket)
{
    struct wire_out out;

    if (upper < 0)
        return 0;
    wire_begin(&out, WIRE_UPPER, 0);
    return wire_send(socket, &out, &upper, 1);
}

int layers_channel(const struct wire_frame *frame, int *theirs)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    int pair[2], wanted = 0;

    *theirs = -1;
    while (wire_next(&cursor, &entry) == 1)
        wanted |= entry.tag == TAG_LAYERED;
    if (!wanted || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -1;
    *theirs = pair[1];
    return pair[0];
}

int layers_take(int *socket)
{
    static unsigned char small[WIRE_MAX_FRAME];
    struct wire_frame frame;
    int taken = -1;

    if (*socket < 0)
        return -1;
    if (wire_receive(*socket, small, &frame, MSG_DONTWAIT) == 1) {
        if (frame.header.kind == WIRE_UPPER && frame.num_fds == 1)
            taken = frame.fds[0];
        else
            wire_close_fds(&frame);
    }
    close(*socket);
    *socket = -1;
    return taken;
}
