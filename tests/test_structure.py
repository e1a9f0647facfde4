"""The rules of the tree that tools can hold: import contracts, file sizes, docstrings, entry points."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sandbox", "rollout", "learner", "bench")
MAX_LINES = 400

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_import_contracts_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_file_is_longer_than_the_limit() -> None:
    patterns = ("*.py", "*.c", "*.h")
    folders = (*PACKAGES, "tests", "scripts")
    files = [path for folder in folders for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_owns(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no module docstring"


def test_the_base_install_needs_nothing_heavy() -> None:
    """Importing the engine pulls in neither torch nor a package that an extra brings."""
    heavy = ("torch", "transformers", "vllm", "matplotlib", "tokenizers", "jinja2", "docker", "ray")
    program = (
        "import sys, rollout.cli.main as m; m.build_parser(); "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_no_two_test_files_outside_packages_share_a_name() -> None:
    """Such files are modules at the top level to pytest, and the second one of a name cannot be collected."""
    seen: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if (path.parent / "__init__.py").exists():
            continue
        assert seen.setdefault(path.name, path) == path
