/* Entry point of the native helper: `warden FD LOCK_FD` outside, `agent FD` inside a jail. */
#include "native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "warden") == 0)
        return warden_main(atoi(argv[2]), atoi(argv[3]));
    if (argc == 3 && strcmp(argv[1], "agent") == 0)
        return agent_main(atoi(argv[2]));
    fprintf(stderr, "usage: %s warden FD LOCK_FD | agent FD\n", argc ? argv[0] : "rollout-native");
    return 2;
}
