/* Commands: what a request may say, what the child does with it, and how its end is told. */
#define _GNU_SOURCE
#include "check.h"

#include "command.c" /* its static functions too */

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

static struct command_slot *slot;

static void begin(struct wire_out *out, uint32_t num_stdio, const char *word)
{
    wire_begin(out, WIRE_RUN, 1);
    wire_put_u32(out, TAG_STDIO, num_stdio);
    if (word)
        put_text(out, TAG_ARGV, word);
    memset(slot, 0, sizeof *slot);
}

static int parsed(struct wire_out *out, int num_fds, const char **cwd, uint32_t *num_stdio)
{
    struct wire_frame frame;

    seal_frame(out, &frame);
    frame.num_fds = num_fds;
    *cwd = "/";
    *num_stdio = 0;
    return parse(&frame, cwd, num_stdio);
}

static void words_variables_and_directory_are_found(void)
{
    struct wire_out out;
    const char *cwd;
    uint32_t num_stdio;

    begin(&out, 2, "one");
    put_text(&out, TAG_ENV, "A=1");
    put_text(&out, TAG_ARGV, "");
    put_text(&out, TAG_CWD, "/tmp");
    CHECK(parsed(&out, 2, &cwd, &num_stdio) == 0);
    CHECK(num_stdio == 2 && strcmp(cwd, "/tmp") == 0);
    CHECK(strcmp(words[0], "one") == 0 && strcmp(words[1], "") == 0 && words[2] == NULL);
    CHECK(strcmp(environment[0], "A=1") == 0 && environment[1] == NULL);
}

static void a_malformed_request_is_refused(void)
{
    struct wire_out out;
    const char *cwd;
    uint32_t num_stdio;

    begin(&out, 0, NULL); /* no words */
    CHECK(parsed(&out, 0, &cwd, &num_stdio) < 0 && errno == EPROTO);
    begin(&out, 3, "x"); /* more descriptors than came */
    CHECK(parsed(&out, 2, &cwd, &num_stdio) < 0 && errno == EPROTO);
    begin(&out, 0xffffffff, "x");
    CHECK(parsed(&out, 64, &cwd, &num_stdio) < 0 && errno == EPROTO);
    begin(&out, 0, "x");
    wire_put(&out, TAG_ARGV, "open end", 8);
    CHECK(parsed(&out, 0, &cwd, &num_stdio) < 0 && errno == EPROTO);
    begin(&out, 0, "x");
    wire_put(&out, TAG_CWD, "", 0);
    CHECK(parsed(&out, 0, &cwd, &num_stdio) < 0 && errno == EPROTO);
    begin(&out, 0, "x");
    wire_put(&out, TAG_STDIO, "abc", 3);
    CHECK(parsed(&out, 3, &cwd, &num_stdio) < 0 && errno == EPROTO);
}

static void more_words_than_there_is_room_for_are_refused(void)
{
    static unsigned char bytes[WIRE_MAX_FRAME];
    struct wire_header header = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = WIRE_RUN};
    struct wire_item item = {.tag = TAG_ARGV, .length = 1};
    struct wire_frame frame = {0};
    const char *cwd;
    uint32_t num_stdio = 0;

    for (uint32_t count = WIRE_MAX_STRINGS - 1; count <= WIRE_MAX_STRINGS; count++) {
        header.length = count * (uint32_t)(sizeof item + 1);
        memcpy(bytes, &header, sizeof header);
        for (uint32_t i = 0; i < count; i++)
            memcpy(bytes + sizeof header + i * (sizeof item + 1), &item, sizeof item);
        CHECK(wire_check(bytes, sizeof header + header.length, &frame) == 0);
        if (count < WIRE_MAX_STRINGS)
            CHECK(parse(&frame, &cwd, &num_stdio) == 0 && words[count] == NULL);
        else
            CHECK(parse(&frame, &cwd, &num_stdio) < 0 && errno == E2BIG);
    }
}

static void a_limit_of_another_size_or_of_nothing_is_refused(void)
{
    struct wire_out out;
    struct wire_frame frame;
    struct wire_rlimit limit = {.resource = RLIMIT_CORE, .soft = ~0ull, .hard = ~0ull};

    begin(&out, 0, "x");
    wire_put(&out, TAG_RLIMIT, &limit, sizeof limit); /* is cut to what is allowed */
    seal_frame(&out, &frame);
    CHECK(set_limits(&frame) == 0);
    begin(&out, 0, "x");
    wire_put(&out, TAG_RLIMIT, &limit, sizeof limit - 1);
    seal_frame(&out, &frame);
    CHECK(set_limits(&frame) < 0 && errno == EPROTO);
    limit.resource = 0xffffffff;
    begin(&out, 0, "x");
    wire_put(&out, TAG_RLIMIT, &limit, sizeof limit);
    seal_frame(&out, &frame);
    CHECK(set_limits(&frame) < 0 && errno == EINVAL);
}

/* Runs a request to its end; its stdout and stderr are read into text. */
static int run(struct wire_out *out, char *text, size_t room)
{
    struct wire_frame frame;
    int ends[2];
    ssize_t got;

    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    seal_frame(out, &frame);
    frame.num_fds = 3;
    frame.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    frame.fds[1] = frame.fds[2] = ends[1];
    int status = wait_for(command_start(&frame, slot, -1));
    close(ends[1]);
    close(frame.fds[0]);
    got = read(ends[0], text, room - 1);
    text[got > 0 ? got : 0] = 0;
    close(ends[0]);
    return status;
}

static void a_command_ends_with_its_own_code_or_a_shells(void)
{
    struct wire_out out;
    char text[512];

    begin(&out, 3, "sh");
    put_text(&out, TAG_ARGV, "-c");
    put_text(&out, TAG_ARGV, "echo $A; exit 7");
    put_text(&out, TAG_ENV, "A=said");
    int status = run(&out, text, sizeof text);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7 && strcmp(text, "said\n") == 0);
    begin(&out, 3, "no-such-program");
    status = run(&out, text, sizeof text);
    CHECK(WEXITSTATUS(status) == 127 && strstr(text, "no-such-program") && slot->setup_errno == 0);
    begin(&out, 3, "true");
    put_text(&out, TAG_CWD, "/no/such/place");
    status = run(&out, text, sizeof text);
    CHECK(WEXITSTATUS(status) == 126 && strstr(text, "/no/such/place") && slot->setup_errno == 0);
    begin(&out, 4, "true"); /* ours: one descriptor is missing */
    status = run(&out, text, sizeof text);
    CHECK(WEXITSTATUS(status) == 126 && slot->setup_errno == EPROTO);
    begin(&out, 2, "true"); /* ours: the third, a pipe, is no cgroup.procs, but takes the 0 */
    status = run(&out, text, sizeof text);
    CHECK(WEXITSTATUS(status) == 0 && strcmp(text, "0") == 0);
    begin(&out, 3, "true");
    slot->killed = 1; /* a sweep has begun */
    status = run(&out, text, sizeof text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void a_keeper_tells_the_end_at_once_and_stays_for_the_background(void)
{
    struct wire_out out;
    struct wire_frame frame;
    uint64_t count;
    int wake = eventfd(0, EFD_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC), ends[2];

    CHECK(wake >= 0 && null >= 0 && pipe2(ends, O_CLOEXEC) == 0);
    begin(&out, 4, "sh");
    put_text(&out, TAG_ARGV, "-c");
    put_text(&out, TAG_ARGV, "read x <&3 & exit 9"); /* waits until the pipe's other end closes */
    seal_frame(&out, &frame);
    frame.num_fds = 4;
    frame.fds[0] = frame.fds[1] = frame.fds[2] = null;
    frame.fds[3] = ends[0];
    pid_t keeper = command_start(&frame, slot, wake);
    CHECK(keeper > 0 && read(wake, &count, sizeof count) == sizeof count);
    CHECK(slot->done && WEXITSTATUS(slot->status) == 9);
    kill(keeper, SIGKILL);
    CHECK(WIFSIGNALED(wait_for(keeper)));
    close(ends[0]);
    close(ends[1]);
    close(null);
    close(wake);
}

/* Asks the holder and gives what it answers. */
static struct wire_held ask(int holder, uint16_t kind, const int *fds, int num_fds, const char **cwd)
{
    static unsigned char bytes[WIRE_MAX_FRAME];
    struct wire_out out;
    struct wire_frame frame;
    struct wire_entry entry;
    struct wire_held held = {0};

    wire_begin(&out, kind, 7);
    CHECK(wire_send(holder, &out, fds, num_fds) == 0);
    CHECK(wire_receive(holder, bytes, &frame, 0) == 1);
    CHECK(frame.header.kind == WIRE_HELD && frame.header.id == 7);
    struct wire_cursor cursor = wire_items(&frame);
    while (wire_next(&cursor, &entry) == 1)
        if (entry.tag == TAG_HELD && entry.length == sizeof held)
            memcpy(&held, entry.data, sizeof held);
        else if (entry.tag == TAG_CWD && cwd)
            *cwd = wire_string(&entry);
    return held;
}

static void a_holder_shows_descriptors_and_spares_who_lived_before(void)
{
    struct wire_out out;
    struct wire_frame frame;
    char path[64], text[8] = "";
    const char *cwd = NULL;
    int wake = eventfd(0, EFD_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC), lines[2], sockets[2], said[2];
    uint64_t count;

    CHECK(pipe2(lines, O_CLOEXEC) == 0 && pipe2(said, O_CLOEXEC) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
    begin(&out, 4, "sh");
    put_text(&out, TAG_ARGV, "-i"); /* an interrupt does not end it */
    wire_put_u32(&out, TAG_HOLDER, 1);
    put_text(&out, TAG_CWD, "/tmp");
    seal_frame(&out, &frame);
    frame.num_fds = 4;
    frame.fds[0] = lines[0];
    frame.fds[1] = said[1];
    frame.fds[2] = null;
    frame.fds[3] = sockets[1];
    pid_t keeper = command_start(&frame, slot, wake);
    close(sockets[1]);
    CHECK(keeper > 0 && write(lines[1], "sleep 1000 & p=$!; echo\n", 24) == 24 && read(said[0], text, 1) == 1);
    struct wire_held held = ask(sockets[0], WIRE_PREPARE, said, 1, NULL);
    CHECK(held.pid > 0 && held.num_left == 0);
    snprintf(path, sizeof path, "/proc/%u/fd/40", held.pid);
    CHECK(access(path, F_OK) == 0);
    CHECK(ask(sockets[0], WIRE_SWEEP, NULL, 0, NULL).num_left == 0);
    CHECK(write(lines[1], "(sleep 1000 & sleep 1000) & echo\n", 33) == 33 && read(said[0], text, 1) == 1);
    while (ask(sockets[0], WIRE_LOOK, NULL, 0, &cwd).num_left) /* a look signals nobody */
        CHECK(0);
    CHECK(cwd && strcmp(cwd, "/tmp") == 0);
    CHECK(ask(sockets[0], WIRE_INTERRUPT, NULL, 0, NULL).num_left >= 1);
    CHECK(ask(sockets[0], WIRE_SWEEP, NULL, 0, NULL).num_left == 0);
    CHECK(write(lines[1], "kill $p && exit 5\n", 18) == 18); /* the first one still lives */
    CHECK(read(wake, &count, sizeof count) == sizeof count && WEXITSTATUS(slot->status) == 5);
    close(sockets[0]); /* ends the holder, and with it the keeper's last child */
    CHECK(WIFEXITED(wait_for(keeper)));
    close(lines[0]), close(lines[1]), close(said[0]), close(said[1]), close(null), close(wake);
}

static void an_upload_needs_a_path_and_a_source(void)
{
    struct wire_out out;
    struct wire_frame frame;
    char path[] = "/tmp/rollout-put-XXXXXX", file[64], text[8] = "";
    struct stat info;
    int ends[2];

    begin(&out, 0, NULL);
    seal_frame(&out, &frame);
    frame.header.kind = WIRE_PUT;
    CHECK(WEXITSTATUS(wait_for(command_transfer(&frame, slot))) == 126 && slot->setup_errno == EPROTO);
    CHECK(mkdtemp(path) && pipe2(ends, O_CLOEXEC) == 0 && write(ends[1], "abc", 3) == 3);
    close(ends[1]);
    snprintf(file, sizeof file, "%s/file", path);
    begin(&out, 0, NULL);
    put_text(&out, TAG_PATH, file);
    wire_put_u32(&out, TAG_MODE, 0640);
    wire_put_u32(&out, TAG_STDIO, 1);
    seal_frame(&out, &frame);
    frame.header.kind = WIRE_PUT;
    CHECK(WEXITSTATUS(wait_for(command_transfer(&frame, slot))) == 126 && slot->setup_errno == EPROTO);
    frame.num_fds = 1;
    frame.fds[0] = ends[0];
    memset(slot, 0, sizeof *slot);
    CHECK(wait_for(command_transfer(&frame, slot)) == 0 && slot->setup_errno == 0);
    close(ends[0]);
    int fd = open(file, O_RDONLY);
    CHECK(read(fd, text, sizeof text) == 3 && strcmp(text, "abc") == 0);
    CHECK(fstat(fd, &info) == 0 && (info.st_mode & 0777) == 0640);
    close(fd);
    unlink(file);
    wire_put_u32(&out, TAG_MODE, 0xffffffff); /* the last one counts */
    seal_frame(&out, &frame);
    frame.header.kind = WIRE_PUT;
    frame.num_fds = 1;
    frame.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(WEXITSTATUS(wait_for(command_transfer(&frame, slot))) == EINVAL && access(file, F_OK) < 0);
    close(frame.fds[0]);
    rmdir(path);
}

int main(void)
{
    slot = mmap(NULL, sizeof *slot, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(slot != MAP_FAILED);
    RUN(words_variables_and_directory_are_found);
    RUN(a_malformed_request_is_refused);
    RUN(more_words_than_there_is_room_for_are_refused);
    RUN(a_limit_of_another_size_or_of_nothing_is_refused);
    RUN(a_command_ends_with_its_own_code_or_a_shells);
    RUN(a_keeper_tells_the_end_at_once_and_stays_for_the_background);
    RUN(a_holder_shows_descriptors_and_spares_who_lived_before);
    RUN(an_upload_needs_a_path_and_a_source);
    return 0;
}
