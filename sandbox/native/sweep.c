/* Killing by descent, inside a jail without cgroups.
 *
 * Every process in here descends from pid 1 through one of its children: a keeper, or an orphan
 * that no keeper holds. A sweep stops and then kills everything below one keeper, again and again
 * until a look at /proc finds nobody, so that a process forked between look and kill is found by
 * the next look. */
#define _GNU_SOURCE
#include "native.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PROCESSES 32768
#define MAX_LOOKS 200

static struct {
    pid_t pid, parent;
} seen[MAX_PROCESSES];

static int look(void)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int count = 0;

    while (proc && (entry = readdir(proc)) != NULL && count < MAX_PROCESSES) {
        char path[64], text[512], *after;
        pid_t pid = atoi(entry->d_name);
        if (pid <= 1)
            continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        ssize_t got = read(fd, text, sizeof text - 1);
        close(fd);
        text[got > 0 ? got : 0] = 0;
        if ((after = strrchr(text, ')')) == NULL || after[1] == 0 || after[2] == 'Z')
            continue;
        seen[count].pid = pid;
        seen[count++].parent = atoi(after + 3);
    }
    if (proc)
        closedir(proc);
    return count;
}

/* The ancestor of a process that is a child of pid 1 (or of a keeper that is one). */
static pid_t top_of(int index, int count)
{
    pid_t pid = seen[index].pid, parent = seen[index].parent;

    for (int depth = 0; parent > 1 && depth < count; depth++) {
        int i = 0;
        while (i < count && seen[i].pid != parent)
            i++;
        if (i == count)
            break; /* its parent has just ended; the next look sees where it went */
        pid = parent;
        parent = seen[i].parent;
    }
    return pid;
}

static int is_keeper(pid_t pid, const pid_t *keepers, int num_keepers)
{
    for (int i = 0; i < num_keepers; i++)
        if (keepers[i] == pid)
            return 1;
    return 0;
}

static int signal_all(pid_t keeper, const pid_t *keepers, int num_keepers, int number)
{
    int count = look(), hit = 0;

    for (int i = 0; i < count; i++) {
        if (is_keeper(seen[i].pid, keepers, num_keepers))
            continue;
        pid_t top = top_of(i, count);
        int kept = is_keeper(top, keepers, num_keepers);
        if (keeper ? top == keeper : !kept) {
            kill(seen[i].pid, number);
            hit++;
        }
    }
    return hit;
}

void sweep_descendants(pid_t keeper, const pid_t *keepers, int num_keepers)
{
    for (int looks = 0; looks < MAX_LOOKS; looks++) {
        if (signal_all(keeper, keepers, num_keepers, SIGSTOP) == 0)
            return;
        signal_all(keeper, keepers, num_keepers, SIGKILL);
        usleep(500);
    }
}
