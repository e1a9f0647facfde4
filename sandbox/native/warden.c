/* The warden: one outside process per engine, which starts, mounts, renews and ends its jails.
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

struct warden warden;
static unsigned char buffer[WIRE_MAX_FRAME];

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void watch(int fd, enum source source, uint32_t id)
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

void forget(struct wire_frame *kept)
{
    free((void *)(uintptr_t)kept->items);
    kept->items = NULL;
}

/* Keeps a frame's items past the receive buffer. */
int keep(struct wire_frame *kept, const struct wire_frame *frame)
{
    unsigned char *copy = malloc(frame->header.length + 1);

    if (copy == NULL)
        return -1;
    memcpy(copy, frame->items, frame->header.length);
    forget(kept);
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
        } else if (jail->sealer == pid) {
            on_sealer_end(owner - 1);
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
    else if (frame.header.kind == WIRE_RENEW)
        on_renew(&frame);
    else if (frame.header.kind == WIRE_OWN)
        on_own(&frame);
    else if (frame.header.kind == WIRE_SEAL)
        on_seal(&frame);
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
