/* Trees of files in and out, with the sandbox's own rights: records (archive.h) to files and back.
 *
 * Invariant: every path is resolved from a directory that was opened once, and no link is followed on
 * the way, so a directory that is swapped for a link meanwhile leads nowhere; nothing but regular
 * files and directories goes out; a file is read no further than it claimed at its opening, and what
 * is claimed in total stays below the caps before any of it is read. */
#define _GNU_SOURCE
#include "archive.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PERMISSIONS 0777u
#define STICKY 01000u /* comes in with a base alone */
#define TAR_BLOCK 512u
#define REPLACE_TRIES 16

static unsigned char block[ARCHIVE_BLOCK];

/* ------------------------------------------------------------------ in */

static int valid_path(const char *path, size_t length)
{
    if (length == 0 || strlen(path) != length || path[0] == '/' || path[length - 1] == '/')
        return 0;
    for (const char *name = path; name != NULL; name = strchr(name, '/')) {
        name += *name == '/';
        size_t size = strcspn(name, "/");
        if (size == 0 || (name[0] == '.' && (size == 1 || (size == 2 && name[1] == '.'))))
            return 0;
    }
    return 1;
}

/* The directory that a path lies in, made where it is missing; name is the path's last part. */
static int open_parent(int base, char *path, const char **name)
{
    char *slash = strrchr(path, '/');

    *name = slash ? slash + 1 : path;
    if (slash == NULL)
        return archive_open(base, ".", O_PATH | O_DIRECTORY);
    *slash = 0;
    int fd = archive_open(base, path, O_PATH | O_DIRECTORY);
    if (fd < 0 && errno == ENOENT)
        fd = archive_make(base, path);
    *slash = '/';
    return fd;
}

/* A new file in the place of whatever is there: never through an old one, which may have other names. */
static int create(int parent, const char *name)
{
    for (int tries = 0; tries < REPLACE_TRIES; tries++) {
        int fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0 || errno != EEXIST || (unlinkat(parent, name, 0) < 0 && errno != ENOENT))
            return fd;
    }
    return -1;
}

static int dress(int fd, const struct archive_record *record)
{
    struct timespec times[2] = {{.tv_sec = record->mtime_s}, {.tv_sec = record->mtime_s}};

    return fchmod(fd, record->mode & (PERMISSIONS | STICKY)) < 0 || futimens(fd, times) < 0 ? -1 : 0;
}

static int fill(int source, int fd, uint64_t left)
{
    uint32_t length;

    while (archive_read(source, &length, sizeof length) == 0) {
        if (length == 0)
            return 0;
        if (length > sizeof block || length > left)
            return errno = EPROTO, -1;
        if (archive_read(source, block, length) < 0 || archive_write(fd, block, length) < 0)
            return -1;
        left -= length;
    }
    return -1;
}

static int unpack_file(int source, int parent, const char *name, const struct archive_record *record)
{
    int fd = create(parent, name);

    if (fd < 0)
        return -1;
    int result = fill(source, fd, record->size);
    if (result == 0)
        result = dress(fd, record);
    int error = errno;
    close(fd);
    return errno = error, result;
}

static int unpack_link(int source, int parent, const char *name, const struct archive_record *record)
{
    char target[4096];

    if (record->size == 0 || record->size >= sizeof target)
        return errno = EPROTO, -1;
    if (archive_read(source, target, (size_t)record->size) < 0)
        return -1;
    target[record->size] = 0;
    for (int tries = 0; tries < REPLACE_TRIES; tries++)
        if (symlinkat(target, parent, name) == 0)
            return 0;
        else if (errno != EEXIST || (unlinkat(parent, name, 0) < 0 && errno != ENOENT))
            return -1;
    return -1;
}

static int seal_directory(int parent, const char *name, const struct archive_record *record)
{
    int fd = archive_open(parent, name, O_RDONLY | O_DIRECTORY);

    if (fd < 0)
        return -1;
    int result = dress(fd, record), error = errno;
    close(fd);
    return errno = error, result;
}

static int unpack_one(int source, int base, const struct archive_record *record, char *path)
{
    const char *name;
    int parent = open_parent(base, path, &name), result = -1;

    if (parent < 0)
        return -1;
    switch (record->kind) {
    case ARCHIVE_FILE:
        result = unpack_file(source, parent, name, record);
        break;
    case ARCHIVE_LINK:
        result = unpack_link(source, parent, name, record);
        break;
    case ARCHIVE_SEAL:
        result = seal_directory(parent, name, record);
        break;
    case ARCHIVE_DIRECTORY:
        result = archive_enter(parent, name);
        break;
    default:
        errno = EPROTO;
    }
    int error = errno;
    close(parent);
    return errno = error, result;
}

static void tell_failure(int report, const char *path, size_t length, int error)
{
    struct archive_record record = {.magic = ARCHIVE_MAGIC,
                                    .kind = ARCHIVE_FAILED,
                                    .path_length = (uint32_t)length,
                                    .error = (uint32_t)error};

    if (archive_write(report, &record, sizeof record) == 0)
        archive_write(report, path, length);
    errno = error;
}

static int unpack_all(int source, int report, int base)
{
    static char path[ARCHIVE_MAX_PATH + 1];
    struct archive_record record;

    while (archive_read(source, &record, sizeof record) == 0) {
        if (record.magic != ARCHIVE_MAGIC || record.path_length > ARCHIVE_MAX_PATH)
            return errno = EPROTO, -1;
        if (record.kind == ARCHIVE_END)
            return 0;
        if (archive_read(source, path, record.path_length) < 0)
            return -1;
        path[record.path_length] = 0;
        int whole = record.kind == ARCHIVE_SEAL && record.path_length == 0; /* what all lies in */
        if (!whole && !valid_path(path, record.path_length))
            return errno = EPROTO, -1;
        if ((whole ? seal_directory(base, ".", &record) : unpack_one(source, base, &record, path)) < 0)
            return tell_failure(report, path, record.path_length, errno), -1;
    }
    return -1;
}

int archive_unpack(int source, int report, const char *path)
{
    int base = archive_base(path, 1);

    if (base < 0)
        return -1;
    int result = unpack_all(source, report, base), error = errno;
    close(base);
    return errno = error, result;
}

/* ------------------------------------------------------------------ out */

static struct {
    uint64_t bytes_left, entries_left;
} out;

static int put_record(uint16_t kind, const char *path, const struct stat *info, uint16_t mode, int error)
{
    struct archive_record record = {.magic = ARCHIVE_MAGIC,
                                    .kind = kind,
                                    .mode = mode,
                                    .path_length = (uint32_t)strlen(path),
                                    .error = (uint32_t)error};

    if (info != NULL) {
        record.mtime_s = info->st_mtime;
        record.size = kind == ARCHIVE_FILE ? (uint64_t)info->st_size : 0;
    }
    return archive_put(&record, sizeof record) < 0 ? -1 : archive_put(path, record.path_length);
}

/* Ends the transfer with the path that was too much. */
static int fail(const char *path, int error)
{
    if (put_record(ARCHIVE_FAILED, path, NULL, 0, error) == 0)
        archive_flush();
    return errno = error, -1;
}

/* Takes what one entry costs in a tar from what is left. */
static int charge(uint64_t size)
{
    uint64_t padded = size > out.bytes_left ? size : (size + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;

    if (padded > out.bytes_left || TAR_BLOCK > out.bytes_left - padded)
        return -1;
    out.bytes_left -= padded + TAR_BLOCK;
    return 0;
}

/* Its name goes out, so it costs as much as a member with that name for content. */
static int skip(const char *path, const struct stat *info, int error)
{
    if (charge(strlen(path)) < 0)
        return fail(path, EFBIG);
    return put_record(ARCHIVE_SKIPPED, path, NULL, info ? (uint16_t)(info->st_mode >> 12) : 0, error);
}

static int pack_file(int directory, const char *name, const char *path)
{
    int fd = archive_open(directory, name, O_RDONLY | O_NONBLOCK | O_NOCTTY), result;
    struct stat info;

    if (fd < 0)
        return errno == ENOENT ? 0 : skip(path, NULL, errno);
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode))
        result = skip(path, &info, 0);
    else if (charge((uint64_t)info.st_size) < 0)
        result = fail(path, EFBIG);
    else if ((result = put_record(ARCHIVE_FILE, path, &info, info.st_mode & PERMISSIONS, 0)) == 0)
        result = archive_put_content(fd, (uint64_t)info.st_size);
    int error = errno;
    close(fd);
    return errno = error, result;
}

static int pack_directory(const char *path, const struct stat *info)
{
    if (archive_remember(path) < 0)
        return -1;
    if (charge(0) < 0)
        return fail(path, EFBIG);
    return put_record(ARCHIVE_DIRECTORY, path, info, info->st_mode & PERMISSIONS, 0);
}

static int pack_entry(int directory, const char *above, const char *name)
{
    char path[ARCHIVE_MAX_PATH + 1];
    struct stat info;
    int length = snprintf(path, sizeof path, "%s%s%s", above, *above ? "/" : "", name);

    if (out.entries_left-- == 0)
        return fail(above, E2BIG);
    if (length < 0 || (size_t)length >= sizeof path)
        return skip(above, NULL, ENAMETOOLONG);
    if (fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : skip(path, NULL, errno);
    if (S_ISREG(info.st_mode))
        return pack_file(directory, name, path);
    return S_ISDIR(info.st_mode) ? pack_directory(path, &info) : skip(path, &info, 0);
}

static int pack_below(int base, const char *path)
{
    int fd = archive_open(base, *path ? path : ".", O_RDONLY | O_DIRECTORY), result = 0;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;

    if (directory == NULL)
        return *path ? skip(path, NULL, errno) : -1;
    while (result == 0 && (entry = readdir(directory)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            result = pack_entry(fd, path, entry->d_name);
    int error = errno;
    closedir(directory);
    return errno = error, result;
}

static int pack_all(int base)
{
    struct archive_record end = {.magic = ARCHIVE_MAGIC, .kind = ARCHIVE_END};

    return archive_walk(base, pack_below) < 0 || archive_put(&end, sizeof end) < 0 ? -1 : archive_flush();
}

int archive_pack(int target, const char *path, uint64_t max_bytes, uint64_t max_entries)
{
    int base = archive_base(path, 0);

    if (base < 0)
        return -1;
    archive_begin(target);
    out.bytes_left = max_bytes;
    out.entries_left = max_entries;
    int result = pack_all(base), error = errno;
    close(base);
    return errno = error, result;
}
