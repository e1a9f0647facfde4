/* The child of the warden that becomes a jail.
 *
 * It does what its frame's items say, in order, and never returns. A failure is told in words on
 * the sync socket, which is the jail tool's stderr as well. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPARE_FD 100 /* where passed descriptors wait while the low numbers are arranged */

_Noreturn static void fail(const char *step, const char *what)
{
    dprintf(STDERR_FILENO, "%s %s: %s", step, what, strerror(errno));
    _exit(126);
}

int jail_become(const struct wire_entry *entry)
{
    uint32_t ids[2];

    if (entry->length != sizeof ids)
        return errno = EPROTO, -1;
    memcpy(ids, entry->data, sizeof ids);
    if (ids[0] == 0 || ids[1] == 0)
        return errno = EPERM, -1; /* a jail never runs as the host's root */
    if (setgroups(0, NULL) < 0 || setresgid(ids[1], ids[1], ids[1]) < 0)
        return -1;
    return setresuid(ids[0], ids[0], ids[0]);
}

/* Gives the jail tool an empty directory of its own in that place, seen by nobody else.
 *
 * nsjail makes the mount points that it works on in /run/user, /tmp or /dev/shm, under a name that
 * anyone can guess, and leaves them there: in the host's own directories that would be residue, and
 * a trap that another local user can set. A namespace of this process's own costs half a
 * millisecond and ends with the tool. */
static int cover(const char *path)
{
    char map[64];
    unsigned uid = geteuid(), gid = getegid();

    if (uid == 0)
        return errno = EPERM, -1;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        return -1;
    /* The change of uid made /proc/self root's; nothing else of this new uid lives yet. */
    prctl(PR_SET_DUMPABLE, 1);
    snprintf(map, sizeof map, "%u %u 1", uid, uid);
    if (file_write("/proc/self/uid_map", map) < 0 || file_write("/proc/self/setgroups", "deny") < 0)
        return -1;
    snprintf(map, sizeof map, "%u %u 1", gid, gid);
    if (file_write("/proc/self/gid_map", map) < 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    return mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=32,mode=0700");
}

static void apply(const struct wire_entry *entry)
{
    const char *first = "", *second = "";
    struct wire_rlimit limit;

    switch (entry->tag) {
    case TAG_DIR:
        if ((first = wire_string(entry)) == NULL || cgroup_make(first) < 0)
            fail("making cgroup", first ? first : "?");
        break;
    case TAG_SET:
        if (!wire_pair(entry, 0, &first, &second) || file_write(first, second) < 0)
            fail("writing", first);
        break;
    case TAG_JOIN:
        if ((first = wire_string(entry)) == NULL || file_write(first, "0") < 0)
            fail("joining cgroup", first ? first : "?");
        break;
    case TAG_IDS:
        if (jail_become(entry) < 0)
            fail("changing to", "the sandbox's uid");
        break;
    case TAG_COVER:
        if ((first = wire_string(entry)) == NULL || cover(first) < 0)
            fail("making a user namespace with its own", first ? first : "?");
        break;
    case TAG_RLIMIT:
        if (entry->length != sizeof limit)
            fail("reading", "a limit");
        memcpy(&limit, entry->data, sizeof limit);
        struct rlimit value = {.rlim_cur = limit.soft, .rlim_max = limit.hard};
        if (setrlimit((int)limit.resource, &value) < 0)
            fail("setting", "a resource limit");
        break;
    default:
        break;
    }
}

/* Puts passed and opened descriptors at their numbers; 0 and 1 become /dev/null. */
static void arrange_fds(struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    const char *path;
    uint32_t number;
    int next = 0, null = open("/dev/null", O_RDWR | O_CLOEXEC);

    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0)
        fail("opening", "/dev/null");
    for (int i = 0; i < frame->num_fds; i++)
        if ((frame->fds[i] = fcntl(frame->fds[i], F_DUPFD_CLOEXEC, SPARE_FD)) < 0)
            fail("moving", "a descriptor");
    while (wire_next(&cursor, &entry) == 1) {
        int from = -1;
        if (entry.tag != TAG_AT && entry.tag != TAG_OPEN)
            continue;
        if (!wire_u32(&entry, &number) || number < 3 || number >= SPARE_FD)
            fail("placing", "a descriptor");
        path = "a descriptor";
        errno = EPROTO;
        if (entry.tag == TAG_AT && next < frame->num_fds)
            from = frame->fds[next++];
        else if (entry.tag == TAG_OPEN && entry.length > 5 && entry.data[entry.length - 1] == 0)
            from = open(path = (const char *)entry.data + 4, O_RDONLY | O_CLOEXEC);
        if (from < 0)
            fail("opening", path);
        int placed = from == (int)number ? fcntl(from, F_SETFD, 0) : dup2(from, (int)number);
        if (placed < 0)
            fail("placing", "a descriptor");
        if (entry.tag == TAG_OPEN && from != (int)number)
            close(from);
    }
}

static char *words[WIRE_MAX_STRINGS], *environment[WIRE_MAX_STRINGS];

static void collect(const struct wire_frame *frame, uint16_t tag, char **list)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    int count = 0;

    while (wire_next(&cursor, &entry) == 1) {
        if (entry.tag != tag)
            continue;
        if (count == WIRE_MAX_STRINGS - 1)
            errno = E2BIG, fail("reading", "arguments");
        if ((list[count++] = (char *)(uintptr_t)wire_string(&entry)) == NULL)
            fail("reading", "arguments");
    }
    list[count] = NULL;
}

_Noreturn static void jail_child(struct wire_frame *frame, int sync)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(sync, STDERR_FILENO) < 0 || setsid() < 0)
        _exit(126);
    /* Every process of a jail is a better victim than the engine; lowering it is not ours to do. */
    file_write("/proc/self/oom_score_adj", "1000");
    while (wire_next(&cursor, &entry) == 1)
        apply(&entry);
    arrange_fds(frame);
    collect(frame, TAG_ARGV, words);
    collect(frame, TAG_ENV, environment);
    if (words[0] == NULL)
        errno = EPROTO, fail("reading", "arguments");
    if (geteuid() == 0)
        errno = EPERM, fail("refusing to start", "a jail as host uid 0");
    execve(words[0], words, environment);
    fail("executing", words[0]);
}

pid_t jail_spawn(const struct wire_frame *frame, int sync)
{
    struct wire_frame copy = *frame;
    pid_t pid = fork();

    if (pid == 0)
        jail_child(&copy, sync);
    return pid;
}
