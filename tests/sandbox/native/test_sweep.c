/* Sweeps, where this program is pid 1 of a pid namespace with its own /proc (the test's launcher sees to that). */
#define _GNU_SOURCE
#include "check.h"
#include "sweep.c" /* its static functions too */

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static int *counter; /* processes that have come up */

static void stay(void)
{
    __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    for (;;)
        pause();
}

/* A child that is a subreaper, with a chain of descendants; every second one leaves its session and its parent. */
static pid_t start_keeper(int depth)
{
    pid_t pid = fork();

    if (pid != 0)
        return pid;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (int i = 0; i < depth; i++) {
        if (fork() != 0) {
            if (i % 2)
                _exit(0);
            stay();
        }
        if (i % 2)
            setsid();
    }
    prctl(PR_SET_NAME, "a) Z 1 (b"); /* names are the children's own choice */
    stay();
    return 0;
}

static void wait_until(int count)
{
    while (__atomic_load_n(counter, __ATOMIC_SEQ_CST) < count)
        usleep(1000);
}

static void *stay_in_a_thread(void *nothing)
{
    stay();
    return nothing;
}

/* Of the one child that a process has. */
static int first_thread_is_gone(pid_t parent)
{
    char path[64], state = 0;
    int child = 0;

    snprintf(path, sizeof path, "/proc/%d/task/%d/children", parent, parent);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL && fscanf(file, "%d", &child) == 1);
    fclose(file);
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    file = fopen(path, "re");
    CHECK(file != NULL && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
    fclose(file);
    return state == 'Z';
}

/* How many others live; the dead are reaped first. */
static int count_living(void)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int count = 0;

    while (waitpid(-1, NULL, WNOHANG) > 0)
        ;
    CHECK(proc != NULL);
    while ((entry = readdir(proc)) != NULL) {
        char path[300], state = 'Z';
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *file = atoi(entry->d_name) > 1 ? fopen(path, "re") : NULL;
        if (file == NULL)
            continue;
        char text[512], *end = fgets(text, sizeof text, file) ? strrchr(text, ')') : NULL;
        if (end)
            state = end[2];
        fclose(file);
        count += state != 'Z' && state != 'X';
    }
    closedir(proc);
    return count;
}

static void a_sweep_kills_what_its_keeper_holds_and_nothing_else(void)
{
    pid_t keepers[2];

    *counter = 0;
    keepers[0] = start_keeper(7);
    wait_until(5);
    keepers[1] = start_keeper(7);
    wait_until(10);
    CHECK(count_living() == 10);
    sweep_descendants(keepers[0], keepers, 2);
    CHECK(count_living() == 6); /* the keeper itself stays, and so does all of the other */
    sweep_descendants(keepers[1], keepers, 2);
    CHECK(count_living() == 2);
    sweep_descendants(0, keepers, 2); /* nobody is left without a keeper */
    CHECK(count_living() == 2);
    sweep_descendants(0, keepers, 0);
    CHECK(count_living() == 0);
}

static void what_lost_its_keeper_is_swept_with_nobodys(void)
{
    pid_t keepers[2];

    *counter = 0;
    keepers[0] = start_keeper(5);
    wait_until(4);
    keepers[1] = start_keeper(5);
    wait_until(8);
    kill(keepers[0], SIGKILL);
    CHECK(WIFSIGNALED(wait_for(keepers[0])));
    sweep_descendants(0, keepers + 1, 1);
    CHECK(count_living() == 4);
    sweep_descendants(0, keepers, 0);
    CHECK(count_living() == 0);
}

static void a_process_whose_first_thread_has_ended_is_no_dead_one(void)
{
    pid_t keepers[2];

    *counter = 0;
    for (int i = 0; i < 2; i++)
        if ((keepers[i] = fork()) == 0) {
            if (fork() == 0) {
                pthread_t thread;
                pthread_create(&thread, NULL, stay_in_a_thread, NULL);
                pthread_exit(NULL);
            }
            stay();
        }
    wait_until(4);
    while (!first_thread_is_gone(keepers[0]) || !first_thread_is_gone(keepers[1]))
        usleep(1000);
    sweep_descendants(keepers[0], keepers, 2);
    CHECK(signal_all(keepers[0], keepers, 2, 0, INT64_MAX) == 0 && signal_all(keepers[1], keepers, 2, 0, INT64_MAX) == 1);
    sweep_descendants(0, keepers, 0);
    CHECK(count_living() == 0);
}

static void nobody_is_signalled_whose_descent_is_not_known(void)
{
    static const pid_t looked[][2] = {{5, 1}, {6, 5}, {7, 90}, {8, 7}, {20, 21}, {21, 20}, {22, 21}, {30, 22}, {40, 6}};
    static const pid_t tops[] = {5, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 5};
    int count = sizeof tops / sizeof *tops;

    for (int i = 0; i < count; i++) {
        seen[i].pid = looked[i][0];
        seen[i].parent = looked[i][1];
    }
    find_tops(count);
    for (int i = 0; i < count; i++)
        CHECK(seen[i].top == tops[i]);
}

static void who_forks_and_ends_without_rest_does_not_outrun_a_sweep(void)
{
    pid_t keepers[2];

    for (int num_chains = 1; num_chains <= 64; num_chains *= 4) {
        *counter = 0;
        keepers[0] = start_keeper(5);
        wait_until(4);
        if ((keepers[1] = fork()) == 0) {
            prctl(PR_SET_CHILD_SUBREAPER, 1);
            signal(SIGCHLD, SIG_IGN);
            for (int i = 0; i < num_chains; i++)
                if (fork() == 0)
                    for (;;)
                        if (fork() > 0)
                            _exit(0);
            stay();
        }
        wait_until(5);
        sweep_descendants(keepers[1], keepers, 2);
        CHECK(signal_all(keepers[1], keepers, 2, 0, INT64_MAX) == 0);
        CHECK(signal_all(keepers[0], keepers, 2, 0, INT64_MAX) == 3);
        sweep_descendants(0, keepers, 0);
        CHECK(count_living() == 0);
    }
}

static void what_cannot_be_looked_at_ends_as_a_whole(void)
{
    struct rlimit old, none;

    *counter = 0;
    CHECK(getrlimit(RLIMIT_NOFILE, &old) == 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = old.rlim_max};
    pid_t keeper = start_keeper(5);
    wait_until(4);
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    sweep_descendants(0, &keeper, 1);
    CHECK(setrlimit(RLIMIT_NOFILE, &old) == 0);
    while (count_living() > 0) /* a signal for all is on its way when it was sent */
        usleep(1000);
}

static void a_keeper_that_is_unknown_or_gone_is_no_error(void)
{
    pid_t keeper = 12345;

    sweep_descendants(keeper, &keeper, 1);
    CHECK(count_living() == 0);
}

int main(void)
{
    CHECK(getpid() == 1);
    counter = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(counter != MAP_FAILED);
    RUN(a_sweep_kills_what_its_keeper_holds_and_nothing_else);
    RUN(what_lost_its_keeper_is_swept_with_nobodys);
    RUN(a_process_whose_first_thread_has_ended_is_no_dead_one);
    RUN(nobody_is_signalled_whose_descent_is_not_known);
    RUN(who_forks_and_ends_without_rest_does_not_outrun_a_sweep);
    RUN(what_cannot_be_looked_at_ends_as_a_whole);
    RUN(a_keeper_that_is_unknown_or_gone_is_no_error);
    return 0;
}
