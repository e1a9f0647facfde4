/* Layers: sealed workspaces as read-only bases of others, and the stream in which a workspace is sealed.
 *
 * A record is this header and its path (no NUL; "" for the workspace itself). A FILE is followed by
 * blocks: a 32-bit length of at most ARCHIVE_BLOCK and as many bytes; a length of 0 ends the file. A LINK
 * is followed by `size` bytes of target. Mirrored by sandbox/layers/records.py. */
#ifndef ROLLOUT_LAYERS_H
#define ROLLOUT_LAYERS_H

#include "native.h"

#define LAYER_MAGIC 0x594c4c52u /* "RLLY" */
#define LAYER_MAX_PATH 4000u
#define LAYER_OPAQUE 0x8000u /* in mode, of a directory: nothing of the bases is seen in it */
#define MAX_LAYERS 64

enum layer_kind {
    LAYER_END = 0, /* nothing follows */
    LAYER_FILE = 1,
    LAYER_DIRECTORY = 2, /* comes before what lies in it */
    LAYER_LINK = 3,
    LAYER_DELETED = 4, /* a whiteout of the bases */
    LAYER_SPECIAL = 5, /* a FIFO, a socket or a device: mode is st_mode >> 12 */
    LAYER_FAILED = 6,  /* nothing follows; nanoseconds is the errno */
};

struct layer_record {
    uint32_t magic;
    uint16_t kind;
    uint16_t mode;
    uint32_t path_length;
    uint32_t nanoseconds;
    uint64_t size;
    int64_t mtime_s;
};

/* layers.c: bases in a child of the warden that mounts */
int layers_open(const struct wire_frame *frame);  /* as the engine's user; takes what LAYER items name */
int layers_bind(const char *base, const struct wire_entry *entry); /* inside, as the sandbox's uid */
int layers_hand(int socket);                      /* sends the upper directory that was made, if any */

/* and in the warden: the other end of that socket, or -1 where the frame asks for no layers */
int layers_channel(const struct wire_frame *frame, int *theirs);
int layers_take(int *socket); /* the upper directory that came, or -1; closes the socket */

/* layer_pack.c: everything below a workspace, as records; `upper` is -1 where it has no bases */
pid_t layer_pack(const struct wire_frame *request, int pidfd, int upper);

#endif
