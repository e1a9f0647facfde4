/* What the parts of the native helper offer each other. */
#ifndef ROLLOUT_NATIVE_H
#define ROLLOUT_NATIVE_H

#include "wire.h"

#include <sys/resource.h>

int warden_main(int engine, int lock);
int agent_main(int engine, int filter);

/* nest.c: a user namespace with the engine user's subordinate ids; 0 once they are there */
int nest_enter(int sync);

/* files.c: cgroup files and directories, from outside */
int file_write(const char *path, const char *value);
int cgroup_make(const char *path);
int cgroup_remove(const char *path); /* with everything below; EBUSY while occupied */
int cgroup_kill(const char *path);   /* everything below, by cgroup.kill or process by process */

/* jail.c: what a child of the warden does before it becomes a jail, or for one */
pid_t jail_spawn(const struct wire_frame *frame, int sync);
int jail_become(const struct wire_entry *entry); /* takes the uid and gid of a TAG_IDS item */

/* mounts.c: the mounts of one sandbox alone, made from outside. The child ends with 0, with an
 * errno, or with MOUNTS_SHARED plus an errno: all is there, but the image has no overlay. */
#define MOUNTS_SHARED 128
pid_t mounts_make(const struct wire_frame *frame, int pidfd, int *layers); /* a channel for layers_take, or -1 */

/* nodes.c: a file system with the nodes of the TAG_NODE items, made as the host's root; -1: not here */
int nodes_make(const struct wire_frame *frame);
const char *nodes_target(const struct wire_entry *entry, const char **name); /* of such an item */
int nodes_place(int made, const char *directory);

/* command.c: one command inside */
struct command_slot { /* shared with the child until it execs */
    int32_t setup_errno;
    int32_t done;
    int32_t status;
    int32_t killed; /* set before a sweep looks; a child that starts later ends itself */
    struct rusage usage;
};
struct command_slot *command_slots(int count, void *frames, size_t num_bytes); /* shared with every child, but for a
    session's holder, which keeps no page of frames (aligned) either; NULL with errno */
pid_t command_start(const struct wire_frame *frame, struct command_slot *slot, int wake);
pid_t command_transfer(const struct wire_frame *frame, struct command_slot *slot);

/* cleaning.c: the end of a lease */
void clean_begin(void); /* said once, before anything has run */
void clean_note(void);  /* said before anything is done in a lease */
void clean(struct wire_residue *residue);

/* sweep.c: processes by descent, where no cgroup holds them together: those below that keeper (0: below none of them)
 * are dead when it returns */
void sweep_descendants(pid_t keeper, const pid_t *keepers, int num_keepers);

/* session.c: what holds the descriptors of a session's runs beside its shell */
_Noreturn void session_hold(int engine, pid_t shell);

/* transfer.c */
int transfer_open_read(const char *path);
int transfer_copy_in(int source, const char *path, mode_t mode);

#endif
