/* The child of the warden that makes the mounts which are one sandbox's own.
 *
 * It enters the jail's namespaces as the sandbox's uid, does what its frame's items say, in order,
 * and ends. Two kinds of mounts are made: the writable directories, all parts of one sized tmpfs
 * (of which a renewal makes another, and so nothing else may hold the first); and views of the image. A jail tool can only bind the image, and a bound file is one inode for
 * all sandboxes: a lock on it is seen by each, and a watch tells what the siblings open. So the
 * image is covered by overlays over the same bytes, one for each directory that the frame names.
 *
 * Invariant: where an overlay cannot be mounted (an old kernel, or a file system mounted below the
 * directory, which a user namespace may not uncover) the jail tool's own mounts stay as they are,
 * and the exit code says so. */
#define _GNU_SOURCE
#include "layers.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SYS_MOUNT_SETATTR 442 /* Linux 5.12; the same number everywhere */
#define WITH_SUBMOUNTS 0x8000 /* AT_RECURSIVE */
#define ATTR_READ_ONLY 1
#define ATTR_NOSUID 2
#define ATTR_NODEV 4
#define PATH_BYTES 4096
/* In the places, a small file system which is reachable while the mounts are made and never again;
 * read-only, and so is what is bound from it: */
#define EMPTY ".empty"     /* the second lower directory of every overlay, and a mask */
#define EMPTY_FILE ".empty-file" /* likewise */
#define VIEW ".view"       /* where overlays are mounted, one over the other */
#define OLD ".old"         /* what is to go, one mount over the other; in the sized tmpfs, too */
#define OLD_FILE ".old-file"
#define DATA ".data"       /* where the sized tmpfs is mounted meanwhile */
static const char *const places[] = {EMPTY, VIEW, OLD, DATA, EMPTY_FILE, OLD_FILE};
#define NUM_PLACES 6
#define NUM_DIRECTORIES 4

static const char *base;  /* where the places are, or (at a renewal, which needs none) the sized tmpfs */
static char data[PATH_BYTES]; /* where the sized tmpfs is */
static int is_overlay;    /* the last TAG_OVERLAY worked, and is the topmost at VIEW */
static int overlay_errno; /* why one did not */
static int nodes = -1;    /* own device nodes, in a file system that serves for the places as well */
static int has_nodes;

static int in_base(char *path, const char *first, const char *second)
{
    int length = snprintf(path, PATH_BYTES, "%s/%s%s%s", base ? base : "", first, *second ? "/" : "",
                          second);

    if (base == NULL)
        return errno = EPROTO, -1;
    return length < PATH_BYTES ? 0 : (errno = ENAMETOOLONG, -1);
}

static int set_attributes(const char *path, unsigned flags, uint64_t set, uint64_t clear)
{
    uint64_t attributes[4] = {set, clear, 0, 0}; /* struct mount_attr, which older headers lack */

    if (path == NULL)
        return errno = EPROTO, -1;
    return (int)syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, sizeof attributes);
}

/* Closes what the jail tool left writable: nsjail's read-only is that of the topmost mount alone,
 * so a file system mounted somewhere below /usr would keep its own flags. */
static int seal(const struct wire_entry *entry)
{
    if (entry->tag == TAG_SEAL)
        return set_attributes(wire_string(entry), WITH_SUBMOUNTS,
                              ATTR_READ_ONLY | ATTR_NOSUID | ATTR_NODEV, 0);
    return set_attributes(wire_string(entry), 0, 0, ATTR_NODEV);
}

static int make_places(int directory)
{
    for (int i = 0; i < NUM_PLACES; i++)
        if ((i < NUM_DIRECTORIES ? mkdirat(directory, places[i], 0555)
                                 : mknodat(directory, places[i], S_IFREG | 0444, 0)) < 0)
            return -1;
    return 0;
}

/* Mounts the places: beside own nodes, where there are any, else in a tmpfs of their own. */
static int mount_places(const char *directory)
{
    unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;

    if ((base = directory) == NULL)
        return errno = EPROTO, -1;
    if (nodes >= 0) {
        has_nodes = nodes_place(nodes, base) == 0;
        close(nodes);
        nodes = -1;
    }
    if (has_nodes)
        return set_attributes(base, 0, ATTR_READ_ONLY, 0);
    if (mount("tmpfs", base, "tmpfs", flags, "size=64k,nr_inodes=32,mode=0755") < 0)
        return -1;
    int root = open(base, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || make_places(root) < 0)
        return -1;
    close(root);
    return mount(NULL, base, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, NULL);
}

/* The first has the same inodes in use as a renewed one: nothing tells how often it was done. */
static int make_tmpfs(const struct wire_entry *entry)
{
    const char *where, *options;
    char path[PATH_BYTES];

    if (!wire_pair(entry, 0, &where, &options))
        return -1;
    if (base == NULL) {
        base = where;
        if ((size_t)snprintf(data, sizeof data, "%s", where) >= sizeof data)
            return errno = ENAMETOOLONG, -1;
    } else if (in_base(data, DATA, "") < 0) {
        return -1;
    }
    if (mount("tmpfs", data, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
        return -1;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", data, OLD) >= sizeof path)
        return errno = ENAMETOOLONG, -1;
    return mkdir(path, 0555);
}

/* Binds a new directory of the tmpfs over its target. */
static int bind_writable(const struct wire_entry *entry)
{
    const char *name, *target;
    char path[PATH_BYTES];
    uint32_t mode;

    if (!wire_u32(entry, &mode) || !wire_pair(entry, 4, &name, &target))
        return errno = EPROTO, -1;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", data, name) >= sizeof path)
        return errno = ENAMETOOLONG, -1;
    return mkdir(path, mode) < 0 ? -1 : mount(path, target, NULL, MS_BIND, NULL);
}

/* Takes a mount from its place. Each unmounting waits for every processor (milliseconds on a busy
 * machine), so what is to go is gathered in the tmpfs and goes with it, all at once. */
static int drop(const char *target)
{
    struct stat info;
    char path[PATH_BYTES];

    if (target == NULL)
        return errno = EPROTO, -1;
    if (stat(target, &info) < 0 || in_base(path, S_ISDIR(info.st_mode) ? OLD : OLD_FILE, "") < 0)
        return -1;
    return mount(target, path, NULL, MS_MOVE, NULL);
}

/* Hides what tells about the host; it may have gone with a kernel module since the engine looked. */
static int mask(const char *target)
{
    struct stat info;
    char path[PATH_BYTES];

    if (target == NULL)
        return errno = EPROTO, -1;
    if (stat(target, &info) < 0)
        return errno == ENOENT ? 0 : -1;
    if (in_base(path, S_ISDIR(info.st_mode) ? EMPTY : EMPTY_FILE, "") < 0)
        return -1;
    return mount(path, target, NULL, MS_BIND, NULL);
}

/* The directory is named as "." so that the mount table inside tells no path of the host. It is the
 * last layer, for in others the kernel reads every directory's attributes, and fails at a closed one. */
static int enter_overlay(const struct wire_entry *entry)
{
    const char *directory = wire_string(entry);
    unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV;
    char empty[PATH_BYTES], view[PATH_BYTES], options[PATH_BYTES + 64];

    if (directory == NULL)
        return errno = EPROTO, -1;
    if (in_base(empty, EMPTY, "") < 0 || in_base(view, VIEW, "") < 0 || chdir(directory) < 0)
        return -1;
    snprintf(options, sizeof options, "lowerdir=%s:.,userxattr", empty);
    is_overlay = mount("overlay", view, "overlay", flags, options) == 0;
    if (!is_overlay)
        overlay_errno = errno;
    return chdir("/");
}

/* Puts a part of the overlay in the place of the jail tool's mount of the same. */
static int show(const struct wire_entry *entry)
{
    const char *part, *target;
    char path[PATH_BYTES];

    if (!wire_pair(entry, 0, &part, &target))
        return -1;
    if (!is_overlay)
        return 0;
    if (in_base(path, VIEW, part) < 0 || drop(target) < 0)
        return -1;
    return mount(path, target, NULL, *part ? MS_BIND : MS_MOVE, NULL);
}

/* Puts the sandbox's own node in the place of the host's. Written to it may be, but not its times: who has
 * no node of its own (or is the next tenant) would see them. Kernels before 5.12 cannot forbid that. */
static int show_node(const struct wire_entry *entry)
{
    const char *name, *target = nodes_target(entry, &name);
    char path[PATH_BYTES];

    if (target == NULL)
        return -1;
    if (!has_nodes) {
        set_attributes(target, 0, ATTR_READ_ONLY, 0);
        return 0;
    }
    if (in_base(path, name, "") < 0 || drop(target) < 0)
        return -1;
    return mount(path, target, NULL, MS_BIND, NULL);
}

static int apply(const struct wire_entry *entry)
{
    const char *path = wire_string(entry);

    switch (entry->tag) {
    case TAG_SEAL:
    case TAG_DEVICE:
        return seal(entry);
    case TAG_READ_ONLY: /* the old way to say it: bubblewrap serves kernels without mount_setattr */
        return path == NULL ? -1
                            : mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID |
                                                          MS_NODEV | MS_NOEXEC, NULL);
    case TAG_TMPFS:
        return make_tmpfs(entry);
    case TAG_PLACES:
        return mount_places(path);
    case TAG_OVERLAY:
        return enter_overlay(entry);
    case TAG_SHOW:
        return show(entry);
    case TAG_MASK:
        return mask(path);
    case TAG_NODE:
        return show_node(entry);
    case TAG_DROP:
        return drop(path);
    case TAG_BIND:
        return bind_writable(entry);
    case TAG_LAYERED:
        return layers_bind(data, entry);
    default:
        return 0;
    }
}

static int apply_all(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;

    while (wire_next(&cursor, &entry) == 1)
        if (apply(&entry) < 0)
            return -1;
    return base == NULL ? 0 : umount2(base, MNT_DETACH); /* its directories stay, bound elsewhere */
}

_Noreturn static void mounter(const struct wire_frame *frame, int pidfd, int layers)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;

    umask(0);
    nodes = nodes_make(frame);
    if (nodes >= 0 && make_places(nodes) < 0)
        _exit(errno);
    if (layers_open(frame) < 0)
        _exit(errno);
    /* First the sandbox's uid, then its namespaces: it owns them, and root is not mapped there. */
    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_IDS && jail_become(&entry) < 0)
            _exit(errno);
    if (setns(pidfd, CLONE_NEWUSER | CLONE_NEWNS) < 0 || apply_all(frame) < 0 || layers_hand(layers) < 0)
        _exit(errno > 0 && errno < MOUNTS_SHARED ? errno : EIO);
    _exit(overlay_errno ? MOUNTS_SHARED + overlay_errno % MOUNTS_SHARED : 0);
}

pid_t mounts_make(const struct wire_frame *frame, int pidfd, int *layers)
{
    int theirs;

    *layers = layers_channel(frame, &theirs);
    pid_t pid = fork();
    if (pid == 0)
        mounter(frame, pidfd, theirs);
    if (theirs >= 0)
        close(theirs);
    return pid;
}
