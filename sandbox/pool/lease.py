"""A sandbox while it is out, and who holds it.

Owns: the number of holders. Invariant: the lease ends once, when the last holder has let go; a holder lets go at most
once, at the latest when its time is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from sandbox.errors import ConfigError, SandboxDiedError
from sandbox.jail import Jail, JailKey
from sandbox.pool.ticket import Ticket
from sandbox.sandbox import Sandbox


class Lease:
    """One sandbox that was given out.

    Args:
        on_end: told once, when nobody holds it any more; must not block.
    """

    def __init__(self, ticket: Ticket, jail: Jail, sandbox: Sandbox, on_end: Callable[[Lease], None]) -> None:
        self.need = ticket.need
        self.key: JailKey = ticket.key
        self.jail = jail
        self.sandbox = sandbox
        self._on_end = on_end
        self._num_holders = 1
        self._shares: set[Share] = set()

    @property
    def over(self) -> bool:
        """Nobody holds it any more."""
        return self._num_holders == 0

    def hold(self, share: Share) -> None:
        """One more holds it."""
        assert not self.over
        self._num_holders += 1
        self._shares.add(share)

    def drop(self, share: Share) -> None:
        """That one lets go."""
        self._shares.remove(share)
        self.let_go()

    def abandon(self) -> None:
        """The pool ends: shares are over, and what is held is of no use any more."""
        for share in list(self._shares):
            share.close()

    def let_go(self) -> None:
        """One holder less."""
        assert not self.over
        self._num_holders -= 1
        if self.over:
            self._on_end(self)


class Share:
    """Keeps a sandbox after its acquirer has left. Made by `SandboxPool.share`.

    `async with share as sandbox`: leaving lets go. Without a context, `close` does, or the end of its time.
    """

    def __init__(self, lease: Lease, for_s: float) -> None:
        _check(for_s)
        lease.hold(self)
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(for_s, self.close)
        self.closed = False

    @property
    def sandbox(self) -> Sandbox:
        """What is held.

        Raises:
            SandboxDiedError: this share is over.
        """
        if self.closed:
            raise SandboxDiedError("this share of the sandbox is over")
        return self._lease.sandbox

    def extend(self, for_s: float) -> None:
        """Holds it for that long from now on, instead of until then.

        Raises:
            ConfigError: no time that can be waited for.
            SandboxDiedError: this share is over.
        """
        _check(for_s)
        if self.closed:
            raise SandboxDiedError("this share of the sandbox is over")
        self._timer.cancel()
        self._timer = self._loop.call_later(for_s, self.close)

    def close(self) -> None:
        """Lets go; idempotent."""
        if not self.closed:
            self.closed = True
            self._timer.cancel()
            self._lease.drop(self)

    async def __aenter__(self) -> Sandbox:
        return self.sandbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check(for_s: float) -> None:
    if not (math.isfinite(for_s) and 0 < for_s <= 86_400):
        raise ConfigError("for_s", for_s, "must lie in (0, 86400] seconds")
