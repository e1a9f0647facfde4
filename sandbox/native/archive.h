/* The record format in which trees of files cross the boundary: what a helper inside and the engine
 * write to each other through a pipe.
 *
 * A record is this header and its path (no NUL). A FILE is followed by blocks: a 32-bit length of
 * at most ARCHIVE_BLOCK and as many bytes; a length of 0 ends the file. Both sides check every
 * length before anything is used. Mirrored by sandbox/files/records.py. */
#ifndef ROLLOUT_ARCHIVE_H
#define ROLLOUT_ARCHIVE_H

#include <stddef.h>
#include <stdint.h>

#define ARCHIVE_MAGIC 0x52414c52u /* "RLAR" */
#define ARCHIVE_MAX_PATH 4000u    /* with room for a base below the kernel's 4096 */
#define ARCHIVE_BLOCK 65536u

enum archive_kind {
    ARCHIVE_END = 0,       /* nothing follows */
    ARCHIVE_FILE = 1,      /* size: what it claimed when it was opened; at most that much follows */
    ARCHIVE_DIRECTORY = 2, /* to the sandbox: make it, with whatever mode its filling needs */
    ARCHIVE_LINK = 3,      /* to the sandbox: size bytes of target follow the path */
    ARCHIVE_SEAL = 4,      /* to the sandbox: the directory ("" for the base) is full; give it mode and time */
    ARCHIVE_SKIPPED = 5,   /* from the sandbox: no file; mode is st_mode's type >> 12, or error why */
    ARCHIVE_FAILED = 6,    /* from the sandbox: error is the errno; nothing follows */
};

struct archive_record {
    uint32_t magic;
    uint16_t kind;
    uint16_t mode; /* permission bits; to the sandbox with the sticky bit */
    uint32_t path_length;
    uint32_t error;
    uint64_t size;
    int64_t mtime_s;
};

/* Reads records from a pipe and makes what they say below a directory; tells on the other pipe which
 * path failed. */
int archive_unpack(int source, int report, const char *base);

/* Writes records of everything below a directory: at most that many bytes (as a tar counts them) and
 * entries. */
int archive_pack(int target, const char *base, uint64_t max_bytes, uint64_t max_entries);

/* archive_io.c: pipes whole, and paths that never lead out of a directory */
int archive_read(int fd, void *data, size_t length);        /* EPROTO at an early end */
int archive_write(int fd, const void *data, size_t length);
int archive_open(int directory, const char *path, int flags); /* no link anywhere on the way */
int archive_make(int directory, const char *path);            /* opens it, making what is missing */
int archive_enter(int parent, const char *name); /* a directory to fill: made, or opened to its owner */
int archive_base(const char *path, int make);                 /* the same for an absolute path */

/* archive_out.c: what leaves a tree */
void archive_begin(int target);
int archive_put(const void *data, size_t length);
int archive_flush(void);
int archive_put_content(int fd, uint64_t left); /* at most as much as the file claimed, in blocks */
int archive_remember(const char *path);         /* a directory to be read later */
int archive_walk(int base, int (*read_directory)(int base, const char *path)); /* "", then what was remembered */

#endif
