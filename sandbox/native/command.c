/* One command inside a jail: the child's way from fork to exec, and its keeper.
 *
 * Invariant: before exec the child holds nothing of the agent's but the descriptors that the
 * engine attached for it. What goes wrong in our own set-up is told through the shared slot;
 * what is the command's own doing (no such program, no such directory) is told on its stderr,
 * with a shell's exit codes. */
#define _GNU_SOURCE
#include "archive.h"
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SPARE_FD 128
#define EXIT_NOT_EXECUTABLE 126
#define EXIT_NOT_FOUND 127

extern char **environ;
static char *words[WIRE_MAX_STRINGS], *environment[WIRE_MAX_STRINGS];
static void *shared, *agents_frames; /* the slots, the frames */
static size_t shared_bytes, agents_bytes;

struct command_slot *command_slots(int count, void *frames, size_t num_bytes)
{
    agents_frames = frames;
    agents_bytes = num_bytes;
    shared_bytes = sizeof(struct command_slot) * (size_t)count;
    shared = mmap(NULL, shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return shared == MAP_FAILED ? NULL : shared;
}

static void reset_signals(void)
{
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* How many of the STDIO descriptors, the last ones, are a session's and not its shell's. */
static uint32_t num_aside(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    uint32_t count = 0;

    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_HOLDER)
            wire_u32(&entry, &count);
    return count;
}

/* Reads the strings into words and environment; everything else into its place. */
static int parse(const struct wire_frame *frame, const char **cwd, uint32_t *num_stdio)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    int num_words = 0, num_env = 0;
    char *text;

    while (wire_next(&cursor, &entry) == 1) {
        if (entry.tag == TAG_STDIO && !wire_u32(&entry, num_stdio))
            return -1;
        if (entry.tag != TAG_ARGV && entry.tag != TAG_ENV && entry.tag != TAG_CWD)
            continue;
        if ((text = (char *)(uintptr_t)wire_string(&entry)) == NULL)
            return -1;
        if (entry.tag == TAG_CWD)
            *cwd = text;
        else if (entry.tag == TAG_ARGV && num_words < WIRE_MAX_STRINGS - 1)
            words[num_words++] = text;
        else if (entry.tag == TAG_ENV && num_env < WIRE_MAX_STRINGS - 1)
            environment[num_env++] = text;
        else
            return errno = E2BIG, -1;
    }
    words[num_words] = environment[num_env] = NULL;
    if (num_words == 0 || *num_stdio > (uint32_t)frame->num_fds)
        return errno = EPROTO, -1;
    return 0;
}

/* Joins the cgroups whose cgroup.procs files follow the stdio descriptors. */
static int join(const struct wire_frame *frame, uint32_t num_stdio)
{
    for (int i = (int)num_stdio; i < frame->num_fds; i++)
        if (write(frame->fds[i], "0", 1) != 1)
            return -1;
    return 0;
}

static int set_limits(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    struct wire_rlimit limit;

    while (wire_next(&cursor, &entry) == 1) {
        if (entry.tag != TAG_RLIMIT)
            continue;
        if (entry.length != sizeof limit)
            return errno = EPROTO, -1;
        memcpy(&limit, entry.data, sizeof limit);
        struct rlimit old, value = {.rlim_cur = limit.soft, .rlim_max = limit.hard};
        if (getrlimit((int)limit.resource, &old) < 0)
            return -1;
        if (value.rlim_max > old.rlim_max)
            value.rlim_max = old.rlim_max;
        if (value.rlim_cur > value.rlim_max)
            value.rlim_cur = value.rlim_max;
        if (setrlimit((int)limit.resource, &value) < 0)
            return -1;
    }
    return 0;
}

static int arrange_fds(const struct wire_frame *frame, uint32_t num_stdio)
{
    int moved[WIRE_MAX_FDS];

    for (uint32_t i = 0; i < num_stdio; i++)
        if ((moved[i] = fcntl(frame->fds[i], F_DUPFD_CLOEXEC, SPARE_FD)) < 0)
            return -1;
    for (uint32_t i = 0; i < num_stdio; i++)
        if (dup2(moved[i], (int)i) < 0)
            return -1;
    return 0;
}

_Noreturn static void complain(const char *what, int code)
{
    dprintf(STDERR_FILENO, "rollout: %s: %s\n", what, strerror(errno));
    _exit(code);
}

_Noreturn static void child(const struct wire_frame *frame, struct command_slot *slot)
{
    const char *cwd = "/";
    uint32_t num_stdio = 0, aside = num_aside(frame);

    reset_signals();
    setsid();
    /* The order matters: descriptors move (and need numbers) before the limit on them is set. */
    if (parse(frame, &cwd, &num_stdio) < 0 || aside > num_stdio || join(frame, num_stdio) < 0 ||
        (aside == 2 && ioctl(frame->fds[num_stdio - 2], TIOCSCTTY, 0) < 0) ||
        arrange_fds(frame, num_stdio - aside) < 0 || set_limits(frame) < 0) {
        slot->setup_errno = errno;
        _exit(EXIT_NOT_EXECUTABLE);
    }
    /* Everything above the command's own descriptors closes at exec: all are close-on-exec. */
    if (chdir(cwd) < 0)
        complain(cwd, EXIT_NOT_EXECUTABLE);
    if (__atomic_load_n(&slot->killed, __ATOMIC_SEQ_CST))
        kill(getpid(), SIGKILL);
    environ = environment;
    execvp(words[0], words);
    complain(words[0], errno == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_EXECUTABLE);
}

/* The process that holds what a session's shell is to open. It is the one process of ours that the sandboxed code may
 * look into (the shell opens descriptors through its /proc), so first it forgets what it has of the agent: the memory
 * in which commands report how they ended, and the frames. */
_Noreturn static void hold(const struct wire_frame *frame, uint32_t num_stdio, pid_t shell)
{
    int engine = frame->fds[num_stdio - 1];

    reset_signals();
    if (join(frame, num_stdio) < 0 || (engine = fcntl(engine, F_DUPFD_CLOEXEC, SPARE_FD)) < 0 ||
        (shared != NULL && munmap(shared, shared_bytes) < 0) ||
        (agents_frames != NULL && madvise(agents_frames, agents_bytes, MADV_DONTNEED) < 0)) /* private: they become zeros */
        _exit(EXIT_NOT_EXECUTABLE);
    for (int fd = 3; fd < SPARE_FD; fd++)
        close(fd);
    session_hold(engine, shell);
}

static void start_holder(const struct wire_frame *frame, pid_t shell)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    uint32_t num_stdio = 0;

    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_STDIO)
            wire_u32(&entry, &num_stdio);
    if (num_stdio > 0 && num_stdio <= (uint32_t)frame->num_fds && fork() == 0)
        hold(frame, num_stdio, shell);
}

/* A subreaper above one command: orphans of the command become its children, so that descent
 * stays known. It reports the foreground process at once, and ends when it has no child left. */
_Noreturn static void keep(const struct wire_frame *frame, struct command_slot *slot, int wake)
{
    struct rusage usage;
    int status;
    pid_t pid, foreground;

    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "rollout-keeper");
    setsid();
    foreground = fork();
    if (foreground == 0)
        child(frame, slot);
    if (foreground < 0) {
        slot->setup_errno = errno;
        _exit(EXIT_NOT_EXECUTABLE);
    }
    if (num_aside(frame) > 0)
        start_holder(frame, foreground);
    for (int fd = 3; fd < SPARE_FD; fd++)
        if (fd != wake)
            close(fd); /* the command's pipes above all: their end must be seen */
    while ((pid = wait4(-1, &status, 0, &usage)) > 0 || errno == EINTR)
        if (pid == foreground) {
            uint64_t one = 1;
            slot->status = status;
            slot->usage = usage;
            __atomic_store_n(&slot->done, 1, __ATOMIC_RELEASE);
            if (write(wake, &one, sizeof one) < 0)
                break;
        }
    _exit(0);
}

pid_t command_start(const struct wire_frame *frame, struct command_slot *slot, int wake)
{
    pid_t pid = fork();

    if (pid == 0 && wake >= 0)
        keep(frame, slot, wake);
    if (pid == 0)
        child(frame, slot);
    return pid;
}

static int transfer(const struct wire_frame *frame, const char *path, uint32_t mode, struct wire_caps caps)
{
    switch (frame->header.kind) {
    case WIRE_PUT:
        return transfer_copy_in(frame->fds[0], path, (mode_t)mode);
    case WIRE_UNPACK:
        return archive_unpack(frame->fds[0], frame->fds[1], path);
    default:
        return archive_pack(frame->fds[0], path, caps.num_bytes, caps.num_entries);
    }
}

pid_t command_transfer(const struct wire_frame *frame, struct command_slot *slot)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    struct wire_caps caps = {0};
    const char *path = NULL;
    uint32_t mode = 0644, num_pipes = 0, wanted = frame->header.kind == WIRE_UNPACK ? 2 : 1;
    pid_t pid = fork();

    if (pid != 0)
        return pid;
    reset_signals();
    setsid();
    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_PATH)
            path = wire_string(&entry);
        else if (entry.tag == TAG_MODE)
            wire_u32(&entry, &mode);
        else if (entry.tag == TAG_STDIO)
            wire_u32(&entry, &num_pipes);
        else if (entry.tag == TAG_CAPS && entry.length == sizeof caps)
            memcpy(&caps, entry.data, sizeof caps);
    if (path == NULL || num_pipes != wanted || (uint32_t)frame->num_fds < wanted) {
        errno = EPROTO;
    } else if (join(frame, wanted) == 0 && set_limits(frame) == 0) {
        signal(SIGXFSZ, SIG_IGN);
        _exit(transfer(frame, path, mode, caps) == 0 ? 0 : errno ? errno & 0xff : EIO);
    }
    slot->setup_errno = errno;
    _exit(EXIT_NOT_EXECUTABLE);
}
