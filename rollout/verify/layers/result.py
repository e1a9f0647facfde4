"""Makes a layer's verdict out of its tests' results.

Invariant: a layer passes if and only if it has tests and every one passed; every text is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.types import LayerVerdict, TestResult

MAX_DETAIL = 2000
MAX_SHOWN_TESTS = 200
"""Results kept one by one; counts cover all."""


def layer_verdict(
    name: str, version: int, results: Sequence[TestResult], *, wall_s: float, failure: str = ""
) -> LayerVerdict:
    """The verdict of one layer.

    Args:
        results: one for each test of the layer, in order.
        failure: why the submission as a whole cannot pass (it did not load, died, overran its time).
    """
    num_passed = sum(result.passed for result in results)
    first = next((result.detail for result in results if not result.passed), "")
    return LayerVerdict(
        layer=name,
        passed=bool(results) and num_passed == len(results),
        score=num_passed / len(results) if results else 0.0,
        num_tests=len(results),
        num_passed=num_passed,
        evidence=(failure or first)[:MAX_DETAIL],
        wall_s=wall_s,
        tests=tuple(results[:MAX_SHOWN_TESTS]),
        version=version,
    )


def all_failed(num_tests: int, detail: str) -> list[TestResult]:
    """Every test of a submission that could not be called at all."""
    return [
        TestResult(name=str(i), passed=False, detail=detail[:MAX_DETAIL] if i == 0 else "") for i in range(num_tests)
    ]
