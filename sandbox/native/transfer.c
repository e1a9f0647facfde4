/* Files opened on the engine's behalf, with the sandbox's own rights and inside its root.
 *
 * Invariant: only regular files; the last component is never followed when it is a symbolic link,
 * no magic link of /proc is (they would reach the agent's own descriptors), and no open blocks. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int open_inside(const char *path, int flags, mode_t mode)
{
    struct open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC),
        .mode = flags & O_CREAT ? mode : 0,
        .resolve = RESOLVE_NO_MAGICLINKS,
    };

    if (path[0] != '/')
        return errno = EINVAL, -1;
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0)
        return -1;
    struct stat info;
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL, -1;
    }
    return fd;
}

int transfer_open_read(const char *path)
{
    return open_inside(path, O_RDONLY, 0);
}

static int make_parents(const char *path)
{
    char copy[4096];

    if (strlen(path) >= sizeof copy)
        return errno = ENAMETOOLONG, -1;
    strcpy(copy, path);
    for (char *slash = copy; (slash = strchr(slash + 1, '/')) != NULL; *slash = '/') {
        *slash = 0;
        if (mkdir(copy, 0755) < 0 && errno != EEXIST && errno != EROFS)
            return -1;
    }
    return 0;
}

int transfer_copy_in(int source, const char *path, mode_t mode)
{
    static char block[65536];
    ssize_t got;

    if (make_parents(path) < 0)
        return -1;
    int fd = open_inside(path, O_WRONLY | O_CREAT | O_TRUNC, mode);
    if (fd < 0)
        return -1;
    while ((got = read(source, block, sizeof block)) != 0) {
        if (got < 0)
            return -1;
        for (ssize_t done = 0, put; done < got; done += put)
            if ((put = write(fd, block + done, (size_t)(got - done))) < 0)
                return -1;
    }
    return fchmod(fd, mode & 07777);
}
