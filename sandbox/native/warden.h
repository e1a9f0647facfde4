/* The warden's table of jails, shared by its parts: the loop (warden.c), how jails start and are renewed
 * (starting.c) and how they end (ending.c). */
#ifndef ROLLOUT_WARDEN_H
#define ROLLOUT_WARDEN_H

#include "layers.h"

#define MAX_JAILS 65536
#define RETRY_MS 2
#define GIVE_UP_MS 5000

enum source { FROM_ENGINE, FROM_ENGINE_END, FROM_SIGNAL, FROM_SYNC, FROM_PIDFD };
enum state { SPAWNED, MOUNTING, LIVE, ENDED, CLOSING };

struct jail {
    enum state state;
    pid_t monitor, mounter; /* our children; 0 once reaped */
    pid_t agent;            /* our child too, once the monitor that made it is gone */
    int mounted, bound;     /* what the agent waits for: its mounts, and that it ends with us */
    int renewing;           /* the mounter makes them anew */
    uint32_t shared_errno;  /* why its image has no overlays, or 0 */
    pid_t sealer;           /* reads its workspace; 0 once reaped */
    int layers, upper;      /* where the mounter tells of the upper directory, and that directory; or -1 */
    pid_t group;            /* of monitor and agent; exists for as long as sync has a holder */
    int pidfd;              /* of the agent; -1 until it is ready and once it is dead */
    int sync;               /* -1 once the agent was let go, or all its holders are dead */
    struct wire_frame start, release;
    char text[1024];
    size_t text_length;
    int64_t closing_since_ms;
};

struct warden {
    struct jail *jails[MAX_JAILS];
    uint32_t top; /* above every number in use */
    uint32_t owners[1 << 22]; /* pid -> id + 1, for our own children until they are reaped */
    int engine, epoll, num_closing;
    int engine_end; /* a pidfd */
    struct wire_frame estate; /* what the engine named as its own */
};
extern struct warden warden;

/* warden.c */
int64_t now_ms(void);
void watch(int fd, enum source source, uint32_t id);
void drop_fd(int *fd);
void forget(struct wire_frame *kept);
int keep(struct wire_frame *kept, const struct wire_frame *frame);
void tell(uint16_t kind, uint32_t id, uint32_t error, const char *text);

/* starting.c */
void on_start(struct wire_frame *frame);
void on_orphaned(uint32_t id);
void on_sync(uint32_t id);
void on_agent_end(uint32_t id);
void on_mounted(uint32_t id, int status);
void on_renew(struct wire_frame *frame);

/* ending.c */
void kill_jail(struct jail *jail);
void on_release(struct wire_frame *frame);
void finish(uint32_t id); /* frees a closing jail once nothing of it is left */
void retry_closing(void);
int close_estate(void);

/* sealing.c */
void on_seal(struct wire_frame *frame);
void on_sealer_end(uint32_t id);

#endif
