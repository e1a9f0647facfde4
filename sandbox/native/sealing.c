/* How the warden lets a workspace be read: one child at a time for each jail, ended with it.
 *
 * Invariant: SEALED is said when that child is dead, whatever became of it; what it wrote says more. */
#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>

void on_seal(struct wire_frame *frame)
{
    uint32_t id = frame->header.id;
    struct jail *jail = id < MAX_JAILS ? warden.jails[id] : NULL;

    if (frame->lost || frame->num_fds != 1 || jail == NULL || jail->state != LIVE || jail->mounter || jail->sealer) {
        tell(WIRE_SEALED, id, frame->lost ? EMFILE : EBUSY, NULL);
        return;
    }
    pid_t pid = layer_pack(frame, jail->pidfd, jail->upper);
    if (pid < 0) {
        tell(WIRE_SEALED, id, (uint32_t)errno, NULL);
        return;
    }
    jail->sealer = pid;
    warden.owners[pid] = id + 1;
}

void on_sealer_end(uint32_t id)
{
    struct jail *jail = warden.jails[id];

    jail->sealer = 0;
    tell(WIRE_SEALED, id, 0, NULL);
    if (jail->state == CLOSING)
        finish(id);
}
