/* Linked into the sanitized helper: where a sanitizer's report goes, and how nobody can miss it.
 *
 * A report ends its process with REPORT_EXIT. Outside a jail its words go to a file of REPORTS_DIR.
 * Inside, that directory is not there: the code climbs instead. Whoever reaps such a process in a jail
 * (a keeper, the agent) ends the same way, and the warden, which inherits every orphan, writes a file.
 * Invariant: a report anywhere leaves a file in REPORTS_DIR. The names with PLANTED are errors on
 * purpose, one for each kind of process, so that a test can show that this holds. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define REPORT_EXIT 86
#define WORDS_FD 99 /* carries the agent's words past a jail tool that lets descriptors through */
#define PLANTED "/planted-"
#define TEXT(value) #value
#define NUMBER(value) TEXT(value)

#define OPTIONS "exitcode=" NUMBER(REPORT_EXIT) ":print_stacktrace=1:strict_string_checks=1" \
                ":detect_stack_use_after_return=1"

static int inside;

const char *__asan_default_options(void);
const char *__ubsan_default_options(void);

/* Called by each runtime when it starts (UBSan's with its first report). */
const char *__asan_default_options(void)
{
    inside = access(REPORTS_DIR, W_OK) != 0;
    return inside ? OPTIONS : OPTIONS ":log_path=" REPORTS_DIR "/report";
}

const char *__ubsan_default_options(void)
{
    return __asan_default_options();
}

__attribute__((constructor)) static void take_words(void)
{
    if (fcntl(WORDS_FD, F_GETFD) >= 0)
        fcntl(WORDS_FD, F_SETFD, FD_CLOEXEC);
}

static void pass_on(pid_t pid, int status)
{
    char name[PATH_MAX];
    int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;

    if (pid <= 0 || (number == 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == REPORT_EXIT)))
        return;
    if (inside) {
        if (number == 0) /* what runs inside may end by any signal */
            _exit(REPORT_EXIT);
        return;
    }
    if (number == SIGKILL || number == SIGTERM || number == SIGINT || number == SIGHUP)
        return;
    snprintf(name, sizeof name, REPORTS_DIR "/child.%d", (int)pid);
    int fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
        abort();
    dprintf(fd, "a child of the warden ended with status %#x\n", (unsigned)status);
    close(fd);
}

/* A store past the end of the heap's block, or a number past its type's end, where the name says so. */
static void plant(const char *text, const char *where, int overflow)
{
    volatile int number = INT_MAX;
    size_t length = strlen(where);

    if (strncmp(text, PLANTED, strlen(PLANTED)) != 0 || strcmp(text + strlen(PLANTED), where) != 0)
        return;
    if (overflow) {
        number++;
    } else {
        volatile char *heap = malloc(length);
        if (heap != NULL)
            heap[length] = 1;
    }
}

pid_t __real_waitpid(pid_t pid, int *status, int flags);
pid_t __wrap_waitpid(pid_t pid, int *status, int flags);
pid_t __wrap_waitpid(pid_t pid, int *status, int flags)
{
    int found = 0;
    pid_t got = __real_waitpid(pid, &found, flags);

    pass_on(got, found);
    if (status != NULL)
        *status = found;
    return got;
}

pid_t __real_wait4(pid_t pid, int *status, int flags, struct rusage *usage);
pid_t __wrap_wait4(pid_t pid, int *status, int flags, struct rusage *usage);
pid_t __wrap_wait4(pid_t pid, int *status, int flags, struct rusage *usage)
{
    pid_t got = __real_wait4(pid, status, flags, usage);

    pass_on(got, *status);
    return got;
}

/* The warden's child, about to become a jail tool. */
int __real_execve(const char *path, char *const argv[], char *const env[]);
int __wrap_execve(const char *path, char *const argv[], char *const env[]);
int __wrap_execve(const char *path, char *const argv[], char *const env[])
{
    int fd = open(REPORTS_DIR "/words", O_WRONLY | O_CREAT | O_APPEND, 0666);

    plant(path, "jail", 0);
    if (fd >= 0 && fd != WORDS_FD) {
        fchmod(fd, 0666); /* the next one may be of another user */
        dup2(fd, WORDS_FD);
        close(fd);
    }
    return __real_execve(path, argv, env);
}

/* The agent's stderr is /dev/null once it has met the warden: here it is a file of reports, where there is one. */
int __real_dup3(int from, int to, int flags);
int __wrap_dup3(int from, int to, int flags);
int __wrap_dup3(int from, int to, int flags)
{
    int words = to == STDERR_FILENO && fcntl(WORDS_FD, F_GETFD) >= 0;

    return __real_dup3(words ? WORDS_FD : from, to, flags);
}

/* The shadow memory is data: under a limit on that a report could not be made. */
int __real_setrlimit(__rlimit_resource_t resource, const struct rlimit *limit);
int __wrap_setrlimit(__rlimit_resource_t resource, const struct rlimit *limit);
int __wrap_setrlimit(__rlimit_resource_t resource, const struct rlimit *limit)
{
    return resource == RLIMIT_DATA ? 0 : __real_setrlimit(resource, limit);
}

/* The agent's child, about to become a command. */
int __real_execvp(const char *file, char *const argv[]);
int __wrap_execvp(const char *file, char *const argv[]);
int __wrap_execvp(const char *file, char *const argv[])
{
    plant(file, "command", 1);
    return __real_execvp(file, argv);
}

int __real_transfer_open_read(const char *path);
int __wrap_transfer_open_read(const char *path);
int __wrap_transfer_open_read(const char *path)
{
    plant(path, "agent", 0);
    return __real_transfer_open_read(path);
}

int __real_transfer_copy_in(int source, const char *path, mode_t mode);
int __wrap_transfer_copy_in(int source, const char *path, mode_t mode);
int __wrap_transfer_copy_in(int source, const char *path, mode_t mode)
{
    plant(path, "put", 0);
    return __real_transfer_copy_in(source, path, mode);
}

int __real_cgroup_remove(const char *path);
int __wrap_cgroup_remove(const char *path);
int __wrap_cgroup_remove(const char *path)
{
    plant(path, "warden", 0);
    if (strcmp(path, PLANTED "leak") == 0)
        for (int i = 0; i < 8; i++) /* the last may still stand in a register */
            *(volatile char *)malloc(8) = 1;
    return __real_cgroup_remove(path);
}
