/* The end of a lease, seen from inside: what it started ends, what it left is removed or counted.
 *
 * Invariant: a count of zero is proof. No process: every process in here descends from this first
 * one, so where it has no child there is nobody. No socket and no counter that has moved: nothing
 * went over the loopback, so nothing of it waits in the kernel. Mounts that are not touched: they hold
 * as many inodes as new ones, so nothing but their roots, and those read as before in all that can be set. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_MS 5000
#define PAUSE_MS 10
#define SOCKETS_MS 500
/* Linux 4.17: objects whose mode forbids reading are found as well; older headers lack them. */
#define ANY_SEGMENT 15
#define ANY_SEMAPHORES 20
#define ANY_QUEUE 13
#define SYSTEM_V_INDEXES 32768

union semaphore_argument { /* the caller has to define it, says semctl(2) */
    struct semid_ds *data;
    struct seminfo *all;
};

static const char *const writable[] = {"/workspace", "/tmp", "/dev/shm"};
#define NUM_WRITABLE 3

struct mounts { /* all that a tenant can change of mounts which hold nothing; no padding inside */
    struct {
        uint64_t mode, owner, group, num_links, num_bytes, num_attribute_bytes;
        struct timespec read, written, changed;
    } roots[NUM_WRITABLE];
    uint64_t free_blocks, free_inodes;
};

static struct mounts before;
static int noted;
static uint64_t network_at_start;

static int64_t monotonic_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A fork that runs while the signal is sent to all fails (the kernel looks for a pending one), so
 * nobody is missed; what takes long to die is waited for, and then counted. */
static uint32_t end_processes(void)
{
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
    int64_t deadline = monotonic_ms() + PATIENCE_MS;
    sigset_t child;
    pid_t pid;

    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    for (;;) {
        while ((pid = waitpid(-1, NULL, WNOHANG | __WALL)) > 0)
            ;
        if (pid < 0 && errno == ECHILD)
            return 0;
        if (monotonic_ms() > deadline)
            return 1;
        kill(-1, SIGKILL);
        sigtimedwait(&child, NULL, &pause);
    }
}

/* Removes all objects of one kind; how many stay. `stat` gives the number of the object at an index. */
static uint32_t remove_ipc(int used, int (*stat)(int index), int (*remove)(int number))
{
    uint32_t left = 0;

    for (int index = 0, number; used > 0 && index < SYSTEM_V_INDEXES; index++)
        if ((number = stat(index)) >= 0) {
            left += remove(number) < 0;
            used--;
        }
    return left + (used > 0 ? (uint32_t)used : 0);
}

static int stat_segment(int index)
{
    struct shmid_ds data;

    return shmctl(index, ANY_SEGMENT, &data);
}

static int remove_segment(int number)
{
    return shmctl(number, IPC_RMID, NULL);
}

static int stat_semaphores(int index)
{
    struct semid_ds data;
    union semaphore_argument argument = {.data = &data};

    return semctl(index, 0, ANY_SEMAPHORES, argument);
}

static int remove_semaphores(int number)
{
    return semctl(number, 0, IPC_RMID);
}

static int stat_queue(int index)
{
    struct msqid_ds data;

    return msgctl(index, ANY_QUEUE, &data);
}

static int remove_queue(int number)
{
    return msgctl(number, IPC_RMID, NULL);
}

/* Calls that the kernel was built without have left nothing. */
static uint32_t end_ipc(void)
{
    struct shm_info segments = {0};
    struct seminfo semaphores = {0};
    union semaphore_argument argument = {.all = &semaphores};
    struct msginfo queues = {0};
    uint32_t left = 0;

    if (shmctl(0, SHM_INFO, (struct shmid_ds *)(void *)&segments) >= 0 && segments.used_ids)
        left += remove_ipc(segments.used_ids, stat_segment, remove_segment);
    if (semctl(0, 0, SEM_INFO, argument) >= 0 && semaphores.semusz)
        left += remove_ipc(semaphores.semusz, stat_semaphores, remove_semaphores);
    if (msgctl(0, MSG_INFO, (struct msqid_ds *)(void *)&queues) >= 0 && queues.msgpool)
        left += remove_ipc(queues.msgpool, stat_queue, remove_queue);
    return left;
}

static ssize_t read_text(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;
    ssize_t got = 0;

    if (fd < 0)
        return -1;
    while (length < room - 1 && (got = read(fd, text + length, room - 1 - length)) > 0)
        length += (size_t)got;
    close(fd);
    text[length] = 0;
    return got < 0 ? -1 : (ssize_t)length;
}

/* Sockets of this namespace; the agent's own belong to the host's. What cannot be read counts. */
static uint32_t count_sockets(void)
{
    char text[1024];
    unsigned count;

    if (read_text("/proc/net/sockstat", text, sizeof text) < 0 || sscanf(text, "sockets: used %u", &count) != 1)
        return 1;
    return count;
}

/* The kernel frees some sockets (netlink, as the jail tool used to bring the loopback up) a grace
 * period after they were closed, which a busy machine draws out: what goes by itself is no residue. */
static uint32_t await_no_sockets(void)
{
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
    int64_t deadline = monotonic_ms() + SOCKETS_MS;
    uint32_t count;

    while ((count = count_sockets()) != 0 && monotonic_ms() < deadline)
        nanosleep(&pause, NULL);
    return count;
}

/* A file that is not there (a host without IPv6) adds nothing; one that cannot be read, never the same. */
static uint64_t add_to_digest(uint64_t digest, const char *path)
{
    static uint64_t num_failures;
    unsigned char part[2048];
    ssize_t got;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return errno == ENOENT ? digest : digest + ++num_failures;
    while ((got = read(fd, part, sizeof part)) > 0)
        for (ssize_t at = 0; at < got; at++)
            digest = (digest ^ part[at]) * 1099511628211u;
    close(fd);
    return got < 0 ? digest + ++num_failures : digest;
}

/* A digest (FNV-1a) of the counters of the namespace's devices and protocols. */
static uint64_t digest_network(void)
{
    static const char *const files[] = {"/proc/net/dev", "/proc/net/snmp", "/proc/net/snmp6"};
    uint64_t digest = 14695981039346656037u;

    for (int i = 0; i < 3; i++)
        digest = add_to_digest(digest, files[i]);
    return digest;
}

/* -1: something cannot be read, which is no proof. */
static int read_mounts(struct mounts *now)
{
    struct statfs space;
    struct stat info;

    memset(now, 0, sizeof *now);
    for (int i = 0; i < NUM_WRITABLE; i++) {
        ssize_t attributes = listxattr(writable[i], NULL, 0);
        if (stat(writable[i], &info) < 0 || (attributes < 0 && errno != ENOTSUP))
            return -1;
        now->roots[i].mode = info.st_mode;
        now->roots[i].owner = info.st_uid;
        now->roots[i].group = info.st_gid;
        now->roots[i].num_links = info.st_nlink;
        now->roots[i].num_bytes = (uint64_t)info.st_size;
        now->roots[i].num_attribute_bytes = attributes < 0 ? 0 : (uint64_t)attributes;
        now->roots[i].read = info.st_atim;
        now->roots[i].written = info.st_mtim;
        now->roots[i].changed = info.st_ctim;
    }
    if (statfs(writable[0], &space) < 0)
        return -1;
    now->free_blocks = space.f_bfree;
    now->free_inodes = space.f_ffree;
    return 0;
}

void clean_note(void)
{
    if (noted == 0)
        noted = read_mounts(&before) == 0 ? 1 : -1;
}

static uint32_t are_touched(void)
{
    struct mounts now;

    return noted != 0 && (noted < 0 || read_mounts(&now) < 0 || memcmp(&now, &before, sizeof now) != 0);
}

void clean_begin(void)
{
    network_at_start = digest_network();
}

void clean(struct wire_residue *residue)
{
    residue->num_processes = end_processes();
    residue->num_ipc = end_ipc();
    residue->num_sockets = await_no_sockets();
    residue->network = digest_network() != network_at_start;
    residue->touched = are_touched();
    noted = 0;
}
