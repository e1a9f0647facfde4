/* Reads frames (a length in four bytes, then so many bytes) from stdin and says of each, with one character,
 * whether it is one: '1' or '0'. What is one is then read by everything that reads frames.
 *
 * Each frame lies in a block of exactly its size, and reaches wire_receive through a socket as well: both must
 * agree. Whatever an item's reader returns must lie inside that item. */
#define _GNU_SOURCE
#include "check.h"

#include "command.c" /* for its parser */

#include <sys/socket.h>

static unsigned char received[WIRE_MAX_FRAME];

static void check_inside(const struct wire_entry *entry, const char *text)
{
    const char *start = (const char *)entry->data;

    CHECK(text >= start && text + strlen(text) < start + entry->length);
}

static void read_all(const struct wire_frame *frame)
{
    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    const char *cwd = "/", *first, *second;
    uint32_t number, num_stdio = 0;
    size_t total = 0;
    int more;

    while ((more = wire_next(&cursor, &entry)) == 1) {
        total += sizeof(struct wire_item) + entry.length;
        if ((first = wire_string(&entry)) != NULL)
            check_inside(&entry, first);
        for (size_t skip = 0; skip <= 4; skip += 4)
            if (wire_pair(&entry, skip, &first, &second)) {
                check_inside(&entry, first);
                check_inside(&entry, second);
            }
        if (wire_u32(&entry, &number))
            CHECK(entry.length >= 4);
    }
    CHECK(more == 0 && total == frame->header.length);
    if (parse(frame, &cwd, &num_stdio) == 0)
        CHECK(words[0] != NULL && num_stdio <= (uint32_t)frame->num_fds);
}

int main(void)
{
    struct wire_frame frame, other;
    uint32_t length;
    int pair[2], size = 1 << 20;

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    CHECK(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
    while (fread(&length, sizeof length, 1, stdin) == 1) {
        unsigned char *bytes = malloc(length ? length : 1);
        CHECK(bytes != NULL && fread(bytes, 1, length, stdin) == length);
        int good = length <= WIRE_MAX_FRAME && wire_check(bytes, length, &frame) == 0;
        frame.num_fds = 3;
        if (good)
            read_all(&frame);
        if (length > 0) { /* an empty message is the socket's end */
            CHECK(send(pair[0], bytes, length, 0) == (ssize_t)length);
            int got = wire_receive(pair[1], received, &other, MSG_DONTWAIT);
            CHECK(got == (good ? 1 : -1));
            CHECK(!good || (other.header.length == frame.header.length &&
                            memcmp(other.items, frame.items, other.header.length) == 0));
        }
        free(bytes);
        putchar(good ? '1' : '0');
    }
    return 0;
}
