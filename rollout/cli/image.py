"""`rollout image`: builds the Python toolchain image, and lists what there is.

Owns: nothing beyond its flags. Invariant: a build that exists already costs a fraction of a second.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rollout.cli.output import print_json


def add_parser(subparsers: Any) -> None:
    """Declare `image build` and `image list`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "image", help="build and list root file systems of sandboxes"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="build an image (python: an interpreter with numpy and pytest)")
    build.add_argument("name", choices=["python"], help="which image")
    build.add_argument(
        "--prefix",
        type=Path,
        metavar="DIR",
        help="installation to copy, such as /usr (default: the one that runs this)",
    )
    listing = actions.add_parser("list", help="name the images that can be used")
    for action in (build, listing):
        action.add_argument("--state-dir", type=Path, metavar="DIR", help="where images live")
        action.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """Build or list; progress goes to stderr."""
    from sandbox.estate.state import default_state_dir

    state_dir = Path(arguments.state_dir or default_state_dir()).absolute()
    return _build(state_dir, arguments) if arguments.action == "build" else _list(state_dir, arguments)


def _build(state_dir: Path, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sandbox.images.python import build_python_image

    started = time.monotonic()
    phases: list[str] = []
    console = Console(stderr=True)
    with console.status("image python") as status:

        def progress(line: str) -> None:
            phases.append(line)
            status.update(f"image python: {line}")

        path = build_python_image(state_dir, arguments.prefix, progress)
    wall_s = time.monotonic() - started
    if arguments.json:
        print_json({"image": "python", "path": str(path), "built": bool(phases), "wall_s": round(wall_s, 3)})
    else:
        what = f"built in {wall_s:.1f} s" if phases else "up to date"
        print(f"python: {what} ({path})")
    return 0


def _list(state_dir: Path, arguments: argparse.Namespace) -> int:
    from sandbox.errors import ConfigError
    from sandbox.images.resolve import IMAGES, resolve_image

    rows = []
    for name in sorted(IMAGES):
        try:
            image = resolve_image(name, state_dir)
            rows.append({"image": name, "ready": True, "path": image.path, "remedy": ""})
        except ConfigError as error:
            rows.append({"image": name, "ready": False, "path": "", "remedy": error.remedy})
    if arguments.json:
        print_json({"state_dir": str(state_dir), "images": rows})
        return 0
    for row in rows:
        print(f"{row['image']:8} {'ready' if row['ready'] else 'missing: ' + str(row['remedy'])}")
    print("an absolute path of a directory is an image too")
    return 0
