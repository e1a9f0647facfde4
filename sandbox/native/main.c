/* Entry point of the native helper: `warden FD LOCK_FD [SYNC_FD]` outside (with the third number in
 * a user namespace that the engine maps, by that socket), `agent FD [FILTER_FD]` inside a jail (with
 * the second number where the jail tool cannot install the system-call filter). */
#include "native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "warden") == 0 && nest_enter(atoi(argv[4])) < 0)
        return 1;
    if ((argc == 4 || argc == 5) && strcmp(argv[1], "warden") == 0)
        return warden_main(atoi(argv[2]), atoi(argv[3]));
    if ((argc == 3 || argc == 4) && strcmp(argv[1], "agent") == 0)
        return agent_main(atoi(argv[2]), argc == 4 ? atoi(argv[3]) : -1);
    fprintf(stderr, "usage: %s warden FD LOCK_FD [SYNC_FD] | agent FD [FILTER_FD]\n",
            argc ? argv[0] : "rollout-native");
    return 2;
}
