"""Programs that try to earn a reward, or to hurt their judges, without solving the task. All in real sandboxes."""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
import msgspec
import pytest

from rollout.tasks.types import Case, CaseTests, CodeTests, Task, TaskLimits
from rollout.types import Invalid, Reward, Verdict

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
SECRET = 730_512_948_611_740_263_557_190_284_417
LIMITS = TaskLimits(verify_timeout_s=1.0, memory_bytes=48 * MIB)
CASES = Task(
    id="hostile/cases",
    prompt="",
    entry_points=("f",),
    hidden_tests=CaseTests(cases=(Case(args="[1]", expected=str(SECRET)), Case(args="[2]", expected="[1, 2]"))),
    limits=LIMITS,
)
CODE = Task(
    id="hostile/code",
    prompt="",
    entry_points=("f",),
    hidden_tests=CodeTests(snippets=(f"assert f(1) == {SECRET}", "assert f(2) == [1, 2]")),
    limits=LIMITS,
)

FORGE = """
import os
def forge(*payloads):
    for payload in payloads:
        os.write(3, len(payload).to_bytes(4, "big") + payload)
def text(value):
    return b"s" + len(value).to_bytes(4, "big") + value.encode()
def message(*parts):
    return b"l" + len(parts).to_bytes(4, "big") + b"".join(parts)
NUMBER = lambda n: b"i" + n.to_bytes(8, "big")
HUGE = b"I" + (4000).to_bytes(4, "big") + b"\\1" * 4000
DEEP = b"l\\0\\0\\0\\1" * 60 + HUGE
"""
LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 2
    def __iter__(self): return iter([1, 2])
"""

PROGRAMS = {
    "an object that equals everything": LIAR + "def f(x): return Liar()",
    "an int that equals everything": "class L(int):\n __eq__ = lambda s, o: True\ndef f(x): return L(0)",
    "a list that equals everything": "class L(list):\n __eq__ = lambda s, o: True\ndef f(x): return L()",
    "exit at once with status 0": "import os\nos._exit(0)",
    "exit in the call with status 0": "import os\ndef f(x): os._exit(0)",
    "sys.exit at once": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "printed results": "print('ok'); print('{\"passed\": true}')\ndef f(x): print('PASSED')",
    "output without end": "import os\ndef f(x):\n while True: os.write(1, b'x' * 65536)",
    "a raised AssertionError": "def f(x): raise AssertionError",
    "a raised BaseException": "def f(x): raise KeyboardInterrupt",
    "an endless loop": "def f(x):\n while True: pass",
    "an endless recursion": "def f(x): return f(x)",
    "a crash of the interpreter": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "a result that contains itself": "def f(x):\n r = []\n r.append(r)\n return r",
    "a result nested a million deep": "def f(x):\n r = []\n for _ in range(100000): r = [r]\n return r",
    "a huge result": "def f(x): return [0] * 4_000_000",
    "a huge int": "def f(x): return 1 << 300_000_000",
    "endless generated results": "def f(x):\n while True: yield x",
    "a closed channel": "import os, time\nos.close(3)\ntime.sleep(60)",
    "a closed channel in the call": "import os, time\ndef f(x):\n os.close(3)\n time.sleep(60)",
    "every descriptor closed": "import os\nos.closerange(0, 64)",
    "a forged start": FORGE + "forge(message(text('loaded')))\ndef f(x): return 0",
    "forged results ahead of every call": FORGE
    + "forge(message(text('loaded')), *(message(text('result'), NUMBER(i), b'N', b'N') for i in range(3)))",
    "two answers to one call": FORGE
    + "def f(x):\n forge(*(message(text('result'), NUMBER(i), b'N', b'N') for i in range(3)))\n return 0",
    "the judge's own words": FORGE
    + "forge(*(message(text('test'), NUMBER(i), b'T', text('')) for i in range(2)), message(text('done'), text('')))",
    "a frame of four gigabytes": "import os\nos.write(3, b'\\xff' * 64)",
    "a frame that is never completed": "import os, time\nos.write(3, b'\\0\\0\\1\\0half')\ntime.sleep(60)",
    "a flood of frames": FORGE + "while True: forge(message(text('loaded')))",
    "bytes at random": "import os\nfor _ in range(100): os.write(3, os.urandom(1000))",
    "a patched codec": "import __main__\n__main__.encode = lambda *a, **k: b'T'\ndef f(x): return 0",
    "patched builtins": "import builtins as b\nb.isinstance = lambda *a: True\nb.len = lambda x: 2\ndef f(x): return 0",
    "an import of the tests": "from tests import *\nimport tests\nf = tests.f",
    "a number too long to print where a failure's type belongs": FORGE
    + "forge(message(text('failed'), HUGE, text('x')))",
    "a number too long to print where a failure's text belongs": FORGE
    + "forge(message(text('failed'), text('x'), HUGE))",
    "a number too long to print where a kind belongs": FORGE + "forge(message(HUGE, HUGE, HUGE))",
    "an error's type that is no text": FORGE
    + "def f(x): forge(*(message(text('error'), NUMBER(i), HUGE, text('x')) for i in range(2)))",
    "an error's type that is no text, in the first answer to a judge": FORGE
    + "def f(x): forge(message(text('error'), NUMBER(1), HUGE, text('x')))",
    "an error's text that is no text": FORGE
    + "def f(x): forge(message(text('error'), NUMBER(1 if x == 2 else 0), text('ValueError'), DEEP))",
    "an answer's number that is no number": FORGE + "def f(x): forge(message(text('result'), DEEP, b'N', b'N'))",
    "an answer with too few fields": FORGE + "def f(x): forge(message(text('error'), NUMBER(0)))",
    "an empty answer": FORGE + "def f(x): forge(message())",
    "a result nested and too long to print": FORGE
    + "def f(x): forge(message(text('result'), NUMBER(0), DEEP, DEEP), message(text('result'), NUMBER(1), DEEP, DEEP))",
    "a printable type's unprintable value": "def f(x): return [{10 ** 5000: range(10 ** 5000)}, {range(10 ** 5000)}]",
    "surrogates in an error": "def f(x): raise ValueError('\\ud800 bad')",
    "surrogates in an error's name": "def f(x): raise type('\\ud800', (Exception,), {})('\\udfff')",
    "surrogates at load": "raise ValueError('\\ud800 bad')",
    "surrogates in a result": "def f(x): return ['\\ud800', {'\\udfff': b'\\xff'}]",
    "surrogates in a forged opaque value": FORGE
    + "S = b's\\0\\0\\0\\3\\xed\\xa0\\x80'\ndef f(x):\n"
    + " forge(*(message(text('result'), NUMBER(i), b'o' + S + S, b'N') for i in (0, 1)))",
    "surrogates in the source": "x = '\ud800'\ndef f(x): return 0",
    "a bomb of processes": "import os\ndef f(x):\n while True:\n  try: os.fork()\n  except OSError: pass",
}


@pytest.mark.parametrize("task", [CASES, CODE], ids=["cases", "code"])
async def test_no_trick_earns_a_reward_or_makes_a_verdict_invalid(open_verifier: Any, task: Task) -> None:
    async with open_verifier() as verifier:

        async def try_one(name: str, program: str) -> None:
            verdict = await verifier.verify(task, program)
            assert verdict.reward == Reward(0.0), (name, verdict)
            assert verdict.layers[0].evidence, name
            assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict, name
            assert msgspec.msgpack.encode(verdict), name

        with anyio.fail_after(100):
            async with anyio.create_task_group() as group:
                for name, program in PROGRAMS.items():
                    group.start_soon(try_one, name, program)
        right = f"def f(x): return {SECRET} if x == 1 else [1, 2]"
        assert (await verifier.verify(task, right)).reward == Reward(1.0)


async def test_a_memory_bomb_ends_in_its_own_sandbox_with_the_reason(open_verifier: Any) -> None:
    async with open_verifier() as verifier:
        for task in (CASES, CODE):
            verdict = await verifier.verify(task, "def f(x):\n    return len(bytearray(1 << 30))\n")
            assert verdict.reward == Reward(0.0)
            # Whether the allocation fails or the kernel strikes depends on what the host can enforce.
            assert any(word in verdict.layers[0].evidence for word in ("oom", "MemoryError")), verdict
            verdict = await verifier.verify(
                task, "def f(x):\n    b = []\n    while True: b.append(bytearray(1 << 20))\n"
            )
            assert verdict.reward == Reward(0.0)


SEARCH = """
import hashlib, re, gc, sys, os
DIGEST = {digest!r}
def candidates():
    for line in open("/proc/self/maps"):
        span, access = line.split()[:2]
        if "r" in access and "[v" not in line:
            start, end = (int(part, 16) for part in span.split("-"))
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(start)
                try:
                    data = memory.read(end - start)
                except (OSError, ValueError):
                    continue
            yield from re.findall(rb"[0-9]{{30}}", data)
            for offset in range(0, len(data) - 16, 4):
                number = int.from_bytes(data[offset:offset + 13], "little")
                if 10**29 < number < 10**30:
                    yield str(number).encode()
    for path in ("/proc/self/environ", "/proc/self/cmdline"):
        yield from re.findall(rb"[0-9]{{30}}", open(path, "rb").read())
    for folder, _, names in os.walk("/workspace"):
        for name in names:
            yield from re.findall(rb"[0-9]{{30}}", open(os.path.join(folder, name), "rb").read())
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            yield from (str(value).encode() for value in list(thing.values()) if type(value) is int)
def f(x):
    if x == 2:
        return [1, 2]
    for text in candidates():
        if hashlib.sha256(text).hexdigest() == DIGEST:
            return int(text)
    return "searched"
"""


@pytest.mark.parametrize("task", [CASES, CODE], ids=["cases", "code"])
async def test_the_expected_value_is_nowhere_in_the_candidate(open_verifier: Any, task: Task) -> None:
    program = SEARCH.format(digest=hashlib.sha256(str(SECRET).encode()).hexdigest())
    limits = TaskLimits(verify_timeout_s=20.0)
    task = Task(id=task.id, prompt="", entry_points=("f",), hidden_tests=task.hidden_tests, limits=limits)
    async with open_verifier() as verifier:
        verdict = await verifier.verify(task, program)
        assert verdict.reward == Reward(0.0)
        assert "searched" in verdict.layers[0].evidence, verdict
        # The search does find what is there: the same program with the secret among its own values.
        assert (await verifier.verify(task, program + f"\nknown = {SECRET}\n")).reward == Reward(1.0)


async def test_submissions_run_without_privileges_files_or_each_other(open_verifier: Any) -> None:
    task = Task(
        id="hostile/look",
        prompt="",
        entry_points=("uid", "files", "leave"),
        hidden_tests=CodeTests(snippets=("assert uid() != 0", "assert files() == []", "assert leave() is None")),
    )
    program = (
        "import os\ndef uid(): return os.getuid()\ndef files(): return os.listdir('/workspace') + os.listdir('/tmp')\n"
        "def leave():\n    open('/workspace/left', 'w').close()\n    open('/tmp/left', 'w').close()\n"
    )
    async with open_verifier() as verifier:
        for _ in range(2):
            assert (await verifier.verify(task, program)).reward == Reward(1.0)


async def test_the_same_submission_gets_the_same_verdict_even_on_the_order_of_a_set(open_verifier: Any) -> None:
    program = "def f(x): return list({'a', 'b', 'c', 'd', 'e'})"
    async with open_verifier() as verifier:
        evidence = {(await verifier.verify(CASES, program)).layers[0].evidence for _ in range(4)}
    assert len(evidence) == 1


async def test_values_that_equal_nothing_are_compared_in_sets_and_as_keys(open_verifier: Any) -> None:
    cases = (Case(args="[1]", expected="{1, 2}"), Case(args="[2]", expected="{1: 2}"))
    task = Task(id="h/sets", prompt="", entry_points=("f",), hidden_tests=CaseTests(cases=cases), limits=LIMITS)
    program = "def f(x): return {range(10 ** 5000), 1} if x == 1 else {range(10 ** 5000): 2}"
    async with open_verifier() as verifier:
        assert (await verifier.verify(task, program)).reward == Reward(0.0)


IN_THE_JUDGE = {
    "a long range made a tuple": ("assert tuple(f(1)) == (1, 2)", "return range(5 * 10 ** 6)"),
    "an endless range": ("assert sum(f(1)) == 3", "return range(10 ** 5000)"),
    "a huge factor": ("assert len([0] * f(1)) == 3", "return 10 ** 9"),
    "a huge range of the test's": ("assert list(range(f(1))) == [0]", "return 10 ** 9"),
    "memory that stays taken": ("x = []\nn = f(1)\nwhile n: x.append(bytearray(1 << 20))", "return 1"),
    "a message that cannot be printed": ("got = f(1)\nassert got == 2, got", "return 10 ** 5000"),
    "a key that cannot be printed": ("assert {}[f(1)]", "return 10 ** 5000"),
    "an argument that cannot be printed": ("assert f(f(1)) == 2", "return 10 ** 5000"),
    "a text that is no source": ("assert eval(f(1)) == 3", "return '1 +'"),
    "an error of an import": ("assert f(1) == 3", "raise ImportError('x')"),
    "surrogates": ("got = f(1)\nassert got == 2, got", "return '\\ud800'"),
    "surrogates in an error that a test shows": ("assert f(1) == 3", "raise KeyError('\\ud800')"),
}


@pytest.mark.parametrize("name", IN_THE_JUDGE)
async def test_what_a_test_makes_of_hostile_data_is_a_failed_verdict(open_verifier: Any, name: str) -> None:
    snippet, body = IN_THE_JUDGE[name]
    task = Task(id="h/j", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=(snippet, "f(2)")))
    async with open_verifier() as verifier:
        with anyio.fail_after(40):
            verdict = await verifier.verify(task, f"def f(x): {body}")
        assert verdict.reward == Reward(0.0), verdict
        assert verdict.layers[0].evidence
        assert msgspec.json.encode(verdict)
        assert verifier.num_faults == 0


async def test_a_job_that_hostile_data_ends_fails_in_the_last_try_and_leaves_the_judge_alive(
    open_verifier: Any,
) -> None:
    tests = CodeTests(snippets=("import ctypes\nctypes.string_at(f(1))", "assert f(2) == 1"))
    task = Task(id="h/crash", prompt="", entry_points=("f",), hidden_tests=tests)
    async with open_verifier(retries=1) as verifier:
        verdict = await verifier.verify(task, "def f(x): return 1")
        assert verdict.reward == Reward(0.0)
        assert "the judge ended while it tested" in verdict.layers[0].evidence
        assert verifier.num_faults == 1


async def test_a_test_that_cannot_run_stays_a_fault_even_after_a_call(open_verifier: Any) -> None:
    snippet = "assert f(1) == 1\nimport no_such_module"
    task = Task(id="h/i", prompt="", entry_points=("f",), hidden_tests=CodeTests(snippets=(snippet,)))
    async with open_verifier() as verifier:
        assert isinstance((await verifier.verify(task, "def f(x): return 1")).reward, Invalid)
