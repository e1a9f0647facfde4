/* Killing by descent, inside a jail without cgroups.
 *
 * Every process in here descends from pid 1 through one of its children: a keeper, or an orphan
 * that no keeper holds. A sweep stops and then kills everything below one keeper, again and again
 * until a look at /proc during which nobody was born finds nobody. Invariant: nobody who was to die
 * is left, and others are not killed: those who outrun the looks (they fork and end without rest)
 * are met while the whole jail stands still; only who outlasts that as well takes the jail along. */
#define _GNU_SOURCE
#include "native.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_PROCESSES 32768
#define GENTLE_MS 500
#define MAX_LOOKS 200 /* after that */
#define UNKNOWN -1

static struct {
    pid_t pid, parent;
    pid_t top; /* see `find_tops` */
} seen[MAX_PROCESSES];

static int by_pid(const void *one, const void *other)
{
    pid_t a = *(const pid_t *)one, b = *(const pid_t *)other;

    return (a > b) - (a < b);
}

/* What /proc/PID/stat tells. A process whose first thread alone has ended looks like a dead one, and is not. */
static int lives(const char *text, pid_t *parent)
{
    const char *after = strrchr(text, ')'); /* the name before it is the process's own choice */
    int num_threads;
    char state;

    return after != NULL &&
           sscanf(after + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d", &state,
                  parent, &num_threads) == 3 &&
           (state != 'Z' || num_threads > 1);
}

static int64_t clock_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Everybody that lives, by pid; -1 where the kernel has no room to show them, or when the time is over: to who follows
 * those that fork and end, the list may have no end. */
static int look(int64_t until_ms)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int count = 0;

    if (proc == NULL)
        return -1;
    while (count >= 0 && count < MAX_PROCESSES && (entry = readdir(proc)) != NULL) {
        char path[64], text[512];
        pid_t pid = atoi(entry->d_name);
        if (pid <= 1)
            continue;
        if (clock_ms() > until_ms) {
            count = -1;
            continue;
        }
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            count = errno == ENOENT || errno == ESRCH ? count : -1;
            continue;
        }
        ssize_t got = read(fd, text, sizeof text - 1);
        close(fd);
        text[got > 0 ? got : 0] = 0;
        if (lives(text, &seen[count].parent))
            seen[count++].pid = pid;
    }
    closedir(proc);
    if (count > 0)
        qsort(seen, (size_t)count, sizeof *seen, by_pid);
    return count;
}

static int find(pid_t pid, int count)
{
    const void *found = bsearch(&pid, seen, (size_t)count, sizeof *seen, by_pid);

    return found ? (int)((const unsigned char *)found - (const unsigned char *)seen) / (int)sizeof *seen : -1;
}

/* Notes everybody's top: the ancestor that is a child of pid 1, or UNKNOWN where a parent has just ended (the
 * next look sees where its children went). Each step on the way up is walked once, so that a long chain costs
 * no more. */
static void find_tops(int count)
{
    for (int i = 0; i < count; i++)
        seen[i].top = 0;
    for (int i = 0; i < count; i++) {
        int at = i, up;
        while (seen[at].top == 0) {
            seen[at].top = seen[at].pid; /* until it is known; it also ends a circle of pids that were given out anew */
            up = seen[at].parent > 1 ? find(seen[at].parent, count) : -1;
            if (up < 0)
                break;
            at = up;
        }
        if (seen[at].top == seen[at].pid && seen[at].parent > 1)
            seen[at].top = UNKNOWN;
        pid_t top = seen[at].top;
        for (int on = i; on != at; on = find(seen[on].parent, count))
            seen[on].top = top;
    }
}

static int is_keeper(pid_t pid, const pid_t *keepers, int num_keepers)
{
    for (int i = 0; i < num_keepers; i++)
        if (keepers[i] == pid)
            return 1;
    return 0;
}

/* How many are to go, or may be (UNKNOWN); those that surely are get the signal. */
static int signal_all(pid_t keeper, const pid_t *keepers, int num_keepers, int number, int64_t until_ms)
{
    int count = look(until_ms), left = 0;

    if (count < 0)
        return 1;
    find_tops(count);
    for (int i = 0; i < count; i++) {
        pid_t top = seen[i].top;
        if (is_keeper(seen[i].pid, keepers, num_keepers))
            continue;
        if (top != UNKNOWN && (keeper ? top != keeper : is_keeper(top, keepers, num_keepers)))
            continue;
        if (top != UNKNOWN)
            kill(seen[i].pid, number);
        left++;
    }
    return left;
}

/* The process number that was given out last in here, or -1. */
static int newest(void)
{
    char text[128], *last = NULL;
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, text, sizeof text - 1);

    close(fd);
    text[got > 0 ? got : 0] = 0;
    last = strrchr(text, ' ');
    return last ? atoi(last) : -1;
}

void sweep_descendants(pid_t keeper, const pid_t *keepers, int num_keepers)
{
    int64_t until_ms = clock_ms() + GENTLE_MS;
    int still = 0;

    for (int looks = 0; looks < MAX_LOOKS; looks += still) {
        if (!still && clock_ms() > until_ms) {
            still = 1;
            until_ms = INT64_MAX;
        }
        if (still)
            kill(-1, SIGSTOP);
        int before = newest();
        if (signal_all(keeper, keepers, num_keepers, SIGSTOP, until_ms) == 0 && before >= 0 && newest() == before) {
            if (still)
                kill(-1, SIGCONT);
            return;
        }
        signal_all(keeper, keepers, num_keepers, SIGKILL, until_ms);
        usleep(500);
    }
    kill(-1, SIGKILL); /* the kernel lets nobody fork away from a signal to all */
}
