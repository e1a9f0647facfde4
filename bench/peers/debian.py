"""Peers from Debian: its packages downloaded and unpacked, never installed.

Owns how apt is called: with lists, a status and packages of our own, so that root is not needed and no service is
started. Invariant: nothing outside the given folder changes.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.peers.cache import call, obtain
from bench.records import CannotMeasure

RUNC = ("runc", "libseccomp2")
DOCKER = ("docker.io", "containerd", "runc", "tini", "libdevmapper1.02.1", "libseccomp2")


class Tools:
    """The unpacked packages."""

    def __init__(self, root: Path) -> None:
        machine = platform.machine()
        self.env = {
            "PATH": f"{root}/usr/sbin:{root}/usr/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{root}/usr/lib/{machine}-linux-gnu:{root}/lib/{machine}-linux-gnu",
        }
        self._root = root

    def program(self, name: str) -> Path:
        """A program's path.

        Raises:
            CannotMeasure: the packages do not hold it.
        """
        for folder in ("usr/sbin", "usr/bin"):
            if (path := self._root / folder / name).exists():
                return path
        raise CannotMeasure(f"Debian's packages hold no {name}")


def tools(packages: Sequence[str], *, may_make: bool) -> Tools:
    """Those packages, downloaded if need be; blocks.

    Raises:
        CannotMeasure: they could not be had.
    """
    return Tools(obtain(f"debian+{packages[0]}", partial(_unpack, packages), may_make=may_make) / "root")


def _unpack(packages: Sequence[str], folder: Path) -> None:
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            raise CannotMeasure(f"no {name} on PATH: needs a Debian host")
    apt = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    options = [
        *("-o", f"Dir::State::lists={apt}/lists", "-o", f"Dir::State::status={apt}/status"),
        *("-o", f"Dir::Cache={apt}", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="),
    ]
    call(("apt-get", *options, "-qq", "update"))
    call(("apt-get", *options, "-qq", "download", *packages), cwd=apt / "archives")
    for package in sorted((apt / "archives").glob("*.deb")):
        call(("dpkg-deb", "--extract", package, folder / "root"))
    shutil.rmtree(apt)
