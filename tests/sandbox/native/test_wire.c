/* Frames: every length is checked before anything is used, and no descriptor of a refused frame stays open. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define HEADER sizeof(struct wire_header)

static unsigned char buffer[WIRE_MAX_FRAME];

static void a_frame_is_read_back_with_unaligned_items(void)
{
    struct wire_out out;
    struct wire_frame frame;
    struct wire_entry entry;
    unsigned char *block, *bytes;
    uint32_t number;

    wire_begin(&out, WIRE_RUN, 7);
    put_text(&out, TAG_ARGV, "ab"); /* three bytes: what follows is not aligned */
    wire_put_u32(&out, TAG_STDIO, 3);
    seal_frame(&out, &frame);
    bytes = exact(out.bytes, out.length, &block);
    CHECK(wire_check(bytes, out.length, &frame) == 0);
    CHECK(frame.header.kind == WIRE_RUN && frame.header.id == 7);
    struct wire_cursor cursor = wire_items(&frame);
    CHECK(wire_next(&cursor, &entry) == 1 && entry.tag == TAG_ARGV);
    CHECK(strcmp(wire_string(&entry), "ab") == 0);
    CHECK(wire_next(&cursor, &entry) == 1 && entry.tag == TAG_STDIO);
    CHECK(wire_u32(&entry, &number) == 1 && number == 3);
    CHECK(wire_next(&cursor, &entry) == 0);
    free(block);
}

static void every_truncation_is_refused(void)
{
    struct wire_out out;
    struct wire_frame frame;

    wire_begin(&out, WIRE_RUN, 7);
    put_text(&out, TAG_ARGV, "true");
    wire_put_u32(&out, TAG_STDIO, 3);
    seal_frame(&out, &frame);
    for (size_t length = 0; length < out.length; length++) {
        unsigned char *block, *bytes = exact(out.bytes, length, &block);
        CHECK(wire_check(bytes, length, &frame) < 0 && errno == EPROTO);
        if (length >= HEADER) { /* also where the header says what is there; between items it is a frame */
            uint32_t said = (uint32_t)(length - HEADER);
            memcpy(bytes + offsetof(struct wire_header, length), &said, sizeof said);
            CHECK(wire_check(bytes, length, &frame) == (said == 0 || said == 8 + 5 ? 0 : -1));
        }
        free(block);
    }
}

static void a_wrong_magic_version_or_length_is_refused(void)
{
    struct wire_header good = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = WIRE_RUN}, bad;
    struct wire_frame frame;

    CHECK(wire_check((unsigned char *)&good, sizeof good, &frame) == 0);
    bad = good, bad.magic ^= 1;
    CHECK(wire_check((unsigned char *)&bad, sizeof bad, &frame) < 0);
    bad = good, bad.version++;
    CHECK(wire_check((unsigned char *)&bad, sizeof bad, &frame) < 0);
    bad = good, bad.length = 0xffffffff;
    CHECK(wire_check((unsigned char *)&bad, sizeof bad, &frame) < 0);
}

static void an_item_that_is_longer_than_what_is_left_is_refused(void)
{
    static const uint32_t lengths[] = {1, 5, 0x7fffffff, 0x80000000, 0xfffffff8, 0xffffffff};
    struct wire_out out;
    struct wire_frame frame;
    struct wire_item item = {.tag = TAG_ARGV};

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        wire_begin(&out, WIRE_RUN, 1);
        wire_put(&out, TAG_ARGV, "", 1);
        seal_frame(&out, &frame);
        item.length = lengths[i] == 1 ? 2 : lengths[i];
        memcpy(out.bytes + HEADER, &item, sizeof item);
        unsigned char *block, *bytes = exact(out.bytes, out.length, &block);
        CHECK(wire_check(bytes, out.length, &frame) < 0 && errno == EPROTO);
        free(block);
    }
    wire_begin(&out, WIRE_RUN, 1);
    wire_put(&out, TAG_ARGV, "", 1);
    seal_frame(&out, &frame);
    out.bytes[HEADER + 2] = 1; /* the reserved half */
    CHECK(wire_check(out.bytes, out.length, &frame) < 0);
}

static struct wire_entry entry_of(const char *bytes, size_t length, unsigned char **block)
{
    return (struct wire_entry){.tag = 1, .length = (uint32_t)length, .data = exact(bytes, length, block)};
}

static void a_string_has_one_nul_and_that_is_its_last_byte(void)
{
    static const struct {
        const char *bytes;
        size_t length;
        int good;
    } cases[] = {{"", 0, 0}, {"", 1, 1}, {"a", 1, 0}, {"a", 2, 1}, {"a\0b", 4, 0}, {"\0", 2, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char *block;
        struct wire_entry entry = entry_of(cases[i].bytes, cases[i].length, &block);
        CHECK((wire_string(&entry) != NULL) == cases[i].good);
        free(block);
    }
}

static void a_pair_is_two_strings_after_what_is_skipped(void)
{
    static const struct {
        const char *bytes;
        size_t length, skip;
        int good;
    } cases[] = {{"", 0, 0, 0},     {"a", 2, 0, 0},         {"a\0b", 4, 0, 1},  {"a\0b", 3, 0, 0}, {"\0", 2, 0, 1},
                 {"1234", 4, 4, 0}, {"1234a\0b", 8, 4, 1}, {"1234a", 6, 4, 0}, {"1", 2, 4, 0},    {"123\0", 5, 4, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char *block;
        const char *first, *second;
        struct wire_entry entry = entry_of(cases[i].bytes, cases[i].length, &block);
        int good = wire_pair(&entry, cases[i].skip, &first, &second);
        CHECK(good == cases[i].good);
        if (good) /* both end inside the item */
            CHECK(second + strlen(second) < (const char *)entry.data + entry.length && first < second);
        free(block);
    }
}

static void a_number_of_less_than_four_bytes_is_refused(void)
{
    uint32_t value = 5;

    for (size_t length = 0; length < 4; length++) {
        unsigned char *block;
        struct wire_entry entry = entry_of("\1\2\3", length, &block);
        CHECK(wire_u32(&entry, &value) == 0 && value == 5);
        free(block);
    }
}

static void what_does_not_fit_into_an_answer_is_left_out(void)
{
    struct wire_out out;
    struct wire_frame frame;
    static char text[9000];

    memset(text, 'x', sizeof text - 1);
    wire_begin(&out, WIRE_FAILED, 1);
    put_text(&out, TAG_TEXT, text);
    wire_put_u32(&out, TAG_ERRNO, 5);
    seal_frame(&out, &frame);
    CHECK(frame.header.length == sizeof(struct wire_item) + 4);
}

/* Sends bytes with that many copies of one descriptor. */
static void send_with(int socket, const void *bytes, size_t length, int num_fds)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 253)];
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    memset(control, 0, sizeof control);
    if (num_fds > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)num_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)num_fds);
        for (int i = 0; i < num_fds; i++)
            memcpy(CMSG_DATA(c) + (size_t)i * sizeof(int), &socket, sizeof(int));
    }
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)length);
}

static void descriptors_come_with_their_frame_or_are_closed(void)
{
    static const int counts[] = {0, 1, 63, 64, 65, 66, 71, 72, 73, 100, 253};
    struct wire_out out;
    struct wire_frame frame;
    int pair[2], yes = 1;

    wire_begin(&out, WIRE_RUN, 7);
    put_text(&out, TAG_ARGV, "true");
    seal_frame(&out, &frame);
    for (int credentials = 0; credentials < 2; credentials++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
            if (credentials)
                CHECK(setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) == 0);
            int before = count_fds();
            send_with(pair[1], out.bytes, out.length, counts[i]);
            int got = wire_receive(pair[0], buffer, &frame, 0);
            if (counts[i] <= WIRE_MAX_FDS) {
                CHECK(got == 1 && frame.num_fds == counts[i]);
                CHECK(frame.sender == (credentials ? getpid() : 0));
                CHECK(count_fds() == before + counts[i]);
                for (int j = 0; j < frame.num_fds; j++)
                    CHECK(fcntl(frame.fds[j], F_GETFD) == FD_CLOEXEC);
            } else {
                CHECK(got == -1 && errno == EPROTO && frame.num_fds == 0);
            }
            wire_close_fds(&frame);
            CHECK(count_fds() == before);
            /* The same with bytes that are no frame, and with none at all. */
            send_with(pair[1], "nonsense", 8, counts[i]);
            CHECK(wire_receive(pair[0], buffer, &frame, 0) == -1 && errno == EPROTO && count_fds() == before);
            CHECK(frame.header.length == 8 && memcmp(buffer, "nonsense", 8) == 0);
            send_with(pair[1], "", 0, counts[i]);
            got = wire_receive(pair[0], buffer, &frame, 0);
            CHECK(counts[i] ? got == -1 && errno == EPROTO : got == 0);
            CHECK(count_fds() == before);
            close(pair[0]);
            close(pair[1]);
        }
}

static void a_frame_whose_descriptors_find_no_room_comes_without_them_and_says_so(void)
{
    struct wire_out out;
    struct wire_frame frame;
    struct rlimit before, full;
    int pair[2];

    wire_begin(&out, WIRE_RUN, 7);
    seal_frame(&out, &frame);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    for (int room = 0; room < 3; room++) {
        int count = count_fds(), next = dup(0);
        close(next);
        send_with(pair[1], out.bytes, out.length, 3);
        full = before, full.rlim_cur = (rlim_t)(next + room);
        CHECK(setrlimit(RLIMIT_NOFILE, &full) == 0);
        CHECK(wire_receive(pair[0], buffer, &frame, 0) == 1);
        CHECK(frame.lost && frame.num_fds == 0 && frame.header.kind == WIRE_RUN && frame.header.id == 7);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(count_fds() == count);
    }
    send_with(pair[1], out.bytes, out.length, 3);
    CHECK(wire_receive(pair[0], buffer, &frame, 0) == 1 && !frame.lost && frame.num_fds == 3);
    wire_close_fds(&frame);
    close(pair[0]);
    close(pair[1]);
}

static void a_message_longer_than_a_frame_is_refused_and_the_next_one_is_read(void)
{
    struct wire_frame frame;
    struct wire_out out;
    static unsigned char huge[WIRE_MAX_FRAME + 1];
    struct wire_header header = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = WIRE_RUN};
    struct wire_item item = {.tag = TAG_TEXT};
    int pair[2], size = 1 << 20;

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    CHECK(setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
    int before = count_fds();
    for (size_t length = WIRE_MAX_FRAME; length <= sizeof huge; length++) {
        header.length = (uint32_t)(length - HEADER);
        item.length = (uint32_t)(length - HEADER - sizeof item);
        memcpy(huge, &header, sizeof header);
        memcpy(huge + HEADER, &item, sizeof item);
        send_with(pair[1], huge, length, 3);
        int got = wire_receive(pair[0], buffer, &frame, 0);
        CHECK(length == WIRE_MAX_FRAME ? got == 1 && frame.num_fds == 3 : got == -1 && errno == EPROTO);
        wire_close_fds(&frame);
        CHECK(count_fds() == before);
    }
    wire_begin(&out, WIRE_GO, 1);
    CHECK(wire_send(pair[1], &out, NULL, 0) == 0);
    CHECK(wire_receive(pair[0], buffer, &frame, 0) == 1 && frame.header.kind == WIRE_GO);
    CHECK(wire_receive(pair[0], buffer, &frame, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    close(pair[1]);
    CHECK(wire_receive(pair[0], buffer, &frame, 0) == 0);
    CHECK(wire_send(pair[0], &out, NULL, 0) == -1 && errno == EPIPE);
    close(pair[0]);
}

int main(void)
{
    RUN(a_frame_is_read_back_with_unaligned_items);
    RUN(every_truncation_is_refused);
    RUN(a_wrong_magic_version_or_length_is_refused);
    RUN(an_item_that_is_longer_than_what_is_left_is_refused);
    RUN(a_string_has_one_nul_and_that_is_its_last_byte);
    RUN(a_pair_is_two_strings_after_what_is_skipped);
    RUN(a_number_of_less_than_four_bytes_is_refused);
    RUN(what_does_not_fit_into_an_answer_is_left_out);
    RUN(descriptors_come_with_their_frame_or_are_closed);
    RUN(a_frame_whose_descriptors_find_no_room_comes_without_them_and_says_so);
    RUN(a_message_longer_than_a_frame_is_refused_and_the_next_one_is_read);
    return 0;
}
