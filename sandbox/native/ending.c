/* How jails end, one by one and all together.
 *
 * Invariant: RELEASED is said when every process of the jail is dead and what the release named is
 * removed; the estate is closed by killing first, waiting then, removing last. */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void free_jail(uint32_t id)
{
    struct jail *jail = warden.jails[id];

    drop_fd(&jail->pidfd);
    drop_fd(&jail->sync);
    drop_fd(&jail->layers);
    drop_fd(&jail->upper);
    forget(&jail->start);
    forget(&jail->release);
    free(jail);
    warden.jails[id] = NULL;
}

void kill_jail(struct jail *jail)
{
    struct wire_cursor cursor = wire_items(&jail->release);
    struct wire_entry entry;

    while (jail->release.items && wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_KILL && wire_string(&entry))
            file_write(wire_string(&entry), "1");
    if (jail->mounter)
        kill(jail->mounter, SIGKILL);
    if (jail->sealer)
        kill(jail->sealer, SIGKILL);
    drop_fd(&jail->upper); /* it would hold the memory of what was written */
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
    int error = 0;

    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_REMOVE && wire_string(&entry))
            error = cgroup_remove(wire_string(&entry)) < 0 ? errno : error;
    return error;
}

/* A dead agent shows on its pidfd before it is reaped, and until then its number is still taken. */
static void reap_agent(uint32_t id)
{
    pid_t agent = warden.jails[id]->agent;

    if (agent && warden.owners[agent] == id + 1 && waitpid(agent, NULL, WNOHANG) == agent)
        warden.owners[agent] = 0;
}

void finish(uint32_t id)
{
    struct jail *jail = warden.jails[id];
    int late = now_ms() - jail->closing_since_ms > GIVE_UP_MS, error = ETIMEDOUT;

    if (jail->monitor == 0 && jail->mounter == 0 && jail->sealer == 0 && jail->pidfd < 0 && jail->sync < 0) {
        reap_agent(id);
        error = clean_up(jail);
    }
    if (error && !late)
        return;
    tell(WIRE_RELEASED, id, (uint32_t)error, NULL);
    free_jail(id);
    warden.num_closing--;
}

void on_release(struct wire_frame *frame)
{
    uint32_t id = frame->header.id;

    if (id >= MAX_JAILS || warden.jails[id] == NULL) { /* it never began: its start was cancelled */
        tell(WIRE_RELEASED, id, 0, NULL);
        return;
    }
    if (warden.jails[id]->state == CLOSING)
        return; /* answered when that is done */
    struct jail *jail = warden.jails[id];
    if (keep(&jail->release, frame) < 0)
        return;
    jail->state = CLOSING;
    jail->closing_since_ms = now_ms();
    warden.num_closing++;
    kill_jail(jail);
    finish(id);
}

void retry_closing(void)
{
    static int64_t last_ms;

    if (warden.num_closing == 0 || now_ms() - last_ms < RETRY_MS)
        return;
    last_ms = now_ms();
    for (uint32_t id = 0; warden.num_closing > 0 && id < warden.top; id++)
        if (warden.jails[id] != NULL && warden.jails[id]->state == CLOSING)
            finish(id);
}

/* What the engine named as its own: cgroups to kill and remove, files to unlink. 1 if some are left. */
static int each_cgroup(int (*act)(const char *))
{
    struct wire_cursor cursor = wire_items(&warden.estate);
    struct wire_entry entry;
    int left = 0;

    while (warden.estate.items && wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_DIR && wire_string(&entry) && act(wire_string(&entry)) < 0)
            left = 1;
    return left;
}

static void unlink_files(void)
{
    struct wire_cursor cursor = wire_items(&warden.estate);
    struct wire_entry entry;

    while (warden.estate.items && wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_PATH && wire_string(&entry))
            unlink(wire_string(&entry));
}

int close_estate(void)
{
    int64_t deadline = now_ms() + 2 * GIVE_UP_MS;
    int left = 1, rounds = 0;
    pid_t pid;

    for (uint32_t id = 0; id < warden.top; id++)
        if (warden.jails[id] != NULL)
            kill_jail(warden.jails[id]); /* once: later its numbers may be another's */
    while (left && now_ms() < deadline) {
        if (rounds++ % 64 == 0)
            each_cgroup(cgroup_kill);
        left = each_cgroup(cgroup_remove);
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        left |= pid == 0; /* children that still live */
        if (left)
            usleep(RETRY_MS * 1000);
    }
    if (!left)
        unlink_files();
    return left;
}
