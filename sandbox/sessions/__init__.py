"""A persistent shell in a sandbox: one script after another in the same shell, with boundaries out of band.

    async with sandbox.session() as session:
        outcome = await session.run("cd src; export DEBUG=1; make", timeout_s=60)
        outcome = await session.run("pwd; echo $DEBUG $?")

What stays from run to run: directory, variables, functions, aliases, options, traps, umask, descriptors from 3 on, and
background jobs. What is each run's own: stdin, stdout and stderr (a background job keeps those of its run; what it
writes once that is over is thrown away, and is in no other run's output), and the usage. On a terminal, the streams are
the terminal's: what a background job writes there is shown when it is read next, and nothing is read between runs.

A run is over when the shell says so over a socket of its own, which no command inherits and which no path leads to;
nothing is ever looked for in the output. What only a shell can do to itself, its code can: speak over that socket
(`>&10`, in a fork of the shell too), which ends the session with an outcome that says so, or lies about an exit code
as any program can about its own; make `POSIXLY_CORRECT` readonly, leave itself no descriptors or processes, or read
the socket dry from a `DEBUG` trap or `PROMPT_COMMAND`: such runs end by their timeout, or with status 1 and nothing
done. Who kills or stops the session's holder (a process of the same user) ends the session. Nothing of this reaches
another session, or a command.
"""
