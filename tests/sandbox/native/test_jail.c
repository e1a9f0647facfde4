/* The child that becomes a jail: whatever a request says, it ends in words, and never as the host's root. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>

static unsigned char *block;

/* Runs a request in a block of its exact size; returns the words that the child left. */
static const char *words_of(struct wire_out *out, int num_fds)
{
    static char text[1024];
    struct wire_frame frame;
    int ends[2], status;
    ssize_t got;

    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    seal_frame(out, &frame);
    CHECK(wire_check(exact(out->bytes, out->length, &block), out->length, &frame) == 0);
    for (frame.num_fds = 0; frame.num_fds < num_fds; frame.num_fds++)
        frame.fds[frame.num_fds] = ends[0];
    status = wait_for(jail_spawn(&frame, ends[1]));
    close(ends[1]);
    got = read(ends[0], text, sizeof text - 1);
    text[got > 0 ? got : 0] = 0;
    close(ends[0]);
    free(block);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 126 || WEXITSTATUS(status) == 0));
    return text;
}

static void begin(struct wire_out *out)
{
    wire_begin(out, WIRE_START, 1);
    put_text(out, TAG_ARGV, "/bin/true");
}

static void roots_jail_is_refused_and_no_other(void)
{
    struct wire_out out;
    uint32_t ids[2] = {0, 0};

    begin(&out);
    CHECK(strcmp(words_of(&out, 0), getuid() == 0 ? "refusing to start a jail as host uid 0: Operation not permitted"
                                                  : "") == 0);
    for (int i = 0; i < 3; i++) { /* root by uid, by gid, by both */
        ids[0] = i == 0 ? 5 : 0;
        ids[1] = i == 1 ? 5 : 0;
        begin(&out);
        wire_put(&out, TAG_IDS, ids, sizeof ids);
        CHECK(strstr(words_of(&out, 0), "changing to the sandbox's uid"));
    }
}

static void every_malformed_item_is_refused_in_words(void)
{
    static const struct {
        uint16_t tag;
        const char *bytes;
        size_t length;
        const char *words;
    } cases[] = {
        {TAG_DIR, "x", 1, "making cgroup ?"},
        {TAG_DIR, "/absent/a", 10, "making cgroup /absent/a: No such file"},
        {TAG_SET, "/only-one", 10, "writing"},
        {TAG_SET, "/absent/a\0 1", 13, "writing /absent/a: No such file"},
        {TAG_JOIN, "", 0, "joining cgroup ?"},
        {TAG_IDS, "1234567", 7, "changing to the sandbox's uid"},
        {TAG_COVER, "x", 1, "making a user namespace"},
        {TAG_RLIMIT, "short", 5, "reading a limit"},
        {TAG_AT, "", 0, "placing a descriptor"},
        {TAG_AT, "\2\0\0", 4, "placing a descriptor"},
        {TAG_AT, "\xff\xff\xff\xff", 4, "placing a descriptor"},
        {TAG_AT, "\5\0\0", 4, "opening a descriptor"}, /* none was passed */
        {TAG_OPEN, "\5\0\0", 4, "opening a descriptor"},
        {TAG_OPEN, "\5\0\0\0", 5, "opening a descriptor"},
        {TAG_OPEN, "\5\0\0\0/etc", 8, "opening a descriptor"}, /* without an end */
        {TAG_OPEN, "\5\0\0\0/absent", 12, "opening /absent: No such file"},
        {TAG_ARGV, "open end", 8, "reading arguments"},
        {TAG_ENV, "", 0, "reading arguments"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct wire_out out;
        begin(&out);
        wire_put(&out, cases[i].tag, cases[i].bytes, cases[i].length);
        const char *words = words_of(&out, 0);
        if (strstr(words, cases[i].words) == NULL)
            fprintf(stderr, "case %zu: %s\n", i, words);
        CHECK(strstr(words, cases[i].words));
    }
}

static void without_arguments_nothing_is_executed(void)
{
    struct wire_out out;

    wire_begin(&out, WIRE_START, 1);
    CHECK(strstr(words_of(&out, 0), "reading arguments"));
}

static void more_descriptors_than_places_are_no_error(void)
{
    struct wire_out out;

    begin(&out);
    wire_put_u32(&out, TAG_AT, 5);
    const char *words = words_of(&out, WIRE_MAX_FDS);
    CHECK(strstr(words, "opening") == NULL && strstr(words, "placing") == NULL);
}

int main(void)
{
    RUN(roots_jail_is_refused_and_no_other);
    RUN(every_malformed_item_is_refused_in_words);
    RUN(without_arguments_nothing_is_executed);
    RUN(more_descriptors_than_places_are_no_error);
    return 0;
}
