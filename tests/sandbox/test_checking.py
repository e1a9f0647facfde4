"""Values of the wrong type or text that the kernel cannot be given: refused by name when the struct is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sandbox.config import SandboxConfig
from sandbox.errors import ConfigError
from sandbox.types import Command, Limits, SandboxSpec


@pytest.mark.parametrize(
    ("make", "values", "field"),
    [
        (Command, {"argv": "ls"}, "command.argv"),
        (Command, {"argv": ("a", 1)}, "command.argv"),
        (Command, {"argv": ("a\ud800",)}, "command.argv"),
        (Command, {"argv": ("a\0",)}, "command.argv"),
        (Command, {"argv": ()}, "command.argv"),
        (Command, {"argv": ("a",), "cwd": "/x\0"}, "command.cwd"),
        (Command, {"argv": ("a",), "cwd": None}, "command.cwd"),
        (Command, {"argv": ("a",), "env": {"A": "\0"}}, "command.env.A"),
        (Command, {"argv": ("a",), "env": {"A=B": "x"}}, "command.env"),
        (Command, {"argv": ("a",), "env": None}, "command.env"),
        (Command, {"argv": ("a",), "stdin": "text"}, "command.stdin"),
        (Command, {"argv": ("a",), "timeout_s": "5"}, "command.timeout_s"),
        (Command, {"argv": ("a",), "cpu_s": "1"}, "command.cpu_s"),
        (Command, {"argv": ("a",), "output_limit_bytes": 1.5}, "command.output_limit_bytes"),
        (Command, {"argv": ("a",), "kill_output_bytes": "x"}, "command.kill_output_bytes"),
        (Command, {"argv": ("a",), "kill_output_bytes": 0}, "command.kill_output_bytes"),
        (SandboxSpec, {"network": "host"}, "spec.network"),
        (SandboxSpec, {"insist": "memory"}, "spec.insist"),
        (SandboxSpec, {"user": True}, "spec.user"),
        (SandboxSpec, {"user": 1.5}, "spec.user"),
        (SandboxSpec, {"limits": {}}, "spec.limits"),
        (SandboxSpec, {"limits": None}, "spec.limits"),
        (SandboxSpec, {"image": None}, "spec.image"),
        (SandboxSpec, {"image": "/x\ud800"}, "spec.image"),
        (SandboxSpec, {"workspace": 5}, "spec.workspace"),
        (SandboxSpec, {"jail": 5}, "spec.jail"),
        (Limits, {"pids": 5.5}, "limits.pids"),
        (Limits, {"memory_bytes": 1e8}, "limits.memory_bytes"),
        (SandboxConfig, {"cgroup_backend": "x"}, "sandbox.cgroup_backend"),
        (SandboxConfig, {"max_sandboxes": "4"}, "sandbox.max_sandboxes"),
    ],
)
def test_a_wrong_value_is_refused_by_its_fields_name(
    make: Callable[..., object], values: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**values)
    assert refused.value.field == field
    assert "must" in refused.value.remedy


def test_whole_numbers_pass_for_seconds_and_lists_for_tuples() -> None:
    values: dict[str, Any] = {"argv": ["true"], "timeout_s": 5, "cpu_s": 1}
    assert list(Command(**values).argv) == ["true"]
    assert SandboxSpec(limits=Limits(cpus=2)).limits.cpus == 2


def test_bytes_that_are_no_text_pass_as_python_writes_them() -> None:
    assert Command(argv=("printf", "\udcff")).argv[1] == "\udcff"
