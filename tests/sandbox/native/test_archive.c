/* Trees of files as records: what goes in comes out, and broken or hostile records make nothing outside. */
#define _GNU_SOURCE
#include "archive.h"
#include "check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define NUM_BROKEN 20000

static char base[] = "/tmp/rollout-archive-XXXXXX";
static unsigned char stream[4096];
static size_t length;

static const char *at(const char *name)
{
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

static void add(const void *data, size_t size)
{
    CHECK(length + size <= sizeof stream);
    memcpy(stream + length, data, size);
    length += size;
}

static void add_record(uint16_t kind, const char *path, size_t size)
{
    struct archive_record record = {.magic = ARCHIVE_MAGIC,
                                    .kind = kind,
                                    .mode = 0755,
                                    .path_length = (uint32_t)strlen(path),
                                    .size = size};

    add(&record, sizeof record);
    add(path, strlen(path));
}

static void add_block(const char *text)
{
    uint32_t size = (uint32_t)strlen(text);

    add(&size, sizeof size);
    add(text, size);
}

/* Unpacks the stream below "tree". */
static int unpack(void)
{
    int source = memfd_create("source", MFD_CLOEXEC), told = memfd_create("report", MFD_CLOEXEC);
    int fds = count_fds();

    CHECK(write(source, stream, length) == (ssize_t)length && lseek(source, 0, SEEK_SET) == 0);
    int result = archive_unpack(source, told, at("tree")), error = errno;
    CHECK(count_fds() == fds);
    close(source);
    close(told);
    return errno = error, result;
}

static void a_tree_is_made_as_the_records_say(void)
{
    char text[8] = {0};
    struct stat info;

    length = 0;
    add_record(ARCHIVE_DIRECTORY, "d", 0);
    add_record(ARCHIVE_FILE, "d/f", 5);
    add_block("ab");
    add_block("cde");
    add_block("");
    add_record(ARCHIVE_FILE, "deep/er/g", 9);
    add_block("");
    add_record(ARCHIVE_LINK, "l", 3);
    add("d/f", 3);
    add_record(ARCHIVE_SEAL, "d", 0);
    add_record(ARCHIVE_END, "", 0);
    CHECK(unpack() == 0);
    int fd = open(at("tree/l"), O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && read(fd, text, sizeof text) == 5 && strcmp(text, "abcde") == 0);
    close(fd);
    CHECK(stat(at("tree/d"), &info) == 0 && (info.st_mode & 07777) == 0755);
    CHECK(stat(at("tree/deep/er/g"), &info) == 0 && info.st_size == 0);
}

static void no_name_leads_out(void)
{
    static const char *const names[] = {"/x", "../x", "a/../../x", "a//x", "a/", ".", "a/.", "..", "", "out/x"};

    CHECK(mkdir(at("tree"), 0755) == 0 || errno == EEXIST);
    CHECK(mkdir(at("outside"), 0755) == 0 && symlink("../outside", at("tree/out")) == 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (uint16_t kind = ARCHIVE_FILE; kind <= ARCHIVE_SEAL; kind++) {
            length = 0;
            add_record(kind, names[i], 1);
            add_block("x");
            add_block("");
            CHECK(unpack() < 0);
        }
    CHECK(rmdir(at("outside")) == 0); /* empty still */
}

static void a_file_is_no_longer_than_it_claims(void)
{
    length = 0;
    add_record(ARCHIVE_FILE, "short", 2);
    add_block("abc");
    CHECK(unpack() < 0 && errno == EPROTO);
}

static void broken_streams_are_refused_or_stay_inside(void)
{
    size_t whole;

    length = 0;
    add_record(ARCHIVE_DIRECTORY, "d", 0);
    add_record(ARCHIVE_FILE, "d/f", 5);
    add_block("abcde");
    add_block("");
    add_record(ARCHIVE_LINK, "d/l", 1);
    add("f", 1);
    add_record(ARCHIVE_SEAL, "d", 0);
    add_record(ARCHIVE_END, "", 0);
    whole = length;
    srandom(7);
    for (int i = 0; i < NUM_BROKEN; i++) {
        unsigned char saved[sizeof stream];
        memcpy(saved, stream, whole);
        for (long n = random() % 4; n >= 0; n--)
            stream[(size_t)random() % whole] = (unsigned char)random();
        length = (size_t)random() % 4 ? whole : (size_t)random() % whole;
        unpack();
        memcpy(stream, saved, whole);
        length = whole;
    }
    CHECK(access(at("outside"), F_OK) < 0);
}

static void clear(void)
{
    char command[128];

    snprintf(command, sizeof command, "chmod -R u+rwx %s && rm -rf %s/*", base, base);
    CHECK(system(command) == 0);
}

static void packing_gives_what_unpacking_takes(void)
{
    int target = memfd_create("target", MFD_CLOEXEC);
    struct archive_record record;

    length = 0;
    add_record(ARCHIVE_FILE, "only", 3);
    add_block("xyz");
    add_block("");
    add_record(ARCHIVE_END, "", 0);
    clear();
    CHECK(unpack() == 0);
    CHECK(archive_pack(target, at("tree"), 1 << 20, 10) == 0);
    CHECK(lseek(target, 0, SEEK_SET) == 0);
    CHECK(archive_read(target, &record, sizeof record) == 0 && record.kind == ARCHIVE_FILE && record.size == 3);
    CHECK(lseek(target, 0, SEEK_SET) == 0 && ftruncate(target, 0) == 0);
    CHECK(archive_pack(target, at("tree"), 1000, 10) < 0 && errno == EFBIG);
    CHECK(lseek(target, 0, SEEK_SET) == 0 && ftruncate(target, 0) == 0);
    CHECK(archive_pack(target, at("tree"), 1 << 20, 0) < 0 && errno == E2BIG);
    CHECK(archive_pack(target, at("tree/only"), 1 << 20, 10) < 0 && errno == ENOTDIR);
}

int main(void)
{
    CHECK(mkdtemp(base) != NULL);
    RUN(a_tree_is_made_as_the_records_say);
    RUN(no_name_leads_out);
    RUN(a_file_is_no_longer_than_it_claims);
    RUN(broken_streams_are_refused_or_stay_inside);
    RUN(packing_gives_what_unpacking_takes);
    clear();
    return rmdir(base);
}
