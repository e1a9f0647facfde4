/* A user namespace for the warden of an unprivileged engine, in which it can give every sandbox a
 * host uid of its own.
 *
 * Invariant: nothing else of the warden runs before the namespace has its ids; the engine writes
 * them (by the system's newuidmap, which alone may) between the two bytes on the socket. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <unistd.h>

int nest_enter(int sync)
{
    char byte = 0;

    if (unshare(CLONE_NEWUSER) < 0)
        byte = (char)errno;
    if (write(sync, &byte, 1) != 1 || byte != 0 || read(sync, &byte, 1) != 1)
        return -1;
    close(sync);
    if (setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0)
        return -1;
    return setresuid(0, 0, 0);
}
