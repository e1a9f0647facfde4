/* Cgroup files and directories as the warden handles them: plain system calls, errno results. */
#define _GNU_SOURCE
#include "native.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int file_write(const char *path, const char *value)
{
    size_t length = strlen(value);
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return -1;
    ssize_t done = write(fd, value, length);
    int error = done == (ssize_t)length ? 0 : (done < 0 ? errno : EIO);
    close(fd);
    return error ? (errno = error, -1) : 0;
}

int cgroup_make(const char *path)
{
    return mkdir(path, 0755) == 0 || errno == EEXIST ? 0 : -1;
}

/* Calls visit(child path) for every directory directly below path. */
static void each_child(const char *path, void (*visit)(const char *))
{
    DIR *dir = opendir(path);
    struct dirent *entry;

    if (dir == NULL)
        return;
    while ((entry = readdir(dir)) != NULL) {
        char child[4096];
        if (entry->d_type != DT_DIR || strcmp(entry->d_name, ".") == 0 ||
            strcmp(entry->d_name, "..") == 0)
            continue;
        if ((size_t)snprintf(child, sizeof child, "%s/%s", path, entry->d_name) < sizeof child)
            visit(child);
    }
    closedir(dir);
}

static void remove_below(const char *path)
{
    each_child(path, remove_below);
    rmdir(path);
}

int cgroup_remove(const char *path)
{
    if (rmdir(path) == 0 || errno == ENOENT)
        return 0;
    each_child(path, remove_below);
    return rmdir(path) == 0 || errno == ENOENT ? 0 : -1;
}

static void kill_listed(const char *path)
{
    char name[4096];
    FILE *procs;
    int pid;

    each_child(path, kill_listed);
    snprintf(name, sizeof name, "%s/cgroup.procs", path);
    if ((procs = fopen(name, "re")) == NULL)
        return;
    while (fscanf(procs, "%d", &pid) == 1)
        if (pid > 1 && pid != getpid())
            kill(pid, SIGKILL);
    fclose(procs);
}

int cgroup_kill(const char *path)
{
    char name[4096];

    snprintf(name, sizeof name, "%s/cgroup.kill", path);
    if (file_write(name, "1") < 0)
        kill_listed(path);
    return 0;
}
