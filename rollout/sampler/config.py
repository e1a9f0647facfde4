"""Settings of the samplers."""

from __future__ import annotations

import math

import msgspec

from rollout.errors import ConfigError


class SamplerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a policy server is reached."""

    server: str = "http://127.0.0.1:8000"
    """`http://HOST:PORT`, or `unix:PATH` for a Unix socket."""
    model: str | None = None
    """Model name to send, for servers that hold several."""
    max_connections: int = 256
    """Requests in flight at once; more wait here, within their own deadline."""
    connect_timeout_s: float = 10.0
    max_retries: int = 2
    """Further tries after a refused or reset connection or a 5xx answer, within the deadline."""
    backoff_s: float = 0.1
    """Before the first retry; doubles with each."""
    assume_version: int | None = None
    """Weight version of tokens from servers that report none; None makes such an answer a fault."""

    def __post_init__(self) -> None:
        if not self.server.startswith(("http://", "https://", "unix:")):
            raise ConfigError("sampler.server", self.server, "write http://HOST:PORT or unix:PATH")
        if self.max_connections < 1:
            raise ConfigError("sampler.max_connections", self.max_connections, "must be at least 1")
        if not 0 <= self.max_retries <= 20:
            raise ConfigError("sampler.max_retries", self.max_retries, "must lie between 0 and 20")
        for field in ("connect_timeout_s", "backoff_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"sampler.{field}", value, "must be a positive number of seconds")
