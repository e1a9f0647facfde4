/* Device nodes that are one sandbox's own.
 *
 * A bound node is the host's inode: a lock on /dev/null is felt, and a watch on it feels, in every
 * sandbox. Only the host's root can make others, in a tmpfs of its own user namespace (elsewhere the
 * kernel opens no device). Where that is refused, the jail tool's binds stay. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define SYS_MOVE_MOUNT 429 /* these four are of Linux 5.2, with the same numbers everywhere */
#define SYS_FSOPEN 430
#define SYS_FSCONFIG 431
#define SYS_FSMOUNT 432
#define SET_STRING 1
#define CREATE 6
#define CLOSE_ON_EXEC 1
#define ATTR_NOSUID 2
#define EMPTY_FROM_PATH 4
#define MEMORY_DEVICES 1 /* the major number of null, zero, full and random */

static int make_file_system(void)
{
    int context = (int)syscall(SYS_FSOPEN, "tmpfs", CLOSE_ON_EXEC), made = -1;

    if (context < 0)
        return -1;
    if (syscall(SYS_FSCONFIG, context, SET_STRING, "size", "64k", 0) == 0 &&
        syscall(SYS_FSCONFIG, context, SET_STRING, "nr_inodes", "32", 0) == 0 &&
        syscall(SYS_FSCONFIG, context, SET_STRING, "mode", "0755", 0) == 0 &&
        syscall(SYS_FSCONFIG, context, CREATE, NULL, NULL, 0) == 0)
        made = (int)syscall(SYS_FSMOUNT, context, CLOSE_ON_EXEC, ATTR_NOSUID);
    close(context);
    return made;
}

const char *nodes_target(const struct wire_entry *entry, const char **name)
{
    const char *path = (const char *)entry->data + 4;

    if (entry->length < 6 || entry->data[entry->length - 1] != 0 || *path != '/')
        return errno = EPROTO, NULL;
    *name = strrchr(path, '/') + 1;
    return path;
}

int nodes_make(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    const char *name;
    uint32_t minor;
    int made = -1;

    if (geteuid() != 0)
        return -1;
    while (wire_next(&cursor, &entry) == 1) {
        if (entry.tag != TAG_NODE || !wire_u32(&entry, &minor) || !nodes_target(&entry, &name))
            continue;
        if (made < 0 && (made = make_file_system()) < 0)
            return -1;
        if (mknodat(made, name, S_IFCHR | 0666, makedev(MEMORY_DEVICES, minor)) < 0) {
            close(made);
            return -1;
        }
    }
    return made;
}

int nodes_place(int made, const char *directory)
{
    return (int)syscall(SYS_MOVE_MOUNT, made, "", AT_FDCWD, directory, EMPTY_FROM_PATH);
}
