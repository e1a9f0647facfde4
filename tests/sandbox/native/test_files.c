/* Cgroup directories and files that cross the boundary, on an ordinary file system. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

static char base[] = "/tmp/rollout-files-XXXXXX";

static const char *at(const char *name)
{
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

static void put_file(const char *name, const char *text)
{
    int fd = open(at(name), O_WRONLY | O_CREAT | O_TRUNC, 0644);

    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

static void a_tree_is_removed_and_an_absent_one_is_no_error(void)
{
    CHECK(cgroup_make(at("g")) == 0 && cgroup_make(at("g")) == 0);
    CHECK(cgroup_make(at("g/a")) == 0 && cgroup_make(at("g/a/b")) == 0 && cgroup_make(at("g/c")) == 0);
    CHECK(cgroup_make(at("absent/a")) < 0 && errno == ENOENT);
    CHECK(cgroup_remove(at("g")) == 0 && access(at("g"), F_OK) < 0);
    CHECK(cgroup_remove(at("g")) == 0);
}

static void what_is_occupied_stays_and_is_told(void)
{
    CHECK(cgroup_make(at("g")) == 0 && cgroup_make(at("g/a")) == 0 && cgroup_make(at("g/b")) == 0);
    put_file("g/a/occupied", "");
    CHECK(symlink(base, at("g/link")) == 0); /* never followed */
    CHECK(cgroup_remove(at("g")) < 0 && errno == ENOTEMPTY);
    CHECK(access(at("g/a/occupied"), F_OK) == 0 && access(at("g/b"), F_OK) < 0);
    unlink(at("g/a/occupied"));
    unlink(at("g/link"));
    CHECK(cgroup_remove(at("g")) == 0);
}

static void a_write_says_what_went_wrong(void)
{
    put_file("value", "");
    CHECK(file_write(at("value"), "12") == 0);
    CHECK(file_write(at("absent"), "1") < 0 && errno == ENOENT);
    CHECK(file_write("/dev/full", "1") < 0 && errno == ENOSPC);
    unlink(at("value"));
}

static void killing_goes_by_the_file_or_process_by_process(void)
{
    char text[64] = "";

    CHECK(cgroup_make(at("g")) == 0 && cgroup_make(at("g/a")) == 0);
    put_file("g/cgroup.kill", "");
    CHECK(cgroup_kill(at("g")) == 0);
    int fd = open(at("g/cgroup.kill"), O_RDONLY);
    CHECK(read(fd, text, sizeof text) == 1 && text[0] == '1');
    close(fd);
    unlink(at("g/cgroup.kill"));
    pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    snprintf(text, sizeof text, "0\n1\n%d\n%d\n", (int)getpid(), (int)pid); /* spared: all but the last */
    put_file("g/a/cgroup.procs", text);
    CHECK(cgroup_kill(at("g")) == 0);
    int status = wait_for(pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    unlink(at("g/a/cgroup.procs"));
    CHECK(cgroup_remove(at("g")) == 0);
}

static void only_a_regular_file_is_opened_and_no_open_blocks(void)
{
    char self[64];

    put_file("file", "abc");
    CHECK(symlink(at("file"), at("link")) == 0 && mkfifo(at("fifo"), 0600) == 0 && mkdir(at("dir"), 0700) == 0);
    int fd = transfer_open_read(at("file"));
    CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    CHECK(transfer_open_read(self) < 0 && errno == ELOOP);
    close(fd);
    CHECK(transfer_open_read(at("link")) < 0 && errno == ELOOP);
    CHECK(transfer_open_read(at("fifo")) < 0 && errno == EINVAL);
    CHECK(transfer_open_read(at("dir")) < 0 && errno == EISDIR);
    CHECK(transfer_open_read("/dev/zero") < 0 && errno == EINVAL);
    CHECK(transfer_open_read("file") < 0 && errno == EINVAL);
    CHECK(transfer_open_read("") < 0 && errno == EINVAL);
    CHECK(transfer_open_read(at("absent")) < 0 && errno == ENOENT);
}

static void a_copy_makes_its_parents_and_fails_as_one(void)
{
    static char long_path[5000];
    int source = open(at("file"), O_RDONLY);
    struct stat info;

    memset(long_path, 'x', sizeof long_path - 1);
    long_path[0] = '/';
    CHECK(transfer_copy_in(source, at("dir/a//b/copy"), 04750) == 0);
    CHECK(stat(at("dir/a/b/copy"), &info) == 0 && info.st_size == 3 && (info.st_mode & 07777) == 04750);
    CHECK(transfer_copy_in(source, at("link"), 0644) < 0 && errno == ELOOP);
    CHECK(transfer_copy_in(source, at("fifo"), 0644) < 0); /* ENXIO: nobody reads it */
    CHECK(transfer_copy_in(source, at("dir"), 0644) < 0 && errno == EISDIR);
    CHECK(transfer_copy_in(source, at("file/below"), 0644) < 0 && errno == ENOTDIR);
    CHECK(transfer_copy_in(source, long_path, 0644) < 0 && errno == ENAMETOOLONG);
    CHECK(transfer_copy_in(source, "relative", 0644) < 0 && errno == EINVAL);
    CHECK(transfer_copy_in(-1, at("dir/none"), 0644) < 0 && errno == EBADF);
    close(source);
}

static void leave_nothing(void)
{
    unlink(at("dir/none"));
    unlink(at("dir/a/b/copy"));
    unlink(at("file"));
    unlink(at("link"));
    unlink(at("fifo"));
    CHECK(cgroup_remove(base) == 0);
}

int main(void)
{
    CHECK(mkdtemp(base) != NULL);
    RUN(a_tree_is_removed_and_an_absent_one_is_no_error);
    RUN(what_is_occupied_stays_and_is_told);
    RUN(a_write_says_what_went_wrong);
    RUN(killing_goes_by_the_file_or_process_by_process);
    RUN(only_a_regular_file_is_opened_and_no_open_blocks);
    RUN(a_copy_makes_its_parents_and_fails_as_one);
    RUN(leave_nothing);
    return 0;
}
