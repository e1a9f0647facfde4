/* The warden: one outside process per engine, which starts, mounts and ends its jails.
 *
 * Invariant: whatever was started here is dead, and whatever cgroup was made is removed, before
 * this process ends; it ends when the engine's socket closes, for any reason. It never blocks on
 * a jail: children do the slow work, and everything else is an event. */
#define _GNU_SOURCE
#include "native.h"

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

#define MAX_JAILS 65536
#define RETRY_MS 2
#define GIVE_UP_MS 5000

enum source { FROM_ENGINE, FROM_SIGNAL, FROM_SYNC, FROM_PIDFD };
enum state { SPAWNED, MOUNTING, LIVE, ENDED, CLOSING };

struct jail {
    enum state state;
    pid_t monitor, mounter; /* our children; 0 once reaped */
    pid_t group;            /* of monitor and agent; exists for as long as sync has a holder */
    int pidfd;              /* of the agent; -1 until it is ready and once it is dead */
    int sync;               /* -1 once the agent was let go, or all its holders are dead */
    struct wire_frame start, release;
    char text[1024];
    size_t text_length;
    int64_t closing_since_ms;
};

static struct jail *jails[MAX_JAILS];
static uint32_t owners[1 << 22]; /* pid -> id + 1, for our own children */
static unsigned char buffer[WIRE_MAX_FRAME];
static struct wire_frame estate; /* what OWN named */
static int engine_fd, epoll_fd, num_closing;
static uint32_t top; /* above every number in use */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void watch(int fd, enum source source, uint32_t id)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = ((uint64_t)source << 32) | id};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void drop_fd(int *fd)
{
    if (*fd >= 0) {
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, *fd, NULL); /* a forked copy would keep it registered */
        close(*fd);
    }
    *fd = -1;
}

/* Keeps a frame's items past the receive buffer. */
static int keep(struct wire_frame *kept, const struct wire_frame *frame)
{
    unsigned char *copy = malloc(frame->header.length + 1);

    if (copy == NULL)
        return -1;
    memcpy(copy, frame->items, frame->header.length);
    free((void *)(uintptr_t)kept->items);
    *kept = (struct wire_frame){.header = frame->header, .items = copy};
    return 0;
}

static void tell(uint16_t kind, uint32_t id, uint32_t error, const char *text)
{
    struct wire_out out;

    wire_begin(&out, kind, id);
    if (error)
        wire_put_u32(&out, TAG_ERRNO, error);
    if (text)
        wire_put(&out, TAG_TEXT, text, strlen(text) + 1);
    wire_send(engine_fd, &out, NULL, 0); /* a dead engine shows as EOF on its socket */
}

static void free_jail(uint32_t id)
{
    struct jail *jail = jails[id];

    drop_fd(&jail->pidfd);
    drop_fd(&jail->sync);
    free((void *)(uintptr_t)jail->start.items);
    free((void *)(uintptr_t)jail->release.items);
    free(jail);
    jails[id] = NULL;
}

static void kill_jail(struct jail *jail)
{
    struct wire_cursor cursor = wire_items(&jail->release);
    struct wire_entry entry;

    while (jail->release.items && wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_KILL && wire_string(&entry))
            file_write(wire_string(&entry), "1");
    if (jail->mounter)
        kill(jail->mounter, SIGKILL);
    if (jail->pidfd >= 0)
        syscall(SYS_pidfd_send_signal, jail->pidfd, SIGKILL, NULL, 0);
    if (jail->monitor)
        kill(jail->monitor, SIGKILL);
    if (jail->sync >= 0) {
        kill(-jail->group, SIGKILL);
        shutdown(jail->sync, SHUT_RDWR); /* an agent that finds no warden ends itself */
    }
}

/* Removes what the release frame names; EBUSY while the kernel still holds the dead. */
static int clean_up(struct jail *jail)
{
    struct wire_cursor cursor = wire_items(&jail->release);
    struct wire_entry entry;
    const char *first, *second;
    int error = 0;

    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_SET && wire_pair(&entry, 0, &first, &second))
            error = file_write(first, second) < 0 ? errno : error;
        else if (entry.tag == TAG_REMOVE && (first = wire_string(&entry)) != NULL)
            error = cgroup_remove(first) < 0 ? errno : error;
    return error;
}

static int finish(uint32_t id)
{
    struct jail *jail = jails[id];
    int late = now_ms() - jail->closing_since_ms > GIVE_UP_MS, error = ETIMEDOUT;

    if (jail->monitor == 0 && jail->mounter == 0 && jail->pidfd < 0 && jail->sync < 0)
        error = clean_up(jail);
    if (error && !late)
        return 0;
    tell(WIRE_RELEASED, id, (uint32_t)error, NULL);
    free_jail(id);
    num_closing--;
    return 1;
}

static void start_failed(uint32_t id, const char *why, int error)
{
    struct jail *jail = jails[id];
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

    if (id >= MAX_JAILS || jails[id] != NULL || (jails[id] = calloc(1, sizeof **jails)) == NULL) {
        tell(WIRE_FAILED, id, EINVAL, "the sandbox number is taken or too large");
        return;
    }
    struct jail *jail = jails[id];
    top = id >= top ? id + 1 : top;
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
    owners[pid] = id + 1;
    watch(jail->sync, FROM_SYNC, id);
}

static void on_release(struct wire_frame *frame)
{
    uint32_t id = frame->header.id;

    if (id >= MAX_JAILS || jails[id] == NULL || jails[id]->state == CLOSING) {
        tell(WIRE_RELEASED, id, EINVAL, NULL);
        return;
    }
    struct jail *jail = jails[id];
    if (keep(&jail->release, frame) < 0)
        return;
    jail->state = CLOSING;
    jail->closing_since_ms = now_ms();
    num_closing++;
    kill_jail(jail);
    finish(id);
}

/* The agent is up: from now on it is held by its pidfd, and the jail tool's monitor is not needed. */
static void on_ready(uint32_t id, pid_t agent)
{
    struct jail *jail = jails[id];
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
    watch(pidfd, FROM_PIDFD, id);
    if (jail->monitor)
        kill(jail->monitor, SIGKILL);
    jail->state = MOUNTING;
    jail->mounter = jail_mount(&jail->start, pidfd);
    if (jail->mounter < 0) {
        jail->mounter = 0;
        start_failed(id, "forking to mount", errno);
        return;
    }
    owners[jail->mounter] = id + 1;
}

static void on_sync(uint32_t id)
{
    struct jail *jail = jails[id];
    struct wire_frame frame;
    int got;

    if (jail == NULL || jail->sync < 0)
        return;
    got = wire_receive(jail->sync, buffer, &frame, MSG_DONTWAIT);
    if (got == 1 && frame.header.kind == WIRE_READY && jail->state == SPAWNED) {
        on_ready(id, frame.sender);
    } else if (got == 1) {
        wire_close_fds(&frame);
    } else if (got < 0 && errno == EPROTO) { /* the jail tool's own words */
        size_t room = sizeof jail->text - 1 - jail->text_length;
        size_t size = frame.header.length < room ? frame.header.length : room;
        memcpy(jail->text + jail->text_length, buffer, size);
        jail->text_length += size;
    } else if (got == 0 || errno != EAGAIN) {
        drop_fd(&jail->sync);
        if (jail->state == SPAWNED || jail->state == MOUNTING)
            start_failed(id, "the jail ended while it was built", ECHILD);
        else if (jail->state == CLOSING)
            finish(id);
    }
}

static void on_agent_end(uint32_t id)
{
    struct jail *jail = jails[id];

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
    struct jail *jail = jails[id];
    struct wire_out out;

    jail->mounter = 0;
    if (jail->state == CLOSING) {
        finish(id);
    } else if (jail->state == MOUNTING && status != 0) {
        start_failed(id, "making the writable mounts", WIFEXITED(status) ? WEXITSTATUS(status) : EINTR);
    } else if (jail->state == MOUNTING) {
        wire_begin(&out, WIRE_GO, id);
        wire_send(jail->sync, &out, NULL, 0);
        drop_fd(&jail->sync);
        jail->state = LIVE;
        tell(WIRE_STARTED, id, 0, NULL);
    }
}

static void reap(void)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        uint32_t owner = owners[pid];
        owners[pid] = 0;
        if (owner == 0 || jails[owner - 1] == NULL)
            continue; /* an agent, or a process whose jail is already forgotten */
        struct jail *jail = jails[owner - 1];
        if (jail->mounter == pid) {
            on_mounted(owner - 1, status);
        } else if (jail->monitor == pid) {
            jail->monitor = 0;
            if (jail->state == CLOSING)
                finish(owner - 1);
        }
    }
}

/* The end: kill everything, wait until it is gone, remove every trace. */
static int close_estate(void)
{
    struct wire_cursor cursor;
    struct wire_entry entry;
    int64_t deadline = now_ms() + 2 * GIVE_UP_MS;
    int left = 1;

    while (left && now_ms() < deadline) {
        left = 0;
        for (uint32_t id = 0; id < top; id++)
            if (jails[id] != NULL)
                kill_jail(jails[id]);
        cursor = wire_items(&estate);
        while (estate.items && wire_next(&cursor, &entry) == 1)
            if (entry.tag == TAG_DIR && wire_string(&entry) && cgroup_remove(wire_string(&entry)) < 0) {
                cgroup_kill(wire_string(&entry));
                left = 1;
            }
        pid_t pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        left |= pid == 0; /* children that still live */
        if (left)
            usleep(RETRY_MS * 1000);
    }
    cursor = wire_items(&estate);
    while (estate.items && wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_TREE && wire_string(&entry))
            tree_remove(wire_string(&entry));
    return left;
}

/* One frame of the engine; 0 when the engine is gone (or speaks another language). */
static int on_engine(void)
{
    struct wire_frame frame;
    int got = wire_receive(engine_fd, buffer, &frame, MSG_DONTWAIT);

    if (got < 0 && errno == EAGAIN)
        return 1;
    if (got <= 0)
        return 0;
    if (frame.header.kind == WIRE_START)
        on_start(&frame);
    else if (frame.header.kind == WIRE_RELEASE)
        on_release(&frame);
    else if (frame.header.kind == WIRE_OWN)
        keep(&estate, &frame);
    wire_close_fds(&frame);
    return 1;
}

static void retry_closing(void)
{
    static int64_t last_ms;

    if (num_closing == 0 || now_ms() - last_ms < RETRY_MS)
        return;
    last_ms = now_ms();
    for (uint32_t id = 0; num_closing > 0 && id < top; id++)
        if (jails[id] != NULL && jails[id]->state == CLOSING)
            finish(id);
}

int warden_main(int engine, int lock)
{
    struct epoll_event events[64];
    sigset_t mask;

    engine_fd = engine;
    fcntl(engine, F_SETFD, FD_CLOEXEC);
    fcntl(lock, F_SETFD, FD_CLOEXEC); /* held: the engine's lock lasts until the last trace is gone */
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
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || epoll_fd < 0)
        return 1;
    watch(engine, FROM_ENGINE, 0);
    watch(signals, FROM_SIGNAL, 0);
    tell(WIRE_HELLO, WIRE_VERSION, 0, NULL);
    for (;;) {
        int count = epoll_wait(epoll_fd, events, 64, num_closing ? RETRY_MS : -1);
        for (int i = 0; i < count; i++) {
            uint32_t id = (uint32_t)events[i].data.u64;
            struct signalfd_siginfo info;
            switch ((enum source)(events[i].data.u64 >> 32)) {
            case FROM_ENGINE:
                if (!on_engine())
                    return close_estate();
                break;
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
