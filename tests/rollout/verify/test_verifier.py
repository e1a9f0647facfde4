"""The verifier's own logic, on trusted programs without isolation."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from local_host import LocalHost

from rollout.errors import ConfigError, Fault
from rollout.tasks.demo import DemoFamily
from rollout.tasks.types import Case, CaseTests, CodeTests, Task, TaskLimits
from rollout.types import Invalid, Reward, Verdict
from rollout.verify.config import VerifierConfig
from rollout.verify.reuse import NOTE
from rollout.verify.verifier import Verifier

pytestmark = pytest.mark.anyio

LIMITS = TaskLimits(verify_timeout_s=1.0)
DOUBLE = Task(
    id="t/double",
    prompt="",
    entry_points=("double",),
    visible_tests=CaseTests(cases=(Case(args="[1]", expected="2"),)),
    hidden_tests=CaseTests(cases=(Case(args="[3]", expected="6"), Case(args="['a']", expected="'aa'"))),
    limits=LIMITS,
)
CODE = Task(
    id="t/code",
    prompt="",
    entry_points=("double", "half"),
    visible_tests=CodeTests(snippets=("assert double(2) == 4", "assert half(4) == 2"), setup="import math"),
    hidden_tests=CodeTests(snippets=("assert half(double(math.pi)) == math.pi",), setup="import math"),
    limits=LIMITS,
)
RIGHT = "def double(x):\n    return x + x\n\ndef half(x):\n    return x / 2\n"


def value(verdict: Verdict) -> float:
    assert isinstance(verdict.reward, Reward), verdict
    return verdict.reward.value


async def test_a_right_submission_earns_one_and_a_wrong_one_nothing() -> None:
    async with Verifier(LocalHost()) as verifier:
        for task in (DOUBLE, CODE):
            assert value(await verifier.verify(task, RIGHT)) == 1.0
            assert value(await verifier.verify(task, "def double(x):\n    return x * 3\n")) == 0.0
            assert value(await verifier.verify(task, "")) == 0.0
            assert value(await verifier.verify(task, None)) == 0.0


async def test_visible_failures_say_what_was_called_what_came_and_what_was_due() -> None:
    async with Verifier(LocalHost()) as verifier:
        layer = await verifier.run_visible(DOUBLE, "def double(x):\n    return x * 3\n")
        assert layer.evidence == "double(1) returned 3, expected 2"
        layer = await verifier.run_visible(DOUBLE, "def double(x):\n    return x.y\n")
        assert "AttributeError: 'int' object has no attribute 'y' (line 2, in double: return x.y)" in layer.evidence
        layer = await verifier.run_visible(CODE, RIGHT.replace("/ 2", "/ 4"))
        assert (layer.num_passed, layer.num_tests) == (1, 2)
        assert "assert half(4) == 2" in layer.evidence
        assert "half(4) returned 1.0" in layer.evidence
        layer = await verifier.run_visible(CODE, "def f(:\n")
        assert layer.evidence.startswith("SyntaxError: ")
        layer = await verifier.run_visible(CODE, "def double(x):\n    return 2 * x\n")
        assert "NameError: name 'half' is not defined" in layer.evidence


async def test_partial_credit_is_the_fraction_of_the_deciding_layer() -> None:
    async with Verifier(LocalHost(), VerifierConfig(reward_rule="fraction")) as verifier:
        verdict = await verifier.verify(DOUBLE, "def double(x):\n    return 2 * int(x)\n")
        assert value(verdict) == 0.5


async def test_visible_tests_decide_where_there_are_no_hidden_ones() -> None:
    task = Task(id="t/v", prompt="", entry_points=("double",), visible_tests=DOUBLE.visible_tests, limits=LIMITS)
    async with Verifier(LocalHost(), VerifierConfig(layers=("hidden",))) as verifier:
        assert value(await verifier.verify(task, RIGHT)) == 1.0
        with pytest.raises(ConfigError, match="needs hidden or visible tests"):
            await verifier.verify(Task(id="t/n", prompt="", entry_points=("f",)), RIGHT)
        with pytest.raises(ConfigError, match="no tests that a policy may see"):
            await verifier.run_visible(Task(id="t/n", prompt="", hidden_tests=DOUBLE.hidden_tests), RIGHT)


async def test_sets_of_cases_share_a_sandbox_and_sets_of_code_do_not() -> None:
    host = LocalHost()
    async with Verifier(host) as verifier:
        await verifier.verify(DOUBLE, RIGHT)
        assert host.num_acquired == 1
        await verifier.verify(CODE, RIGHT)
        assert host.num_acquired == 4  # two candidates and the judge
        await verifier.verify(CODE, RIGHT)
        assert host.num_acquired == 6  # the judge goes on


async def test_a_program_that_dies_in_the_visible_tests_gets_a_new_sandbox_for_the_hidden_ones() -> None:
    host = LocalHost()
    async with Verifier(host) as verifier:
        verdict = await verifier.verify(
            DOUBLE, "import os\ndef double(x):\n    return 2 * x if x != 1 else os._exit(3)\n"
        )
        assert host.num_acquired == 2
    assert [layer.passed for layer in verdict.layers] == [False, True]
    assert verdict.layers[0].evidence == "exit: the program ended itself with exit code 3"


@pytest.mark.parametrize("task", [DOUBLE, CODE])
async def test_an_endless_loop_is_a_failed_verdict_at_its_limit(task: Task) -> None:
    task = Task(id=task.id, prompt="", entry_points=task.entry_points, hidden_tests=task.hidden_tests, limits=LIMITS)
    async with Verifier(LocalHost(), VerifierConfig(wall_factor=20.0)) as verifier:
        for program in ("while True: pass", "def double(x):\n    while True: pass\n"):
            verdict = await verifier.verify(task, program)
            assert verdict.layers[0].evidence == "timeout: not done within 1 s"


async def test_a_sleeping_program_is_ended_by_the_clock() -> None:
    async with Verifier(LocalHost(), VerifierConfig(wall_factor=1.0)) as verifier:
        verdict = await verifier.verify(CODE, "import time\ndef double(x):\n    time.sleep(60)\n")
        assert [layer.evidence for layer in verdict.layers] == ["timeout: not done within 1 s"] * 2


async def test_a_fault_is_tried_again_and_then_makes_the_verdict_invalid() -> None:
    async with Verifier(LocalHost(failures=2), VerifierConfig(retries=2)) as verifier:
        assert value(await verifier.verify(DOUBLE, RIGHT)) == 1.0
        assert verifier.num_faults == 2
    async with Verifier(LocalHost(failures=2), VerifierConfig(retries=1)) as verifier:
        verdict = await verifier.verify(DOUBLE, RIGHT)
        assert isinstance(verdict.reward, Invalid)
        assert "no jail came up" in verdict.reward.reason
    async with Verifier(LocalHost(failures=1), VerifierConfig(retries=0)) as verifier:
        with pytest.raises(Fault):
            await verifier.run_visible(DOUBLE, RIGHT)


async def test_a_judge_that_does_not_start_or_tests_that_are_broken_are_never_a_reward() -> None:
    broken = Task(id="t/b", prompt="", entry_points=("f",), hidden_tests=CodeTests(setup="1 / 0", snippets=("pass",)))
    async with Verifier(LocalHost(), VerifierConfig(retries=0)) as verifier:
        verdict = await verifier.verify(broken, RIGHT)
        assert isinstance(verdict.reward, Invalid)
        assert "ZeroDivisionError" in verdict.reward.reason
        assert value(await verifier.verify(CODE, RIGHT)) == 1.0


async def test_a_test_that_cannot_run_here_judges_nobody() -> None:
    """A module that the judge lacks is our fault; the same error out of the graded code is the program's."""
    for snippet in ("import no_such_module\nassert f(1) == 2", "assert f(1) = 2"):
        task = Task(id="t/i", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=(snippet,)))
        async with Verifier(LocalHost(), VerifierConfig(retries=0)) as verifier:
            verdict = await verifier.verify(task, RIGHT)
            assert isinstance(verdict.reward, Invalid), verdict
            assert "no_such_module" in verdict.reward.reason or "SyntaxError" in verdict.reward.reason
    task = Task(id="t/c", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=("assert f(1) == 2",)))
    async with Verifier(LocalHost(), VerifierConfig(retries=0)) as verifier:
        lacking = "def f(x):\n    import no_such_module\n"
        assert value(await verifier.verify(task, lacking)) == 0.0


async def test_a_judge_that_is_killed_is_replaced() -> None:
    suicidal = Task(
        id="t/s",
        prompt="",
        entry_points=("f",),
        hidden_tests=CodeTests(snippets=("import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)",)),
    )
    async with Verifier(LocalHost(), VerifierConfig(retries=0)) as verifier:
        assert isinstance((await verifier.verify(suicidal, RIGHT)).reward, Invalid)
    async with Verifier(LocalHost(), VerifierConfig(retries=1)) as verifier:
        await verifier.verify(suicidal, RIGHT)
        assert value(await verifier.verify(CODE, RIGHT)) == 1.0


async def test_a_job_that_is_busy_for_ever_does_not_outlive_its_verdict(tmp_path: Path) -> None:
    """One long computation in C, which no handler of Python's could interrupt."""
    left = tmp_path / "pid"
    snippet = f"import os\nopen({str(left)!r}, 'w').write(str(os.getpid()))\nassert sum(range(f(1))) == 1"
    task = Task(
        id="t/l", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=(snippet,), setup=""), limits=LIMITS
    )
    async with Verifier(LocalHost(), VerifierConfig(wall_factor=1.0)) as verifier:
        assert value(await verifier.verify(task, "def f(x): return 10 ** 15")) == 0.0
        try:
            job = os.pidfd_open(int(left.read_text()))
        except ProcessLookupError:
            return
        with anyio.fail_after(5):
            await anyio.wait_readable(job)
        os.close(job)
        assert value(await verifier.verify(CODE, RIGHT)) == 1.0


async def test_what_a_test_cannot_hold_in_memory_fails_it_alone() -> None:
    tests = CodeTests(snippets=("assert len(bytearray(f(1))) == 1", "assert f(2) == 2"))
    task = Task(id="t/mem", prompt="", entry_points=("f",), hidden_tests=tests, limits=LIMITS)
    config = VerifierConfig(judge_job_memory_bytes=64 << 20, reward_rule="fraction", retries=0)
    async with Verifier(LocalHost(), config) as verifier:
        verdict = await verifier.verify(task, "def f(x): return 128 << 20 if x == 1 else x")
        assert value(verdict) == 0.5
        assert "MemoryError" in verdict.layers[0].evidence
        assert verifier.num_faults == 0


async def test_identical_submissions_share_one_verdict_where_that_is_wanted() -> None:
    host = LocalHost()
    async with Verifier(host, VerifierConfig(reuse_verdicts=True)) as verifier:
        verdicts: list[Verdict] = []

        async def verify(program: str) -> None:
            verdicts.append(await verifier.verify(DOUBLE, program))

        async with anyio.create_task_group() as group:
            for program in [RIGHT] * 4 + [RIGHT + "# other\n"]:
                group.start_soon(verify, program)
    assert host.num_acquired == 2
    assert [value(verdict) for verdict in verdicts] == [1.0] * 5
    assert sum(verdict.layers[0].evidence.startswith(NOTE) for verdict in verdicts) == 3


async def test_a_waiter_takes_over_when_the_first_asker_of_a_shared_verdict_is_cancelled() -> None:
    host = LocalHost()
    async with Verifier(host, VerifierConfig(reuse_verdicts=True)) as verifier:
        verdicts: list[Verdict] = []

        async def wait() -> None:
            verdicts.append(await verifier.verify(DOUBLE, RIGHT))

        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as first:
                group.start_soon(wait)
                first.cancel()
                await verifier.verify(DOUBLE, RIGHT)
    assert value(verdicts[0]) == 1.0


async def test_prefix_and_wrapper_go_around_the_submission() -> None:
    task = Task(
        id="t/w",
        prompt="",
        entry_points=("solve",),
        prefix="import math\n",
        wrapper="def solve(x):\n    {submission}\n    return x\n",
        hidden_tests=CaseTests(cases=(Case(args="[9]", expected="6.0"),)),
    )
    async with Verifier(LocalHost()) as verifier:
        assert value(await verifier.verify(task, "    x = math.sqrt(x)\n    if x:\n        x = x * 2\n")) == 1.0


async def test_generators_are_listed_only_where_the_task_says_so() -> None:
    cases = (Case(args="[3]", expected="[0, 1, 2]"),)
    for materialize, expected in ((True, 1.0), (False, 0.0)):
        tests = CaseTests(cases=cases, materialize=materialize)
        task = Task(id="t/g", prompt="", entry_points=("f",), hidden_tests=tests)
        async with Verifier(LocalHost()) as verifier:
            assert value(await verifier.verify(task, "def f(n):\n    yield from range(n)\n")) == expected


async def test_changed_arguments_come_back_only_where_the_task_says_so() -> None:
    snippet = "x = [3, 1, 2]\nassert f(x) is None\nassert x == [1, 2, 3]"
    for mutates, expected in ((True, 1.0), (False, 0.0)):
        tests = CodeTests(snippets=(snippet,), mutates=mutates)
        task = Task(id="t/m", prompt="", entry_points=("f",), hidden_tests=tests)
        async with Verifier(LocalHost()) as verifier:
            assert value(await verifier.verify(task, "def f(x):\n    x.sort()\n")) == expected


async def test_an_expected_exception_of_the_submission_reaches_the_test() -> None:
    snippet = "try:\n    f(1)\nexcept KeyError as error:\n    assert 'gone' in str(error)\nelse:\n    assert False"
    task = Task(id="t/e", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=(snippet,)))
    async with Verifier(LocalHost()) as verifier:
        assert value(await verifier.verify(task, "def f(x):\n    raise KeyError('gone')\n")) == 1.0
        assert value(await verifier.verify(task, "def f(x):\n    raise IndexError('gone')\n")) == 0.0


async def test_large_arguments_and_results_do_not_deadlock() -> None:
    big = "'" + "x" * 300_000 + "'"
    task = Task(
        id="t/big",
        prompt="",
        entry_points=("f",),
        hidden_tests=CaseTests(cases=tuple(Case(args=f"[{big}]", expected=big) for _ in range(4))),
    )
    async with Verifier(LocalHost()) as verifier:
        assert value(await verifier.verify(task, "def f(x):\n    return x\n")) == 1.0


async def test_cancelling_a_verdict_returns_at_once_and_leaves_the_verifier_usable() -> None:
    async with Verifier(LocalHost(), VerifierConfig(concurrency=1)) as verifier:
        for task in (DOUBLE, CODE):
            with anyio.move_on_after(0.3) as scope:
                await verifier.verify(task, "while True: pass")
            assert scope.cancelled_caught
            assert value(await verifier.verify(task, RIGHT)) == 1.0


async def test_demo_oracles_pass_and_their_planted_bugs_do_not() -> None:
    async with Verifier(LocalHost()) as verifier:
        for task in DemoFamily(3).tasks("heldout", 5):
            assert task.oracle is not None
            assert value(await verifier.verify(task, task.oracle)) == 1.0
            for program in task.known_wrong:
                assert value(await verifier.verify(task, program)) == 0.0
