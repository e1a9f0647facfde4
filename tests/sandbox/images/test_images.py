"""Images: what they show, what they never show, and how the Python toolchain is built."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.images.elf import replace_run_path
from sandbox.images.host import build_etc
from sandbox.images.interpreter import find_interpreter
from sandbox.images.python import build_python_image
from sandbox.images.resolve import resolve_image


def test_the_host_image_shows_usr_and_a_generated_etc_only(tmp_path: Path) -> None:
    image = resolve_image("host", tmp_path)
    bound = {mount.target: mount.source for mount in image.mounts if mount.kind != "symlink"}
    assert bound["/usr"] == "/usr"
    assert Path(bound["/etc"]).is_relative_to(tmp_path)
    assert set(bound) <= {"/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}


def test_the_generated_etc_holds_no_account_of_the_host(tmp_path: Path) -> None:
    etc = build_etc(tmp_path)
    names = {path.name for path in etc.iterdir()}
    assert names <= {
        *(
            "passwd",
            "group",
            "hosts",
            "hostname",
            "nsswitch.conf",
            "ld.so.cache",
            "alternatives",
            "protocols",
            "services",
        )
    }
    accounts = [line.split(":")[0] for line in (etc / "passwd").read_text().splitlines()]
    assert accounts == ["root", "sandbox", "nobody"]
    assert all(line.split(":")[1] == "x" for line in (etc / "passwd").read_text().splitlines())


def test_every_file_of_the_generated_images_is_readable_by_any_uid(state_dir: Path) -> None:
    for path in (state_dir / "images").rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            assert mode & 0o555 == 0o555, path
        elif stat.S_ISREG(mode):
            assert mode & 0o444 == 0o444, path
            assert not mode & 0o022, path


def test_the_toolchain_links_stay_inside_it(state_dir: Path) -> None:
    root = (state_dir / "images" / "python").resolve()
    for path in root.rglob("*"):
        if path.is_symlink():
            assert path.resolve(strict=True).is_relative_to(root), path


def test_the_toolchain_runs_numpy_and_pytest_from_its_own_prefix(state_dir: Path) -> None:
    python = (state_dir / "images" / "python").resolve() / "bin" / "python3"
    code = "import sys, numpy, pytest; print(sys.prefix, numpy.__file__, int(numpy.arange(4).sum()))"
    done = subprocess.run([python, "-I", "-c", code], env={}, capture_output=True, text=True, check=True, timeout=60)
    prefix, numpy_file, total = done.stdout.split()
    assert prefix == str(python.parent.parent)
    assert numpy_file.startswith(prefix)
    assert total == "6"


def test_a_second_build_returns_at_once(state_dir: Path) -> None:
    started = time.monotonic()
    phases: list[str] = []
    target = build_python_image(state_dir, progress=phases.append)
    assert phases == []
    assert time.monotonic() - started < 2.0
    assert (state_dir / "images" / "python").resolve() == target


def test_concurrent_builders_leave_one_image_and_no_litter() -> None:
    path = Path(tempfile.mkdtemp(prefix="rollout-images-"))
    try:
        results: list[Path] = []
        builders = [threading.Thread(target=lambda: results.append(build_python_image(path))) for _ in range(3)]
        for builder in builders:
            builder.start()
        for builder in builders:
            builder.join()
        assert len(set(results)) == 1
        assert len(results) == 3
        names = {entry.name for entry in (path / "images").iterdir() if not entry.name.startswith("host-etc-")}
        assert names == {results[0].name, "python", "python.lock"}
    finally:
        shutil.rmtree(path)


def test_a_killed_build_is_cleaned_up_by_the_next(state_dir: Path) -> None:
    litter = state_dir / "images" / ".building-python-dead"
    litter.mkdir()
    (litter / "half").write_text("written")
    build_python_image(state_dir)
    assert not litter.exists()


def test_an_unbuilt_toolchain_names_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout image build python") as caught:
        resolve_image("python", tmp_path)
    assert caught.value.field == "image"


@pytest.mark.parametrize("name", ["ubuntu:24.04", "", "../etc", "host\0"])
def test_an_unknown_image_is_refused_with_the_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host, python") as caught:
        resolve_image(name, tmp_path)
    assert caught.value.field == "image"
    assert caught.value.value == name


def test_a_directory_image_binds_its_top_level_entries(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "bin").symlink_to("usr/bin")
    (root / "release").write_text("1")
    image = resolve_image(str(root), tmp_path / "state")
    assert [(mount.kind, mount.target) for mount in image.mounts] == [
        ("symlink", "/bin"),
        ("file", "/release"),
        ("ro_bind", "/usr"),
    ]


def test_the_root_of_the_host_and_the_state_directory_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    for name in ("/", str(tmp_path), "/nonexistent", "/etc/hostname"):
        with pytest.raises(ConfigError):
            resolve_image(name, tmp_path / "state")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty"):
        resolve_image(str(tmp_path / "empty"), tmp_path / "state")


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_dir"):
        resolve_image("host", tmp_path / "file")


def test_an_interpreter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source_prefix"):
        find_interpreter(tmp_path)


def test_a_virtual_environment_is_no_source(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    with pytest.raises(ConfigError, match="virtual environment"):
        find_interpreter(tmp_path)


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3.11"), reason="no system Python 3.11")
def test_a_system_interpreter_can_be_relocated_too(tmp_path: Path) -> None:
    root = build_python_image(tmp_path, Path("/usr"))
    code = "import sys, json, numpy; print(sys.prefix)"
    done = subprocess.run(
        [root / "bin" / "python3", "-I", "-c", code], env={}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(root), done.stderr
    # Programs that start without `site` find the packages where every image has them.
    packages = root / "lib" / "python3.11" / "site-packages"
    code = f"import sys; sys.path.append({str(packages)!r}); import numpy"
    done = subprocess.run([root / "bin" / "python3", "-S", "-c", code], env={}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_run_path_edit_leaves_other_bytes_alone() -> None:
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + b"\0" * 20, b"\x7fELF\x02\x01" + b"\xff" * 200):
        edited = bytearray(data)
        assert replace_run_path(edited) is False
        assert bytes(edited) == data
