/* The little that the tests of the C parts share. A test is a function; the first failure ends the program. */
#ifndef ROLLOUT_TEST_CHECK_H
#define ROLLOUT_TEST_CHECK_H

#include "native.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "%s:%d: not so: %s (errno %s)\n", __FILE__, __LINE__, #what, \
                    strerror(errno));                                                     \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#define RUN(test) (printf("%s\n", #test), fflush(stdout), (test)())

static inline int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;

    CHECK(dir != NULL);
    while (readdir(dir) != NULL)
        count++;
    closedir(dir);
    return count;
}

/* A frame in a block of exactly its size, at an odd address: a read past its end is seen. */
static inline unsigned char *exact(const void *bytes, size_t length, unsigned char **block)
{
    *block = malloc(length + 1);
    CHECK(*block != NULL);
    if (length > 0)
        memcpy(*block + 1, bytes, length);
    return *block + 1;
}

/* Closes the frame and checks it, as a receiver sees it. */
static inline void seal_frame(struct wire_out *out, struct wire_frame *frame)
{
    uint32_t length = (uint32_t)(out->length - sizeof(struct wire_header));

    memcpy(out->bytes + offsetof(struct wire_header, length), &length, sizeof length);
    memset(frame, 0, sizeof *frame);
    CHECK(wire_check(out->bytes, out->length, frame) == 0);
}

static inline void put_text(struct wire_out *out, uint16_t tag, const char *text)
{
    wire_put(out, tag, text, strlen(text) + 1);
}

static inline int wait_for(pid_t pid)
{
    int status;

    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

#endif
