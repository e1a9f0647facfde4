/* Seals a workspace: a child of the warden that reads it with the sandbox's own uid and writes records.
 *
 * It is in the sandbox's user namespace, where it may read what the sandbox has closed to itself, and it
 * starts from the upper directory that was kept when the overlay was made; without bases, from the
 * workspace's own mount. Invariant: every name is opened from a directory that was opened before, and
 * no link is followed on the way; a file is read no further than it claimed; what is claimed in total
 * stays below the caps before it is read. Extended attributes do not go out: of a workspace
 * without bases they are the sandboxed code's own writing, and say nothing. */
#define _GNU_SOURCE
#include "archive.h"
#include "layers.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define PERMISSIONS 01777u /* what set-user-id and set-group-id mean ends with the sandbox */
#define OPAQUE "user.overlay.opaque"
#define PATHS_BYTES (64u << 20) /* of all paths together: they are held by the engine */

static struct {
    int layered;
    uint64_t bytes_left, entries_left, paths_left;
} out;

static int put_record(uint16_t kind, const char *path, const struct stat *info, unsigned mode, uint64_t size)
{
    struct layer_record record = {.magic = LAYER_MAGIC,
                                  .kind = kind,
                                  .mode = (uint16_t)mode,
                                  .path_length = (uint32_t)strlen(path),
                                  .size = size};

    if (info != NULL) {
        record.nanoseconds = (uint32_t)info->st_mtim.tv_nsec;
        record.mtime_s = info->st_mtim.tv_sec;
    }
    return archive_put(&record, sizeof record) < 0 ? -1 : archive_put(path, record.path_length);
}

/* Ends the stream with the path that was too much, or could not be read. */
static int fail(const char *path, int error)
{
    struct layer_record record = {.magic = LAYER_MAGIC,
                                  .kind = LAYER_FAILED,
                                  .path_length = (uint32_t)strlen(path),
                                  .nanoseconds = (uint32_t)error};

    if (archive_put(&record, sizeof record) == 0 && archive_put(path, record.path_length) == 0)
        archive_flush();
    return errno = error, -1;
}

static int charge(uint64_t size)
{
    if (size > out.bytes_left)
        return -1;
    out.bytes_left -= size;
    return 0;
}

static int pack_file(int directory, const char *name, const char *path)
{
    int fd = archive_open(directory, name, O_RDONLY | O_NONBLOCK | O_NOCTTY), result;
    struct stat info;

    if (fd < 0)
        return errno == ENOENT ? 0 : fail(path, errno);
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode))
        result = fail(path, EAGAIN);
    else if (charge((uint64_t)info.st_size) < 0)
        result = fail(path, EFBIG);
    else if ((result = put_record(LAYER_FILE, path, &info, info.st_mode & PERMISSIONS, (uint64_t)info.st_size)) == 0)
        result = archive_put_content(fd, (uint64_t)info.st_size);
    int error = errno;
    close(fd);
    return errno = error, result;
}

static int pack_link(int directory, const char *name, const char *path, const struct stat *info)
{
    char target[PATH_MAX];
    ssize_t length = readlinkat(directory, name, target, sizeof target);

    if (length < 0)
        return errno == ENOENT ? 0 : fail(path, errno);
    if (length == 0 || (size_t)length >= sizeof target)
        return fail(path, ENAMETOOLONG);
    if ((uint64_t)length > out.paths_left)
        return fail(path, ENAMETOOLONG);
    out.paths_left -= (uint64_t)length;
    if (put_record(LAYER_LINK, path, info, 0, (uint64_t)length) < 0)
        return -1;
    return archive_put(target, (size_t)length);
}

/* Only the overlay itself can have set that in its upper directory: inside, the name is another. */
static int is_opaque(int fd)
{
    char path[64], value[2];

    if (!out.layered)
        return 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return getxattr(path, OPAQUE, value, sizeof value) == 1 && value[0] == 'y';
}

static int tell_directory(int fd, const char *path)
{
    struct stat info;

    if (fstat(fd, &info) < 0)
        return fail(path, errno);
    unsigned mode = (info.st_mode & PERMISSIONS) | (is_opaque(fd) ? LAYER_OPAQUE : 0);
    return put_record(LAYER_DIRECTORY, path, &info, mode, 0);
}

static int pack_directory(int directory, const char *name, const char *path)
{
    int fd = archive_open(directory, name, O_PATH | O_DIRECTORY);

    if (fd < 0)
        return errno == ENOENT ? 0 : fail(path, errno);
    int result = tell_directory(fd, path);
    close(fd);
    if (result < 0)
        return -1;
    return archive_remember(path) < 0 ? fail(path, ENOMEM) : 0;
}

static int pack_entry(int directory, const char *above, const char *name)
{
    char path[LAYER_MAX_PATH + 1];
    struct stat info;
    int length = snprintf(path, sizeof path, "%s%s%s", above, *above ? "/" : "", name);

    if (out.entries_left-- == 0)
        return fail(above, E2BIG);
    if (length < 0 || (size_t)length >= sizeof path || (uint64_t)length > out.paths_left)
        return fail(above, ENAMETOOLONG);
    out.paths_left -= (uint64_t)length;
    if (fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : fail(path, errno);
    if (S_ISREG(info.st_mode))
        return pack_file(directory, name, path);
    if (S_ISDIR(info.st_mode))
        return pack_directory(directory, name, path);
    if (S_ISLNK(info.st_mode))
        return pack_link(directory, name, path, &info);
    if (out.layered && S_ISCHR(info.st_mode) && info.st_rdev == makedev(0, 0))
        return put_record(LAYER_DELETED, path, NULL, 0, 0);
    return put_record(LAYER_SPECIAL, path, NULL, info.st_mode >> 12, 0);
}

static int pack_below(int base, const char *path)
{
    int fd = archive_open(base, *path ? path : ".", O_RDONLY | O_DIRECTORY), result = 0;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;

    if (directory == NULL) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        return error == ENOENT && *path ? 0 : fail(path, error);
    }
    while (result == 0 && (entry = readdir(directory)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            result = pack_entry(fd, path, entry->d_name);
    int error = errno;
    closedir(directory);
    return errno = error, result;
}

static int pack_all(int base)
{
    if (tell_directory(base, "") < 0 || archive_walk(base, pack_below) < 0)
        return -1;
    return put_record(LAYER_END, "", NULL, 0, 0) < 0 ? -1 : archive_flush();
}

/* The workspace without bases: the jail's root is read-only, so that name is no one else's. */
static int open_workspace(int pidfd, int upper)
{
    if (setns(pidfd, CLONE_NEWUSER | (upper < 0 ? CLONE_NEWNS : 0)) < 0)
        return -1;
    return upper >= 0 ? upper : open("/workspace", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

_Noreturn static void packer(const struct wire_frame *request, int pidfd, int upper)
{
    struct wire_cursor wanted = wire_items(request), cursor = wire_items(request);
    struct wire_entry entry;
    struct wire_caps caps = {0};
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    while (wire_next(&wanted, &entry) == 1)
        if (entry.tag == TAG_CAPS && entry.length == sizeof caps)
            memcpy(&caps, entry.data, sizeof caps);
    archive_begin(request->fds[0]);
    out.layered = upper >= 0;
    out.bytes_left = caps.num_bytes;
    out.entries_left = caps.num_entries;
    out.paths_left = PATHS_BYTES;
    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_IDS && jail_become(&entry) < 0)
            _exit(errno);
    int base = open_workspace(pidfd, upper);
    if (base < 0) {
        fail("", errno);
        _exit(1);
    }
    _exit(pack_all(base) < 0 ? 1 : 0);
}

pid_t layer_pack(const struct wire_frame *request, int pidfd, int upper)
{
    pid_t pid = fork();

    if (pid == 0)
        packer(request, pidfd, upper);
    return pid;
}
