/* What leaves a tree through a pipe: bytes gathered into large writes, files in blocks, and the directories
 * that are still to be read. One tree at a time in a process. */
#define _GNU_SOURCE
#include "archive.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct pending { /* a directory that was told of and is still to be read */
    struct pending *next;
    char path[];
};

static struct {
    int target;
    struct pending *todo;
    size_t used;
    unsigned char bytes[ARCHIVE_BLOCK];
} out;
static unsigned char block[ARCHIVE_BLOCK];

void archive_begin(int target)
{
    out.target = target;
    out.used = 0;
}

int archive_flush(void)
{
    size_t used = out.used;

    out.used = 0;
    return archive_write(out.target, out.bytes, used);
}

int archive_put(const void *data, size_t length)
{
    if (length > sizeof out.bytes - out.used && archive_flush() < 0)
        return -1;
    if (length > sizeof out.bytes)
        return archive_write(out.target, data, length);
    memcpy(out.bytes + out.used, data, length);
    out.used += length;
    return 0;
}

int archive_put_content(int fd, uint64_t left)
{
    uint32_t length = 0;

    while (left > 0) {
        ssize_t got = read(fd, block, left < sizeof block ? (size_t)left : sizeof block);
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        length = (uint32_t)got;
        if (archive_put(&length, sizeof length) < 0 || archive_put(block, length) < 0)
            return -1;
        left -= length;
    }
    length = 0;
    return archive_put(&length, sizeof length);
}

int archive_remember(const char *path)
{
    struct pending *next = malloc(sizeof *next + strlen(path) + 1);

    if (next == NULL)
        return -1;
    next->next = out.todo;
    strcpy(next->path, path);
    out.todo = next;
    return 0;
}

int archive_walk(int base, int (*read_directory)(int base, const char *path))
{
    int result = read_directory(base, "");

    while (out.todo != NULL) {
        struct pending *next = out.todo;
        out.todo = next->next;
        if (result == 0)
            result = read_directory(base, next->path);
        free(next);
    }
    return result;
}
