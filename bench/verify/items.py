"""What `bench verify` judges: submissions whose verdicts are known, and the unsandboxed program that says the same.

Invariant: every item has the reward that its submission must earn, right and wrong ones in turn; the bare program exits
with 0 exactly for the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout.tasks.demo import DemoFamily
from rollout.tasks.program import program_of
from rollout.tasks.types import CaseTests, CodeTests, Task, TaskLimits

_MIB = 1 << 20

_FUNCTIONS = (
    ("above", "xs, n", "return [x for x in xs if x > n]", "return [x for x in xs if x >= n]", "[3, 1, 2], 1", "[3, 2]"),
    ("total", "xs", "return sum(xs)", "return len(xs)", "[4, 5, 6]", "15"),
    ("longest", "words", "return max(words, key=len)", "return max(words)", "['z', 'abc', 'no']", "'abc'"),
    ("turned", "text", "return text[::-1]", "return text", "'abc'", "'cba'"),
    ("evens", "xs", "return [x for x in xs if x % 2 == 0]", "return xs[::2]", "[1, 2, 4]", "[2, 4]"),
    ("pairs", "xs", "return list(zip(xs, xs[1:]))", "return list(zip(xs, xs))", "[1, 2, 3]", "[(1, 2), (2, 3)]"),
    ("counted", "text", "return {c: text.count(c) for c in text}", "return {}", "'aba'", "{'a': 2, 'b': 1}"),
    ("clipped", "x, a, b", "return min(max(x, a), b)", "return min(x, b)", "-5, 0, 9", "0"),
)
"""Name, parameters, right body, wrong body, arguments that tell them apart, and their result."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One submission."""

    task: Task
    submission: str
    reward: float
    """What it must earn."""
    bare: str
    """The same judgement as one program for an unsandboxed interpreter."""


def demo_items(num_tasks: int) -> list[Item]:
    """Tasks of the built-in demo family: nine inputs each, compared as plain data."""
    items = []
    for task in DemoFamily().tasks("train", num_tasks):
        assert task.oracle is not None
        items += [_demo_item(task, task.oracle, 1.0), _demo_item(task, task.known_wrong[-1], 0.0)]
    return items


def code_items() -> list[Item]:
    """Tasks as HumanEval's: a function, and a `check(candidate)` of seven assertions."""
    items = []
    for name, parameters, right, wrong, arguments, expected in _FUNCTIONS:
        assertion = f"    assert candidate({arguments}) == {expected}\n"
        check = "def check(candidate):\n" + 7 * assertion
        task = Task(
            id=f"bench/{name}",
            prompt=name,
            entry_points=(name,),
            hidden_tests=CodeTests(setup=check, snippets=(f"check({name})",)),
            limits=TaskLimits(memory_bytes=128 * _MIB),
        )
        for body, reward in ((right, 1.0), (wrong, 0.0)):
            submission = f"def {name}({parameters}):\n    {body}\n"
            bare = f"{submission}\n{check}\ncheck({name})\n"
            items.append(Item(task=task, submission=submission, reward=reward, bare=bare))
    return items


def _demo_item(task: Task, submission: str, reward: float) -> Item:
    lines = [program_of(task, submission)]
    for tests in (task.visible_tests, task.hidden_tests):
        assert isinstance(tests, CaseTests)
        lines += [f"assert {task.entry_points[0]}(*{case.args}) == {case.expected}" for case in tests.cases]
    return Item(task=task, submission=submission, reward=reward, bare="\n".join(lines))


class Turns:
    """Hands out items in turn, to any number of workers of one loop."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._next = 0

    def take(self) -> Item:
        """The next item, the first again after the last."""
        item = self._items[self._next]
        self._next = (self._next + 1) % len(self._items)
        return item
