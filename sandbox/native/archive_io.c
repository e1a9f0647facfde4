/* Whole reads and writes of a pipe, and directories that are opened without following any link. */
#define _GNU_SOURCE
#include "archive.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int archive_read(int fd, void *data, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t got = read(fd, (char *)data + done, length - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return errno = got < 0 ? errno : EPROTO, -1;
        done += (size_t)got;
    }
    return 0;
}

int archive_write(int fd, const void *data, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t put = write(fd, (const char *)data + done, length - done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        done += (size_t)put;
    }
    return 0;
}

int archive_open(int directory, const char *path, int flags)
{
    struct open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_NOFOLLOW | O_CLOEXEC),
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };

    return (int)syscall(SYS_openat2, directory, path, &how, sizeof how);
}

int archive_make(int directory, const char *path)
{
    char copy[4096];
    int at, next;

    if (strlen(path) >= sizeof copy)
        return errno = ENAMETOOLONG, -1;
    strcpy(copy, path);
    at = archive_open(directory, ".", O_PATH | O_DIRECTORY);
    for (char *rest = copy, *name; at >= 0 && (name = strsep(&rest, "/")) != NULL; at = next) {
        if (*name == 0) {
            next = at;
            continue;
        }
        next = archive_open(at, name, O_PATH | O_DIRECTORY);
        if (next < 0 && errno == ENOENT && (mkdirat(at, name, 0755) == 0 || errno == EEXIST))
            next = archive_open(at, name, O_PATH | O_DIRECTORY);
        int error = errno;
        close(at);
        errno = error;
    }
    return at;
}

int archive_enter(int parent, const char *name)
{
    char path[64];
    struct stat info;

    if (mkdirat(parent, name, 0700) < 0 && errno != EEXIST)
        return -1;
    int fd = archive_open(parent, name, O_PATH | O_DIRECTORY);
    if (fd < 0)
        return -1;
    int result = fstat(fd, &info);
    if (result == 0 && (info.st_mode & 0700) != 0700) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* that one, wherever its name leads now */
        result = chmod(path, 0700);
    }
    int error = errno;
    close(fd);
    return errno = error, result;
}

int archive_base(const char *path, int make)
{
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

    if (root < 0)
        return -1;
    path += strspn(path, "/");
    int base = make ? archive_make(root, path) : archive_open(root, *path ? path : ".", O_PATH | O_DIRECTORY);
    int error = errno;
    close(root);
    return errno = error, base;
}
