"""HumanEval rows: a function's head and docstring to complete, and a `check(candidate)` that decides.

The submission is the whole function. What stands before the function in the prompt (imports, helpers) is the
task's prefix, so a submission need not repeat it. The judge runs the prompt as well, so that helpers
which `check` itself uses (`poly` in HumanEval/32) are the author's and not the submission's.
"""

from __future__ import annotations

import ast

from rollout.tasks.rows import Row
from rollout.tasks.types import CodeTests, Task

FAMILY = "humaneval"
_PROMPT = "Complete this Python function. Reply with the whole function in one code block.\n```python\n{}```"


def import_row(row: Row) -> Task:
    """The task of one row."""
    name, prompt = row.get("task_id", str), row.get("prompt", str)
    entry_point, test = row.get("entry_point", str), row.get("test", str)
    head, function = _split(row, prompt, entry_point)
    return Task(
        id=name,
        prompt=_PROMPT.format(prompt),
        entry_points=(entry_point,),
        hidden_tests=CodeTests(setup=f"{prompt}\n    pass\n\n{test}", snippets=(f"check({entry_point})",)),
        prefix=head,
        oracle=function + row.get("canonical_solution", str),
        metadata={"family": FAMILY, "completion_prefix": function},
    )


def _split(row: Row, prompt: str, entry_point: str) -> tuple[str, str]:
    """The prompt before the line that defines the entry point, and from it on."""
    tree = row.python("prompt", f"{prompt}\n    pass\n")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            lines = prompt.splitlines(keepends=True)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            return "".join(lines[:first]), "".join(lines[first:])
    raise row.error("entry_point", entry_point, "is not defined in the prompt")
