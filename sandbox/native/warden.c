/* The warden: one outside process per engine, which starts, mounts and ends its jails.
 *
 * Invariant: whatever was started here is dead, and whatever cgroup was made is removed, before
 * this process ends; it ends when the engine's socket closes, for any reason, or when the engine's
 * process ends while a fork of it keeps the socket open. When it is killed itself, every agent that
 * serves dies with it. It never blocks on a jail: children do the slow work, and everything else is
 * an event. */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum source { FROM_ENGINE, FROM_ENGINE_END, FROM_SIGNAL, FROM_SYNC, FROM_PIDFD };
struct warden warden;
static unsigned char buffer[WIRE_MAX_FRAME];

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void watch(int fd, enum source source, uint32_t id)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = ((uint64_t)source << 32) | id};
    epoll_ctl(warden.epoll, EPOLL_CTL_ADD, fd, &event);
}

void drop_fd(int *fd)
{
    if (*fd >= 0) {
        epoll_ctl(warden.epoll, EPOLL_CTL_DEL, *fd, NULL); /* a forked copy would keep it registered */
        close(*fd);
    }
    *fd = -1;
}

/* Keeps a frame's items past the receive buffer. */
int keep(struct wire_frame *kept, const struct wire_frame *frame)
{
    unsigned char *copy = malloc(frame->header.length + 1);

    if (copy == NULL)
        return -1;
    memcpy(copy, frame->items, frame->header.length);
    free((void *)(uintptr_t)kept->items);
    *kept = (struct wire_frame){.header = frame->header, .items = copy};
    return 0;
}

void tell(uint16_t kind, uint32_t id, uint32_t error, const char *text)
{
    struct wire_out out;

    wire_begin(&out, kind, id);
    if (error)
        wire_put_u32(&out, TAG_ERRNO, error);
    if (text)
        wire_put(&out, TAG_TEXT, text, strlen(text) + 1);
    /* A full socket is waited for, but never longer than the engine lives: a fork of it may hold the other end. */
    struct pollfd either[] = {{.fd = warden.engine, .events = POLLOUT},
                              {.fd = warden.engine_end, .events = POLLIN}};
    while (poll(either, 2, -1) < 0)
        ;
    if (!either[1].revents)
        wire_send(warden.engine, &out, NULL, 0); /* a dead engine shows as EOF on its socket */
}

static void start_failed(uint32_t id, const char *why, int error)
{
    struct jail *jail = warden.jails[id];
    size_t room = sizeof jail->text - jail->text_length;

    if (jail->text_length == 0)
        snprintf(jail->text, room, "%s: %s", why, strerror(error));
    jail->state = ENDED;
    kill_jail(jail);
    tell(WIRE_FAILED, id, (uint32_t)error, jail->text);
}

static void on_start(struct wire_frame *frame)
{
    uint32_t id = frame->header.id;
    int pair[2], yes = 1;

    struct jail *jail = calloc(1, sizeof *jail);
    if (jail == NULL || id >= MAX_JAILS || warden.jails[id] != NULL) {
        free(jail);
        tell(WIRE_FAILED, id, EINVAL, "the sandbox number is taken or too large");
        return;
    }
    warden.jails[id] = jail;
    warden.top = id >= warden.top ? id + 1 : warden.top;
    jail->pidfd = jail->sync = -1;
    if (keep(&jail->start, frame) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
        start_failed(id, "preparing a jail", errno);
        return;
    }
    setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);
    pid_t pid = jail_spawn(frame, pair[1]);
    int error = errno;
    close(pair[1]);
    jail->sync = pair[0];
    if (pid < 0) {
        drop_fd(&jail->sync);
        start_failed(id, "forking a jail", error);
        return;
    }
    jail->monitor = jail->group = pid;
    warden.owners[pid] = id + 1;
    watch(jail->sync, FROM_SYNC, id);
}

/* The monitor is gone, so the agent must have become our child: it may bind its life to ours. */
static void on_orphaned(uint32_t id)
{
    struct jail *jail = warden.jails[id];
    struct wire_out out;
    siginfo_t ended;

    if (waitid(P_PID, (id_t)jail->agent, &ended, WEXITED | WNOHANG | WNOWAIT) < 0) {
        start_failed(id, "finding the agent among the warden's children", errno);
        return;
    }
    wire_begin(&out, WIRE_BIND, id);
    wire_send(jail->sync, &out, NULL, 0); /* an agent that has died shows on its socket */
}

/* The agent is up: from now on it is held by its pidfd, and the jail tool's monitor is not needed. */
static void on_ready(uint32_t id, pid_t agent)
{
    struct jail *jail = warden.jails[id];
    struct pollfd gone = {.fd = jail->sync, .events = 0};
    int pidfd = (int)syscall(SYS_pidfd_open, agent, 0);

    if (pidfd < 0) {
        start_failed(id, "watching the agent", errno);
        return;
    }
    /* The other end is still held, so the process that wrote is alive, so the pid was not reused. */
    if (poll(&gone, 1, 0) > 0 && (gone.revents & POLLHUP)) {
        close(pidfd);
        return;
    }
    jail->pidfd = pidfd;
    jail->agent = agent;
    warden.owners[agent] = id + 1;
    watch(pidfd, FROM_PIDFD, id);
    jail->state = MOUNTING;
    if (jail->monitor)
        kill(jail->monitor, SIGKILL); /* BIND follows its end, while the mounts are made */
    else
        on_orphaned(id);
    if (jail->state != MOUNTING)
        return;
    jail->mounter = mounts_make(&jail->start, pidfd);
    if (jail->mounter < 0) {
        jail->mounter = 0;
        start_failed(id, "forking to mount", errno);
        return;
    }
    warden.owners[jail->mounter] = id + 1;
}

/* Lets the agent serve once its mounts are there and its life is bound to ours. */
static void let_go(uint32_t id)
{
    struct jail *jail = warden.jails[id];
    struct wire_out out;

    if (!jail->mounted || !jail->bound)
        return;
    wire_begin(&out, WIRE_GO, id);
    wire_send(jail->sync, &out, NULL, 0);
    drop_fd(&jail->sync);
    jail->state = LIVE;
    tell(WIRE_STARTED, id, jail->shared_errno, NULL);
}

static void on_sync(uint32_t id)
{
    struct jail *jail = warden.jails[id];
    struct wire_frame frame;
    int got;

    if (jail == NULL || jail->sync < 0)
        return;
    got = wire_receive(jail->sync, buffer, &frame, MSG_DONTWAIT);
    if (got == 1)
        wire_close_fds(&frame); /* none is ever due here */
    if (got == 1 && frame.header.kind == WIRE_READY && jail->state == SPAWNED) {
        on_ready(id, frame.sender);
    } else if (got == 1 && frame.header.kind == WIRE_BOUND && jail->state == MOUNTING &&
               frame.sender == jail->agent && jail->monitor == 0) {
        jail->bound = 1;
        let_go(id);
    } else if (got < 0 && errno == EPROTO) { /* the jail tool's own words */
        size_t room = sizeof jail->text - 1 - jail->text_length;
        size_t size = frame.header.length < room ? frame.header.length : room;
        memcpy(jail->text + jail->text_length, buffer, size);
        jail->text_length += size;
    } else if (got == 0 || (got < 0 && errno != EAGAIN)) {
        drop_fd(&jail->sync);
        if (jail->state == SPAWNED || jail->state == MOUNTING)
            start_failed(id, "the jail ended while it was built", ECHILD);
        else if (jail->state == CLOSING)
            finish(id);
    }
}

static void on_agent_end(uint32_t id)
{
    struct jail *jail = warden.jails[id];

    if (jail == NULL || jail->pidfd < 0)
        return;
    drop_fd(&jail->pidfd);
    if (jail->state == LIVE) {
        jail->state = ENDED;
        tell(WIRE_DIED, id, 0, NULL);
    } else if (jail->state == CLOSING) {
        finish(id);
    }
}

static void on_mounted(uint32_t id, int status)
{
    struct jail *jail = warden.jails[id];
    int code = WEXITSTATUS(status);
    int done = WIFEXITED(status) && (code == 0 || code >= MOUNTS_SHARED);

    jail->mounter = 0;
    if (jail->state == CLOSING) {
        finish(id);
    } else if (jail->state == MOUNTING && !done) {
        start_failed(id, "making the sandbox's own mounts", WIFEXITED(status) ? code : EINTR);
    } else if (jail->state == MOUNTING) {
        jail->mounted = 1;
        jail->shared_errno = code ? (uint32_t)(code - MOUNTS_SHARED) : 0;
        let_go(id);
    }
}

static void reap(void)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        uint32_t owner = warden.owners[pid];
        warden.owners[pid] = 0;
        if (owner == 0 || warden.jails[owner - 1] == NULL)
            continue; /* a process whose jail is already forgotten */
        struct jail *jail = warden.jails[owner - 1];
        if (jail->mounter == pid) {
            on_mounted(owner - 1, status);
        } else if (jail->monitor == pid) {
            jail->monitor = 0;
            if (jail->state == CLOSING)
                finish(owner - 1);
            else if (jail->state == MOUNTING)
                on_orphaned(owner - 1);
        }
    }
}

/* What the engine names as its own; attached descriptors are locks, held until the last trace is gone. */
static void on_own(struct wire_frame *frame)
{
    struct wire_frame old = warden.estate;

    if (keep(&warden.estate, frame) < 0)
        return;
    wire_close_fds(&old);
    memcpy(warden.estate.fds, frame->fds, sizeof frame->fds);
    warden.estate.num_fds = frame->num_fds;
    frame->num_fds = 0;
}

/* One frame of the engine; 0 when the engine is gone (or speaks another language, or is not to go on). */
static int on_engine(void)
{
    struct wire_frame frame;
    int got = wire_receive(warden.engine, buffer, &frame, MSG_DONTWAIT);

    if (got < 0 && errno == EAGAIN)
        return 1;
    if (got <= 0)
        return 0;
    if (frame.lost && frame.header.kind == WIRE_OWN)
        return 0; /* its locks are what keeps others off; it comes before the first jail */
    if (frame.lost && frame.header.kind == WIRE_START)
        tell(WIRE_FAILED, frame.header.id, EMFILE, "the warden has no descriptors left");
    else if (frame.header.kind == WIRE_START)
        on_start(&frame);
    else if (frame.header.kind == WIRE_RELEASE)
        on_release(&frame);
    else if (frame.header.kind == WIRE_OWN)
        on_own(&frame);
    wire_close_fds(&frame);
    return 1;
}

/* A descriptor that tells of the engine's end; the engine is our parent, and it made the socket. */
static int watch_engine(void)
{
    struct ucred who;
    socklen_t size = sizeof who;
    int pidfd;

    if (getsockopt(warden.engine, SOL_SOCKET, SO_PEERCRED, &who, &size) < 0)
        return -1;
    pidfd = (int)syscall(SYS_pidfd_open, who.pid, 0);
    if (pidfd < 0 || getppid() != who.pid) /* it has died already, and the number may be another's */
        return -1;
    fcntl(pidfd, F_SETFD, FD_CLOEXEC);
    warden.engine_end = pidfd;
    watch(pidfd, FROM_ENGINE_END, 0);
    return 0;
}

int warden_main(int engine, int lock)
{
    struct epoll_event events[64];
    sigset_t mask;

    warden.engine = engine;
    fcntl(engine, F_SETFD, FD_CLOEXEC);
    fcntl(lock, F_SETFD, FD_CLOEXEC); /* held: the engine's lock lasts until the last trace is gone */
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { /* one descriptor for every live jail */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "rollout-warden");
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    warden.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || warden.epoll < 0 || watch_engine() < 0)
        return 1;
    watch(engine, FROM_ENGINE, 0);
    watch(signals, FROM_SIGNAL, 0);
    tell(WIRE_HELLO, WIRE_VERSION, 0, NULL);
    for (;;) {
        int count = epoll_wait(warden.epoll, events, 64, warden.num_closing ? RETRY_MS : -1);
        for (int i = 0; i < count; i++) {
            uint32_t id = (uint32_t)events[i].data.u64;
            struct signalfd_siginfo info;
            switch ((enum source)(events[i].data.u64 >> 32)) {
            case FROM_ENGINE:
                if (!on_engine())
                    return close_estate();
                break;
            case FROM_ENGINE_END:
                return close_estate();
            case FROM_SIGNAL:
                while (read(signals, &info, sizeof info) == sizeof info)
                    if (info.ssi_signo != SIGCHLD)
                        return close_estate();
                reap();
                break;
            case FROM_SYNC:
                on_sync(id);
                break;
            case FROM_PIDFD:
                on_agent_end(id);
                break;
            }
        }
        retry_closing();
    }
}
