/* Sweeps, where this program is pid 1 of a pid namespace with its own /proc (the test's launcher sees to that). */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

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
    RUN(a_keeper_that_is_unknown_or_gone_is_no_error);
    return 0;
}
