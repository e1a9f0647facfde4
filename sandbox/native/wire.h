/* The wire format between engine, warden and agent: one frame per SEQPACKET message.
 *
 * A frame is a header and a list of items (tag, length, bytes); strings end with NUL, numbers are
 * little-endian. The receiver checks every length before anything is used: a frame that breaks
 * the format is refused whole, and its descriptors are closed. Mirrored by sandbox/protocol/wire.py. */
#ifndef ROLLOUT_WIRE_H
#define ROLLOUT_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define WIRE_MAGIC 0x56574c52u /* "RLWV" */
#define WIRE_VERSION 1u
#define WIRE_MAX_FRAME (192u * 1024u)
#define WIRE_MAX_FDS 64
#define WIRE_MAX_STRINGS 4096

enum wire_kind {
    /* engine -> warden */
    WIRE_OWN = 1,     /* what to clean up when the engine is gone; attached locks are held until then */
    WIRE_START = 2,   /* start a jail; descriptors go to the numbers named by AT */
    WIRE_RELEASE = 3, /* end a jail, clean up, answer when nothing is left */
    WIRE_RENEW = 4,   /* make a live jail's mounts anew, as its items say */
    /* warden -> engine */
    WIRE_HELLO = 17,
    WIRE_STARTED = 18,
    WIRE_FAILED = 19,
    WIRE_RELEASED = 20,
    WIRE_DIED = 21,
    WIRE_RENEWED = 22,
    /* engine -> agent */
    WIRE_RUN = 33,
    WIRE_KILL = 34,
    WIRE_PUT = 35,
    WIRE_GET = 36,
    WIRE_STAT = 40,   /* what is used of the writable mounts, and how many processes there are */
    WIRE_UNPACK = 41, /* records (archive.h) come in by the first descriptor, words on failure go out by the second */
    WIRE_PACK = 42,   /* records go out by the first descriptor */
    WIRE_CLEAN = 43,  /* end all that runs and lasts inside, and tell what is left of it */
    WIRE_PING = 44,
    /* agent -> engine */
    WIRE_EXITED = 49,
    WIRE_OPENED = 50,
    WIRE_REFUSED = 51,
    WIRE_SPACE = 56,
    WIRE_CLEANED = 57,
    WIRE_PONG = 58,
    /* agent <-> warden */
    WIRE_READY = 65, /* pid 1 runs */
    WIRE_GO = 66,    /* the mounts are there and the agent is bound: serve */
    WIRE_BIND = 67,  /* the jail tool is gone, the warden is the agent's parent */
    WIRE_BOUND = 68, /* the agent ends with its parent from now on */
    /* engine -> warden, and back */
    WIRE_SEAL = 45,   /* records (layers.h) of the workspace go out by the attached descriptor */
    WIRE_SEALED = 46, /* who wrote them has ended */
    /* the warden's child that mounts -> warden */
    WIRE_UPPER = 47, /* attached: the directory that a workspace over layers writes to */
    /* engine -> holder of a session; HELD answers each but DROP */
    WIRE_PREPARE = 80, /* the descriptors of a run, for the shell to open; who lives now is spared by the next two */
    WIRE_INTERRUPT = 81, /* SIGINT to the shell and to what it has started since */
    WIRE_SWEEP = 82,     /* SIGKILL to what it has started since */
    WIRE_LOOK = 83,
    WIRE_DROP = 84, /* the run is over: its descriptors are closed */
    WIRE_HELD = 85,
};

enum wire_tag {
    TAG_ARGV = 1,    /* string, repeated */
    TAG_ENV = 2,     /* string NAME=value, repeated */
    TAG_CWD = 3,     /* string */
    TAG_RLIMIT = 4,  /* struct wire_rlimit, repeated */
    TAG_STDIO = 5,   /* u32: the first n descriptors become 0..n-1, the rest are cgroup.procs */
    TAG_KEEPER = 6,  /* u32 1: keep the command's descendants together (no cgroup to do so) */
    TAG_PATH = 7,    /* string */
    TAG_MODE = 8,    /* u32 */
    TAG_DIR = 9,     /* string: a cgroup directory to make */
    TAG_SET = 10,    /* two strings: write the second to the file named by the first */
    TAG_JOIN = 11,   /* string: a cgroup.procs file to join */
    TAG_IDS = 12,    /* u32 uid, u32 gid */
    TAG_OPEN = 13,   /* u32 number, string: open read-only at that descriptor number */
    TAG_AT = 14,     /* u32: number of the next passed descriptor */
    TAG_TMPFS = 15,  /* two strings: where to mount it, its options */
    TAG_BIND = 16,   /* u32 mode, two strings: directory in the tmpfs, its target */
    TAG_KILL = 17,   /* string: a cgroup.kill file */
    TAG_REMOVE = 18, /* string: a cgroup directory to remove, with everything below */
    TAG_TEXT = 19,   /* string */
    TAG_ERRNO = 20,  /* u32 */
    TAG_RESULT = 21, /* struct wire_result */
    TAG_COVER = 24,  /* string: an existing directory that the jail tool finds empty and its own */
    TAG_SEAL = 25,   /* string: everything mounted from there on becomes read-only, no devices */
    TAG_DEVICE = 26, /* string: a sealed mount that is a device node, and may be used as one */
    TAG_OVERLAY = 27, /* string: a directory inside; what SHOW names is taken from an overlay of it */
    TAG_SHOW = 28,   /* two strings: a path below that overlay (or ""), the mount that it replaces */
    TAG_DROP = 29,   /* string: a mount that only the start needed */
    TAG_READ_ONLY = 30, /* string: a file system that the jail tool left writable */
    TAG_MASK = 31,   /* string: a file or directory (of /proc) that is empty inside */
    TAG_NODE = 32,   /* u32 minor number, string: a memory device that gets a node of its own, if it can be */
    TAG_SPACE = 40,  /* struct wire_space */
    TAG_CAPS = 41,   /* struct wire_caps */
    TAG_RESIDUE = 60, /* struct wire_residue */
    TAG_PLACES = 61, /* string: where the mounter works; OVERLAY, MASK and NODE follow, and TMPFS after them */
    TAG_LAYER = 65,   /* string, repeated, newest first: a directory of the host, below the next LAYERED */
    TAG_LAYERED = 66, /* u32 mode, two strings: as BIND, over those layers */
    TAG_HOLDER = 75, /* u32: the last n of the STDIO descriptors are not the shell's: its controlling terminal where
                        n is 2, and the socket of its session's holder */
    TAG_HELD = 76,   /* struct wire_held */
};

struct wire_header {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    uint32_t id;
    uint32_t length; /* of the items that follow */
};

struct wire_item {
    uint16_t tag;
    uint16_t zero;
    uint32_t length;
};

struct wire_rlimit {
    uint32_t resource;
    uint32_t zero;
    uint64_t soft;
    uint64_t hard;
};

struct wire_result {
    uint32_t status; /* as wait(2) gives it */
    uint32_t setup_errno;
    uint64_t user_us;
    uint64_t system_us;
    uint64_t max_rss_bytes;
    uint64_t free_blocks; /* of the writable mounts, when the command ended */
    uint64_t free_inodes;
};

struct wire_space {
    uint64_t used_bytes; /* of the writable mounts */
    uint64_t used_inodes;
    uint32_t num_processes; /* without the agent and its keepers */
    uint32_t zero;
};

struct wire_caps {
    uint64_t num_bytes;
    uint64_t num_entries;
};

struct wire_residue { /* what a lease has left inside; all but the last mean that the jail serves nobody else */
    uint32_t num_processes;
    uint32_t num_ipc;     /* System V segments, semaphore sets and queues that do not go */
    uint32_t num_sockets;
    uint32_t network;     /* 1: a counter of the network namespace is not what it was at the start */
    uint32_t touched;     /* 1: the writable mounts are not as they were, and must be made anew */
};

struct wire_held {
    uint32_t pid;      /* of the holder, inside */
    uint32_t num_left; /* processes that a signal was sent to; after a sweep, of its last look */
    uint64_t cpu_us;   /* of the shell and the children that it waited for */
    uint64_t free_blocks;
    uint64_t free_inodes;
};

struct wire_frame {
    struct wire_header header;
    const unsigned char *items;
    int fds[WIRE_MAX_FDS];
    int num_fds;
    int lost;     /* descriptors came that this process has no room for; none of them is there */
    pid_t sender; /* where the socket passes credentials, else 0 */
};

struct wire_cursor {
    const unsigned char *at;
    size_t left;
};

struct wire_entry {
    uint16_t tag;
    uint32_t length;
    const unsigned char *data;
};

struct wire_out {
    unsigned char bytes[8192];
    size_t length;
};

/* Receives one frame into buffer (WIRE_MAX_FRAME bytes). 1: a frame (see `lost`); 0: the peer is gone;
 * -1 with errno: EAGAIN, EPROTO (malformed; descriptors closed) or the system's. */
int wire_receive(int socket, unsigned char *buffer, struct wire_frame *frame, int flags);
void wire_close_fds(struct wire_frame *frame);

/* Checks header and items of a message of that many bytes. */
int wire_check(const unsigned char *bytes, size_t length, struct wire_frame *frame);

struct wire_cursor wire_items(const struct wire_frame *frame);
int wire_next(struct wire_cursor *cursor, struct wire_entry *entry);

/* The value of an item, or a refusal: NULL, or 0 and errno EPROTO. */
const char *wire_string(const struct wire_entry *entry);
int wire_pair(const struct wire_entry *entry, size_t skip, const char **first, const char **second);
int wire_u32(const struct wire_entry *entry, uint32_t *value);

void wire_begin(struct wire_out *out, uint16_t kind, uint32_t id);
void wire_put(struct wire_out *out, uint16_t tag, const void *data, size_t length);
void wire_put_u32(struct wire_out *out, uint16_t tag, uint32_t value);
int wire_send(int socket, struct wire_out *out, const int *fds, int num_fds);

#endif
