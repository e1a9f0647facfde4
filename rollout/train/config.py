"""The settings of a training run: each part's own struct, composed.

Invariant: everything that a run depends on is in here; the run directory keeps a copy, and
`--resume` reads that copy and nothing else.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from rollout.config.bounds import MAX_COUNT, MAX_THREADS
from rollout.config.learner import LearnerConfig, ModelConfig
from rollout.config.load import load_toml
from rollout.engine.config import EngineConfig
from rollout.errors import ConfigError
from rollout.train.source import DEMO, NUM_DEMONSTRATIONS, TasksConfig
from rollout.verify.config import VerifierConfig
from sandbox.host import SandboxConfig
from sandbox.pool.config import PoolConfig

CONFIG_FILE = "config.json"
MAX_BATCH = 65_536


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy server that a run starts for itself."""

    max_batch: int = 256
    """Sequences that are decoded together."""
    threads: int = 1
    """Threads of the server's arithmetic."""
    ready_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for field, high in (("max_batch", MAX_BATCH), ("threads", MAX_THREADS)):
            if not 1 <= getattr(self, field) <= high:
                raise ConfigError(f"server.{field}", getattr(self, field), f"must lie between 1 and {high}")
        if not 0 < self.ready_timeout_s <= 3600:
            raise ConfigError("server.ready_timeout_s", self.ready_timeout_s, "must lie in (0, 3600] seconds")


class StopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When RL ends before its last step."""

    reward: float | None = None
    """Mean reward over the last `steps` steps that is good enough; None to run every step."""
    steps: int = 5

    def __post_init__(self) -> None:
        if self.reward is not None and not 0 <= self.reward <= 1:  # also refuses nan
            raise ConfigError("stop.reward", self.reward, "must lie in [0, 1], as rewards do")
        if not 1 <= self.steps <= MAX_COUNT:
            raise ConfigError("stop.steps", self.steps, f"must lie between 1 and {MAX_COUNT}")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. The defaults are a sound start; the `demo` preset shows every part in use."""

    name: str = "run"
    """Names the run directory."""
    tasks: TasksConfig = TasksConfig()
    engine: EngineConfig = EngineConfig(max_context_tokens=ModelConfig().max_len)
    verify: VerifierConfig = VerifierConfig()
    sandbox: SandboxConfig = SandboxConfig()
    pool: PoolConfig = PoolConfig()
    server: ServerConfig = ServerConfig()
    learner: LearnerConfig = LearnerConfig()
    stop: StopConfig = StopConfig()
    step_timeout_s: float = 1800.0
    """Longest wait for one optimizer step, publish included."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError("name", self.name, "must be a plain file name")
        if not 0 < self.step_timeout_s <= 86_400:
            raise ConfigError("step_timeout_s", self.step_timeout_s, "must lie in (0, 86400] seconds")
        context, max_len = self.engine.max_context_tokens, self.learner.model.max_len
        if context > max_len:
            remedy = f"no more than learner.model.max_len = {max_len}: lower this, or raise that"
            raise ConfigError("engine.max_context_tokens", context, remedy)
        sft = self.learner.sft
        if self.tasks.train == DEMO and sft.steps and sft.batch_size > NUM_DEMONSTRATIONS:
            remedy = f"the demo family has {NUM_DEMONSTRATIONS} demonstrations: no more than that"
            raise ConfigError("learner.sft.batch_size", sft.batch_size, remedy)


def presets() -> list[str]:
    """Names of the bundled configurations."""
    folder = resources.files("rollout.train").joinpath("presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_config(name: str) -> TrainConfig:
    """Loads a bundled configuration by name, or a TOML file by path.

    Raises:
        ConfigError: neither exists, or a field is unknown or out of range.
    """
    if name in presets():
        with resources.as_file(resources.files("rollout.train").joinpath("presets", f"{name}.toml")) as path:
            return load_toml(path, TrainConfig)
    if not name.endswith(".toml") and not Path(name).exists():
        raise ConfigError("config", name, f"is neither a file nor a bundled configuration ({', '.join(presets())})")
    return load_toml(Path(name), TrainConfig)


def save_config(config: TrainConfig, run_dir: Path) -> None:
    """Writes the run's own copy, durably enough: it is written before anything else happens."""
    (run_dir / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def saved_config(run_dir: Path) -> TrainConfig:
    """The copy that `save_config` wrote.

    Raises:
        ConfigError: the directory holds no run, or one of an incompatible version.
    """
    path = run_dir / CONFIG_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainConfig)
    except FileNotFoundError:
        raise ConfigError("--resume", str(run_dir), f"holds no run (no {CONFIG_FILE})") from None
    except msgspec.DecodeError as error:
        raise ConfigError("--resume", str(run_dir), f"its {CONFIG_FILE} cannot be used: {error}") from error
