/* The holder of a session: the process beside its shell, below the same keeper.
 *
 * The shell opens the script and the streams of a run through this process's /proc, so it is dumpable and holds
 * nothing but those, its socket to the engine, and a list of who lived when the run began. What the sandboxed code
 * can do to it spoils its own session and nothing else; the engine checks what it says and waits no longer than its
 * deadline. Invariant: it signals only what descends from its keeper, never the keeper, and spares what lived (or
 * descends from what lived) when the run began. */
#define _GNU_SOURCE
#include "native.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define FIRST_HELD 40 /* script, stdin, stdout, stderr: see sandbox/sessions/dialect.py */
#define NUM_HELD 4
#define MAX_PROCESSES 32768
#define MAX_LOOKS 200

enum verdict { UNKNOWN, FOREIGN, SPARED, STARTED };

struct process {
    pid_t pid, parent;
    uint64_t started; /* in ticks; a number that was given out anew is told by it */
    uint64_t cpu_ticks; /* with the children that it waited for */
    enum verdict verdict;
};

static struct process seen[MAX_PROCESSES], spared[MAX_PROCESSES];
static int num_spared;
static unsigned char buffer[WIRE_MAX_FRAME];
static pid_t keeper, shell, own;

static int by_pid(const void *one, const void *other)
{
    pid_t a = ((const struct process *)one)->pid, b = ((const struct process *)other)->pid;

    return (a > b) - (a < b);
}

/* Reads what the kernel tells of a process; 0 for one that is dead or gone. */
static int read_process(pid_t pid, struct process *process)
{
    char path[64], text[512], state;
    unsigned long long user, system, started;
    long long waited_user, waited_system;
    int num_threads;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    const char *after = strrchr(text, ')'); /* the name before it is the process's own choice */
    if (after == NULL || sscanf(after + 1,
                                " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %lld %lld %*d %*d %d %*d %llu",
                                &state, &process->parent, &user, &system, &waited_user, &waited_system,
                                &num_threads, &started) != 8)
        return 0;
    process->pid = pid;
    process->started = started;
    process->cpu_ticks = user + system + (uint64_t)(waited_user + waited_system);
    process->verdict = UNKNOWN;
    return state != 'Z' || num_threads > 1; /* whose first thread alone has ended lives */
}

/* Everybody that lives but pid 1, by pid. */
static int look(void)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int count = 0;

    while (proc && count < MAX_PROCESSES && (entry = readdir(proc)) != NULL) {
        pid_t pid = atoi(entry->d_name);
        count += pid > 1 && read_process(pid, &seen[count]);
    }
    if (proc)
        closedir(proc);
    qsort(seen, (size_t)count, sizeof *seen, by_pid);
    return count;
}

static struct process *find(pid_t pid, struct process *among, int count)
{
    struct process wanted = {.pid = pid};

    return bsearch(&wanted, among, (size_t)count, sizeof wanted, by_pid);
}

static int was_there(const struct process *process)
{
    const struct process *before = find(process->pid, spared, num_spared);

    return before != NULL && before->started == process->started;
}

/* What a process is by itself, or UNKNOWN where its parent decides. */
static enum verdict alone(const struct process *process)
{
    if (process->pid == shell || process->pid == own || was_there(process))
        return SPARED;
    if (process->pid == keeper || process->parent <= 1)
        return FOREIGN;
    if (process->parent == keeper || process->parent == shell)
        return STARTED;
    return UNKNOWN;
}

/* Looks at everybody and judges; each step on the way up is walked once. */
static int judge(void)
{
    int count = look();

    for (int i = 0; i < count; i++) {
        struct process *at = &seen[i];
        enum verdict found = UNKNOWN;
        int steps = 0;
        for (; at && steps <= count; at = find(at->parent, seen, count), steps++)
            if ((found = at->verdict ? at->verdict : alone(at)) != UNKNOWN)
                break;
        if (found == UNKNOWN)
            found = FOREIGN; /* a parent has just ended: the next look sees where its children went */
        for (at = &seen[i]; at && steps-- >= 0 && at->verdict == UNKNOWN; at = find(at->parent, seen, count))
            at->verdict = found;
    }
    return count;
}

static int signal_started(int number)
{
    int hit = 0;

    for (int i = judge() - 1; i >= 0; i--) /* the last of a pipeline first: the others' end is no news to it then */
        if (seen[i].verdict == STARTED) {
            kill(seen[i].pid, number);
            hit++;
        }
    return hit;
}

static int sweep(void)
{
    int hit = 0;

    for (int looks = 0; looks < MAX_LOOKS; looks++) {
        if ((hit = signal_started(SIGSTOP)) == 0)
            return 0;
        signal_started(SIGKILL);
        usleep(500);
    }
    return hit;
}

static void note_who_lives(void)
{
    int count;

    num_spared = 0;
    count = judge();
    for (int i = 0; i < count; i++)
        if (seen[i].verdict == STARTED)
            spared[num_spared++] = seen[i];
}

static uint64_t shell_cpu_us(void)
{
    struct process process = {0};

    read_process(shell, &process);
    return process.cpu_ticks * 1000000u / (uint64_t)sysconf(_SC_CLK_TCK);
}

/* Where the shell is; a directory that is gone has no name. */
static void put_cwd(struct wire_out *out)
{
    char link[64], path[4096];
    struct stat here, there;

    snprintf(link, sizeof link, "/proc/%d/cwd", shell);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got <= 0)
        return;
    path[got] = 0;
    if (stat(link, &here) == 0 && stat(path, &there) == 0 && here.st_ino == there.st_ino && here.st_dev == there.st_dev)
        wire_put(out, TAG_CWD, path, (size_t)got + 1);
}

static int answer(int engine, uint32_t id, int left, int with_cwd)
{
    struct wire_held held = {.pid = (uint32_t)own, .num_left = (uint32_t)left, .cpu_us = shell_cpu_us()};
    struct statfs disk = {0};
    struct wire_out out;

    held.free_blocks = held.free_inodes = 1;
    if (statfs("/workspace", &disk) == 0) {
        held.free_blocks = disk.f_bavail;
        held.free_inodes = disk.f_ffree;
    }
    wire_begin(&out, WIRE_HELD, id);
    wire_put(&out, TAG_HELD, &held, sizeof held);
    if (with_cwd)
        put_cwd(&out);
    return wire_send(engine, &out, NULL, 0);
}

static void drop(void)
{
    for (int i = 0; i < NUM_HELD; i++)
        close(FIRST_HELD + i);
}

static void prepare(const struct wire_frame *frame)
{
    drop();
    for (int i = 0; i < frame->num_fds && i < NUM_HELD; i++)
        dup3(frame->fds[i], FIRST_HELD + i, O_CLOEXEC);
    note_who_lives();
}

_Noreturn void session_hold(int engine, pid_t of)
{
    struct wire_frame frame;

    own = getpid();
    keeper = getppid();
    shell = of;
    setsid();
    prctl(PR_SET_NAME, "rollout-holder");
    prctl(PR_SET_DUMPABLE, 1);
    signal(SIGPIPE, SIG_IGN);
    while (wire_receive(engine, buffer, &frame, 0) == 1) {
        int left = 0, said = 0;
        switch (frame.header.kind) {
        case WIRE_PREPARE:
            prepare(&frame);
            break;
        case WIRE_INTERRUPT:
            kill(shell, SIGINT); /* first, so that it knows why its child ends */
            kill(shell, SIGCONT);
            left = signal_started(SIGINT);
            break;
        case WIRE_SWEEP:
            left = sweep();
            break;
        case WIRE_DROP:
            drop();
            said = 1;
            break;
        }
        wire_close_fds(&frame);
        if (!said && answer(engine, frame.header.id, left, frame.header.kind == WIRE_LOOK) < 0)
            break;
    }
    _exit(0);
}
