/* The agent: pid 1 of a jail, which runs commands and opens files for the engine.
 *
 * Invariant: it ends when the engine's socket closes, or at once (frozen or stopped as well) when
 * the warden dies, and the kernel then ends everything in its namespace. It serves only as pid 1, behind the system-call filter and without new privileges; it
 * holds no capability, installs no signal handler (so the kernel shields it from its own
 * namespace) and cannot be traced by what it runs. Commands are attributed through slots shared
 * with their child until it execs. */
#define _GNU_SOURCE
#include "native.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_COMMANDS 1024 /* that many more than the engine asks for at once (places.py) may be keepers */
#define SYNC_FD STDERR_FILENO

struct command {
    uint32_t id;
    pid_t pid; /* of the foreground process, or of its keeper; 0 for a free slot */
    int keeper;
    int reported;
};

static struct command commands[MAX_COMMANDS];
static struct command_slot *slots;
static unsigned char buffer[WIRE_MAX_FRAME] __attribute__((aligned(4096)));
static int engine_fd;

static void refuse(uint32_t id, int error)
{
    struct wire_out out;

    wire_begin(&out, WIRE_REFUSED, id);
    wire_put_u32(&out, TAG_ERRNO, (uint32_t)error);
    wire_send(engine_fd, &out, NULL, 0);
}

static uint64_t microseconds(struct timeval time)
{
    return (uint64_t)time.tv_sec * 1000000u + (uint64_t)time.tv_usec;
}

static void report(struct command *command, int status, const struct rusage *usage)
{
    struct wire_out out;
    struct statfs disk = {0};
    struct wire_result result = {
        .status = (uint32_t)status,
        .setup_errno = (uint32_t)slots[command - commands].setup_errno,
        .user_us = microseconds(usage->ru_utime),
        .system_us = microseconds(usage->ru_stime),
        .max_rss_bytes = (uint64_t)usage->ru_maxrss * 1024,
    };

    if (statfs("/workspace", &disk) == 0) {
        result.free_blocks = disk.f_bavail;
        result.free_inodes = disk.f_ffree;
    }
    wire_begin(&out, WIRE_EXITED, command->id);
    wire_put(&out, TAG_RESULT, &result, sizeof result);
    wire_send(engine_fd, &out, NULL, 0);
    command->reported = 1;
}

/* Who holds no orphan of others: keepers, and helpers that move files. */
static int list_children(pid_t *children)
{
    int count = 0;

    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].pid)
            children[count++] = commands[i].pid;
    return count;
}

/* A command whose keeper was killed is over: what it started has nobody but this process any more, and is
 * killed before the end is reported. The same holds for what others lost in the same way. */
static void end_unkept(struct command *const *lost, int num_lost)
{
    pid_t children[MAX_COMMANDS];

    sweep_descendants(0, children, list_children(children));
    for (int i = 0; i < num_lost; i++)
        if (!lost[i]->reported)
            report(lost[i], slots[lost[i] - commands].status, &slots[lost[i] - commands].usage);
}

static void reap(void)
{
    struct command *lost[MAX_COMMANDS];
    struct rusage usage;
    int status, num_lost = 0;
    pid_t pid;

    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0)
        for (int i = 0; i < MAX_COMMANDS; i++)
            if (commands[i].pid == pid) {
                if (!slots[i].done) { /* not told by its keeper */
                    slots[i].status = status;
                    slots[i].usage = usage;
                }
                commands[i].pid = 0;
                if (commands[i].keeper && WIFSIGNALED(status))
                    lost[num_lost++] = &commands[i];
                else if (!commands[i].reported)
                    report(&commands[i], slots[i].status, &slots[i].usage);
                break;
            }
    if (num_lost > 0)
        end_unkept(lost, num_lost);
}

/* Keepers whose command has ended while its background children live on. */
static void collect_kept(int wake)
{
    uint64_t count;

    if (read(wake, &count, sizeof count) < 0)
        return;
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].pid && commands[i].keeper && !commands[i].reported &&
            __atomic_load_n(&slots[i].done, __ATOMIC_ACQUIRE))
            report(&commands[i], slots[i].status, &slots[i].usage);
}

static void start(struct wire_frame *frame, int wake)
{
    uint32_t id = frame->header.id, keeper = 0;
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    int free_slot = -1;

    for (int i = MAX_COMMANDS - 1; i >= 0; i--)
        if (commands[i].pid == 0)
            free_slot = i;
    if (free_slot < 0 || frame->lost) {
        refuse(id, frame->lost ? EMFILE : EBUSY);
        return;
    }
    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_KEEPER)
            wire_u32(&entry, &keeper);
    memset(&slots[free_slot], 0, sizeof slots[free_slot]);
    pid_t pid = frame->header.kind == WIRE_RUN
                    ? command_start(frame, &slots[free_slot], keeper ? wake : -1)
                    : command_transfer(frame, &slots[free_slot]);
    if (pid < 0) {
        refuse(id, errno);
        return;
    }
    commands[free_slot] = (struct command){
        .id = id, .pid = pid, .keeper = keeper && frame->header.kind == WIRE_RUN};
}

/* Kills what a command started: its session here, everything else through its cgroup by the
 * engine; where there is no cgroup, by descent from its keeper. */
static void kill_command(uint32_t id)
{
    pid_t children[MAX_COMMANDS];

    for (int i = 0; i < MAX_COMMANDS; i++) {
        if (commands[i].pid == 0 || commands[i].id != id)
            continue;
        if (commands[i].keeper) {
            __atomic_store_n(&slots[i].killed, 1, __ATOMIC_SEQ_CST);
            sweep_descendants(commands[i].pid, children, list_children(children));
            kill(commands[i].pid, SIGCONT); /* what it kept may have stopped it */
        } else {
            kill(commands[i].pid, SIGKILL);
            kill(-commands[i].pid, SIGKILL);
        }
        return;
    }
}

static void open_file(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    struct wire_out out;
    const char *path = NULL;

    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_PATH)
            path = wire_string(&entry);
    int fd = path ? transfer_open_read(path) : (errno = EPROTO, -1);
    if (fd < 0) {
        refuse(frame->header.id, errno);
        return;
    }
    wire_begin(&out, WIRE_OPENED, frame->header.id);
    wire_send(engine_fd, &out, &fd, 1);
    close(fd);
}

/* What is used of the quota, and who lives in here. */
static void count_space(uint32_t id)
{
    struct wire_out out;
    struct statfs disk = {0};
    struct wire_space space = {0};
    struct dirent *entry;
    uint32_t ours = 1;
    DIR *proc = opendir("/proc");

    while (proc && (entry = readdir(proc)) != NULL)
        space.num_processes += entry->d_name[0] >= '0' && entry->d_name[0] <= '9';
    if (proc)
        closedir(proc);
    for (int i = 0; i < MAX_COMMANDS; i++)
        ours += commands[i].pid && commands[i].keeper;
    space.num_processes -= ours < space.num_processes ? ours : space.num_processes;
    if (statfs("/workspace", &disk) == 0) {
        space.used_bytes = (uint64_t)(disk.f_blocks - disk.f_bfree) * (uint64_t)disk.f_bsize;
        space.used_inodes = disk.f_files - disk.f_ffree;
    }
    wire_begin(&out, WIRE_SPACE, id);
    wire_put(&out, TAG_SPACE, &space, sizeof space);
    wire_send(engine_fd, &out, NULL, 0);
}

/* Ends a lease. What its commands would have reported is nobody's business any more. */
static void end_lease(uint32_t id)
{
    struct wire_residue residue = {0};
    struct wire_out out;

    clean(&residue);
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].pid) /* the others are not written: each page of an idle agent counts */
            commands[i].pid = 0;
    wire_begin(&out, WIRE_CLEANED, id);
    wire_put(&out, TAG_RESIDUE, &residue, sizeof residue);
    wire_send(engine_fd, &out, NULL, 0);
}

static void answer_ping(uint32_t id)
{
    struct wire_out out;

    wire_begin(&out, WIRE_PONG, id);
    wire_send(engine_fd, &out, NULL, 0);
}

static void on_engine(int wake)
{
    struct wire_frame frame;
    int got = wire_receive(engine_fd, buffer, &frame, MSG_DONTWAIT);

    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0)
        _exit(0); /* the engine is gone, and with this process everything in here */
    if (frame.header.kind != WIRE_CLEAN && frame.header.kind != WIRE_PING)
        clean_note();
    if (frame.header.kind == WIRE_RUN || frame.header.kind == WIRE_PUT ||
        frame.header.kind == WIRE_UNPACK || frame.header.kind == WIRE_PACK)
        start(&frame, wake);
    else if (frame.header.kind == WIRE_KILL)
        kill_command(frame.header.id);
    else if (frame.header.kind == WIRE_GET)
        open_file(&frame);
    else if (frame.header.kind == WIRE_STAT)
        count_space(frame.header.id);
    else if (frame.header.kind == WIRE_CLEAN)
        end_lease(frame.header.id);
    else if (frame.header.kind == WIRE_PING)
        answer_ping(frame.header.id);
    else
        refuse(frame.header.id, ENOSYS);
    wire_close_fds(&frame);
}

static int complain(const char *what)
{
    dprintf(SYNC_FD, "%s: %s", what, strerror(errno));
    return -1;
}

/* Installs the filter where the jail tool did not, and makes sure that there is one.
 *
 * nsjail takes policies in a language of its own (kafel), not a program. Another policy for the same
 * rules would be a second thing to get right, so the agent installs the very bytes that bubblewrap
 * is given: nothing but this function has run since nsjail's exec, and every later process inherits
 * it. Whatever fails here ends the jail, so no command ever runs unfiltered. */
static int seal(int filter)
{
    static struct sock_filter program[BPF_MAXINSNS];
    ssize_t size;

    if (filter >= 0) {
        size = read(filter, program, sizeof program);
        close(filter);
        if (size <= 0 || size % (ssize_t)sizeof *program != 0)
            return errno = EINVAL, complain("reading the system-call filter");
        struct sock_fprog whole = {.len = (unsigned short)((size_t)size / sizeof *program),
                                   .filter = program};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole) < 0)
            return complain("installing the system-call filter");
    }
    if (getpid() != 1 || prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1 ||
        prctl(PR_GET_SECCOMP) != SECCOMP_MODE_FILTER)
        return errno = EPERM, complain("the jail tool left something open");
    return 0;
}

static int exchange(uint16_t ours, uint16_t theirs)
{
    struct wire_frame frame;
    struct wire_out out;

    wire_begin(&out, ours, 0);
    if (wire_send(SYNC_FD, &out, NULL, 0) < 0 || wire_receive(SYNC_FD, buffer, &frame, 0) != 1)
        return -1;
    wire_close_fds(&frame);
    return frame.header.kind == theirs ? 0 : -1;
}

/* Tells the warden that pid 1 runs, binds this life to the warden's, and waits for the mounts.
 *
 * The kernel's signal for a parent's death is for the death of the parent of that moment, so the
 * warden first makes itself the parent (BIND); and it says nothing of a parent that died before, so
 * the warden must answer once more afterwards (GO). From then on a process that is frozen, stopped
 * or busy needs to do nothing in order to end. */
static int meet_warden(void)
{
    int null;

    if (exchange(WIRE_READY, WIRE_BIND) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 ||
        exchange(WIRE_BOUND, WIRE_GO) < 0)
        return -1;
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup3(null, 0, O_CLOEXEC) < 0 || dup3(null, 1, O_CLOEXEC) < 0 ||
        dup3(null, 2, O_CLOEXEC) < 0)
        return -1;
    close(null); /* above 2: those three were open, the jail's own words go to them */
    return 0;
}

int agent_main(int engine, int filter)
{
    sigset_t mask;

    engine_fd = engine;
    prctl(PR_SET_PDEATHSIG, 0); /* nsjail sets it; the warden is to end that supervisor, not us yet */
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rollout-agent");
    umask(022);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    fcntl(engine, F_SETFD, FD_CLOEXEC);
    slots = command_slots(MAX_COMMANDS, buffer, sizeof buffer);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (slots == NULL || signals < 0 || wake < 0 || seal(filter) < 0 || meet_warden() < 0)
        return 1;
    clean_begin();
    struct pollfd fds[] = {{.fd = engine, .events = POLLIN},
                           {.fd = signals, .events = POLLIN},
                           {.fd = wake, .events = POLLIN}};
    for (;;) {
        struct signalfd_siginfo info;
        if (poll(fds, 3, -1) < 0) {
            if (errno == EINTR)
                continue;
            return 1;
        }
        if (fds[1].revents) {
            while (read(signals, &info, sizeof info) == sizeof info)
                ;
            reap();
        }
        if (fds[2].revents)
            collect_kept(wake);
        if (fds[0].revents)
            on_engine(wake);
    }
}
