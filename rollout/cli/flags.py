"""The flags that `rollout eval` and `rollout run` share.

Invariant: importing this imports nothing heavy; `assembly.py` gives the flags their meaning.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from sandbox import errors as sandbox_errors

EPILOG = """task sets:
  humaneval:PATH   mbppplus:PATH   quixbugs:PATH   .jsonl or .jsonl.gz in their authors' format
  demo:SPLIT[:N[:SEED]]                            the generated demo family, SPLIT train or heldout
  PATH.jsonl                                       rows of this project's own tasks

policies:
  --server URL|unix:PATH     a policy server that speaks vLLM's /inference/v1/generate, with --model-dir for its
                             tokenizer and chat template (the demo family needs none)
  --sampler ROLE[,ROLE...]   no model: each turn submits the task's oracle, a known wrong program (wrong) or one
                             that does nothing (noop); the last role repeats, so wrong,oracle fails once
  --sampler recorded:FILE    answers that were sampled once: rows {task_id, sample, text, token_ids, logprobs, ...}
"""


@contextmanager
def named_by_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Lets an error that names a setting name the flag that the setting came from.

    Args:
        flags: from settings, dotted, to flags.
    """
    try:
        yield
    except (ConfigError, sandbox_errors.ConfigError) as error:
        if error.field not in flags:
            raise
        raise ConfigError(flags[error.field], error.value, error.remedy) from None


def at_least(flag: str, value: Any, low: int) -> None:
    """Checks a flag that may be absent; ConfigError names it."""
    if value is not None and value < low:
        raise ConfigError(flag, value, f"must be at least {low}")


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `open_engine` reads."""
    parser.add_argument("tasks", metavar="TASKS", help="the task set (see below)")
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--server", metavar="ADDRESS", help="policy server: http://HOST:PORT or unix:PATH")
    policy.add_argument("--sampler", metavar="SCRIPT", help="scripted policy: roles or recorded:FILE")
    parser.add_argument("--model-dir", type=Path, metavar="DIR", help="folder with tokenizer.json and chat template")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's own)")
    parser.add_argument("--task-ids", metavar="ID,ID", help="only these tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N tasks")
    parser.add_argument("--skip-unsupported", action="store_true", help="leave out rows that cannot become tasks here")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one action (default: 512)")
    parser.add_argument("--max-context", type=int, metavar="N", help="most tokens of one episode (default: 8192)")
    parser.add_argument("--max-turns", type=int, metavar="N", help="most turns (default: each task's own limit)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seeds every request (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="verdicts at once (default: twice the CPUs)")
    parser.add_argument(
        "--episodes", type=int, metavar="N", help="episodes at once (default: 64 with --server, else 512)"
    )
    parser.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="S", help="seconds for one action (default: 600)"
    )
