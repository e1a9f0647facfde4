/* How a jail comes to serve, and gets new mounts while it lives.
 *
 * Invariant: an agent serves only when its mounts are there and its life is bound to the warden's;
 * whatever fails before that ends the jail. A renewal is one child's work and tells how it went;
 * what a failed one leaves is for the engine to end. */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned char buffer[WIRE_MAX_FRAME];

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

void on_start(struct wire_frame *frame)
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
    jail->pidfd = jail->sync = jail->layers = jail->upper = -1;
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
void on_orphaned(uint32_t id)
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
    jail->mounter = mounts_make(&jail->start, pidfd, &jail->layers);
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
    forget(&jail->start); /* thousands of them wait for their tenants */
    tell(WIRE_STARTED, id, jail->shared_errno, NULL);
}

void on_sync(uint32_t id)
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

void on_agent_end(uint32_t id)
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

void on_mounted(uint32_t id, int status)
{
    struct jail *jail = warden.jails[id];
    int code = WEXITSTATUS(status);
    int done = WIFEXITED(status) && (code == 0 || code >= MOUNTS_SHARED);

    jail->mounter = 0;
    drop_fd(&jail->upper);
    jail->upper = layers_take(&jail->layers);
    if (jail->state == CLOSING) {
        finish(id);
    } else if (jail->renewing) {
        jail->renewing = 0;
        tell(WIRE_RENEWED, id, done ? 0 : WIFEXITED(status) ? (uint32_t)code : EINTR, NULL);
    } else if (jail->state == MOUNTING && !done) {
        start_failed(id, "making the sandbox's own mounts", WIFEXITED(status) ? code : EINTR);
    } else if (jail->state == MOUNTING) {
        jail->mounted = 1;
        jail->shared_errno = code ? (uint32_t)(code - MOUNTS_SHARED) : 0;
        let_go(id);
    }
}

void on_renew(struct wire_frame *frame)
{
    uint32_t id = frame->header.id;
    struct jail *jail = id < MAX_JAILS ? warden.jails[id] : NULL;
    pid_t pid = -1;

    if (jail == NULL || jail->state != LIVE || jail->mounter || jail->sealer)
        errno = ESRCH;
    else
        pid = mounts_make(frame, jail->pidfd, &jail->layers);
    if (pid < 0) {
        if (jail != NULL && jail->mounter == 0)
            drop_fd(&jail->layers);
        tell(WIRE_RENEWED, id, (uint32_t)errno, NULL);
        return;
    }
    jail->mounter = pid;
    jail->renewing = 1;
    warden.owners[pid] = id + 1;
}
