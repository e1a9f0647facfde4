/* Encoding and checking of frames; see wire.h for the format and its invariant. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

int wire_check(const unsigned char *bytes, size_t length, struct wire_frame *frame)
{
    struct wire_header *header = &frame->header;

    if (length < sizeof *header)
        return errno = EPROTO, -1;
    memcpy(header, bytes, sizeof *header);
    if (header->magic != WIRE_MAGIC || header->version != WIRE_VERSION ||
        header->length != length - sizeof *header)
        return errno = EPROTO, -1;
    frame->items = bytes + sizeof *header;

    struct wire_cursor cursor = wire_items(frame);
    struct wire_entry entry;
    int more;
    while ((more = wire_next(&cursor, &entry)) == 1)
        ;
    return more;
}

/* Takes what came beside the bytes; -1 when those are more descriptors than a frame may have. */
static int take_control(struct msghdr *message, struct wire_frame *frame)
{
    int surplus = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS) {
            struct ucred who;
            memcpy(&who, CMSG_DATA(c), sizeof who);
            frame->sender = who.pid;
        } else if (c->cmsg_type == SCM_RIGHTS) {
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; i++) {
                int fd;
                memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
                if (frame->num_fds < WIRE_MAX_FDS)
                    frame->fds[frame->num_fds++] = fd;
                else
                    surplus = 1, close(fd);
            }
        }
    }
    return surplus ? -1 : 0;
}

int wire_receive(int socket, unsigned char *buffer, struct wire_frame *frame, int flags)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS) +
                                          CMSG_SPACE(sizeof(struct ucred))];
    struct iovec part = {.iov_base = buffer, .iov_len = WIRE_MAX_FRAME};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    ssize_t got;

    memset(frame, 0, sizeof *frame);
    do
        got = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno == ECONNRESET ? 0 : -1;
    int taken = take_control(&message, frame);
    if (got == 0 && frame->num_fds == 0)
        return 0;
    /* Fewer than the room that there was: the kernel found no free number, which is not the peer's fault. */
    frame->lost = (message.msg_flags & MSG_CTRUNC) && frame->num_fds < WIRE_MAX_FDS;
    if (frame->lost)
        wire_close_fds(frame);
    if ((message.msg_flags & MSG_TRUNC) || ((message.msg_flags & MSG_CTRUNC) && !frame->lost) || taken < 0 ||
        wire_check(buffer, (size_t)got, frame) < 0) {
        wire_close_fds(frame);
        frame->header.length = (uint32_t)got; /* lets the warden read a jail tool's plain words */
        return errno = EPROTO, -1;
    }
    return 1;
}

void wire_close_fds(struct wire_frame *frame)
{
    for (int i = 0; i < frame->num_fds; i++)
        close(frame->fds[i]);
    frame->num_fds = 0;
}

struct wire_cursor wire_items(const struct wire_frame *frame)
{
    return (struct wire_cursor){.at = frame->items, .left = frame->header.length};
}

int wire_next(struct wire_cursor *cursor, struct wire_entry *entry)
{
    struct wire_item item;

    if (cursor->left == 0)
        return 0;
    if (cursor->left < sizeof item)
        return errno = EPROTO, -1;
    memcpy(&item, cursor->at, sizeof item);
    if (item.zero != 0 || item.length > cursor->left - sizeof item)
        return errno = EPROTO, -1;
    *entry = (struct wire_entry){
        .tag = item.tag, .length = item.length, .data = cursor->at + sizeof item};
    cursor->at += sizeof item + item.length;
    cursor->left -= sizeof item + item.length;
    return 1;
}

const char *wire_string(const struct wire_entry *entry)
{
    const void *end = entry->length ? memchr(entry->data, 0, entry->length) : NULL;

    if (end != entry->data + entry->length - 1 || end == NULL)
        return errno = EPROTO, NULL;
    return (const char *)entry->data;
}

int wire_pair(const struct wire_entry *entry, size_t skip, const char **first, const char **second)
{
    const unsigned char *middle;

    if (entry->length < skip + 2 || entry->data[entry->length - 1] != 0)
        return errno = EPROTO, 0;
    middle = memchr(entry->data + skip, 0, entry->length - skip);
    if (middle == NULL || middle == entry->data + entry->length - 1)
        return errno = EPROTO, 0;
    *first = (const char *)entry->data + skip;
    *second = (const char *)middle + 1;
    return 1;
}

int wire_u32(const struct wire_entry *entry, uint32_t *value)
{
    if (entry->length < sizeof *value)
        return errno = EPROTO, 0;
    memcpy(value, entry->data, sizeof *value);
    return 1;
}

void wire_begin(struct wire_out *out, uint16_t kind, uint32_t id)
{
    struct wire_header header = {
        .magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = kind, .id = id, .length = 0};

    memcpy(out->bytes, &header, sizeof header);
    out->length = sizeof header;
}

void wire_put(struct wire_out *out, uint16_t tag, const void *data, size_t length)
{
    struct wire_item item = {.tag = tag, .zero = 0, .length = (uint32_t)length};

    if (out->length + sizeof item + length > sizeof out->bytes)
        return; /* only texts can be this long, and those are cut by their makers */
    memcpy(out->bytes + out->length, &item, sizeof item);
    memcpy(out->bytes + out->length + sizeof item, data, length);
    out->length += sizeof item + length;
}

void wire_put_u32(struct wire_out *out, uint16_t tag, uint32_t value)
{
    wire_put(out, tag, &value, sizeof value);
}

int wire_send(int socket, struct wire_out *out, const int *fds, int num_fds)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
    struct iovec part = {.iov_base = out->bytes, .iov_len = out->length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    uint32_t length = (uint32_t)(out->length - sizeof(struct wire_header));
    ssize_t sent;

    memcpy(out->bytes + offsetof(struct wire_header, length), &length, sizeof length);
    if (num_fds > 0) {
        memset(control, 0, sizeof control);
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)num_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)num_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)num_fds);
    }
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}
