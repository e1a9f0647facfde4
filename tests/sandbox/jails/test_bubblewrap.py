"""The bubblewrap jail's argument list: a pure function that never gives anything of the host for writing."""

from __future__ import annotations

from sandbox.images.types import Image, Mount
from sandbox.jails.bubblewrap import argv
from sandbox.jails.plan import JailPlan

PLAN = JailPlan(tool="/state/bin/bwrap", agent="/state/bin/agent", masked=("kallsyms",))
IMAGE = Image("test", (Mount("/usr", "/usr"), Mount("usr/bin", "/bin", "symlink")), "/usr/bin")


def test_equal_arguments_give_equal_lists_and_change_nothing() -> None:
    before = (repr(PLAN), repr(IMAGE))
    assert argv(PLAN, IMAGE) == argv(PLAN, IMAGE)
    assert (repr(PLAN), repr(IMAGE)) == before


def test_every_namespace_is_new_and_every_capability_dropped() -> None:
    words = argv(PLAN, IMAGE)
    for name in ("user", "pid", "net", "ipc", "uts", "cgroup"):
        assert f"--unshare-{name}" in words
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert "--as-pid-1" in words
    assert "--share-net" not in words


def test_nothing_of_the_host_is_bound_for_writing() -> None:
    words = argv(PLAN, IMAGE)
    assert "--bind" not in words
    assert {words[i + 1] for i, word in enumerate(words) if word == "--dev-bind"} == {
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/random",
        "/dev/urandom",
    }
    assert "--dev" not in words
    assert words[words.index("--remount-ro") + 1] == "/"


def test_the_image_is_mounted_as_it_says() -> None:
    joined = " ".join(argv(PLAN, IMAGE))
    assert "--ro-bind /usr /usr" in joined
    assert "--symlink usr/bin /bin" in joined
    assert joined.endswith("-- /.rollout/agent agent 3")
