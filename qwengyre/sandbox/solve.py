"""Try tasks out without a model: what an untouched workspace scores, and what the task's own solution does.

Both run as a harness would, in the same sandbox with the same limits, and are scored as a harness is.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.records import Outcome, Validity
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.task import Task

SOLUTION: Final = "solve.sh"
"""In the folder solution/ of a task, as Harbor has it; run with bash in the workspace."""


class Solved(msgspec.Struct, frozen=True):
    """What came of one task. `problem` is empty when it can be learned from."""

    task: str
    untouched: float | None
    solved: float | None
    """None without a solution."""
    problem: str = ""


def solve(task: Task, config: HarnessConfig) -> Solved:
    """Score the workspace of `task` untouched and solved. `config` says how; its command is not run. Raises SandboxError."""
    untouched = _run(task, msgspec.structs.replace(config, command=("true",)))
    script = Path(task.folder) / "solution" / SOLUTION
    solved = None
    if script.is_file():
        readable = (*config.readable, str(script.parent))
        solved = _run(task, msgspec.structs.replace(config, command=("bash", str(script)), readable=readable))
    score = solved.score if solved is not None and solved.validity is Validity.VALID else None
    return Solved(task.name, untouched.score, score, _problem(task, untouched, solved))


def _problem(task: Task, untouched: Outcome, solved: Outcome | None) -> str:
    top = task.reward_range[1]
    for what, outcome in (("an untouched workspace", untouched), ("its solution", solved)):
        if outcome is not None and outcome.validity is not Validity.VALID:
            return f"{what} cannot be scored: {outcome.detail or outcome.end.value}"
    if untouched.score >= top:
        return f"an untouched workspace scores {untouched.score:g}, the most there is: nothing can be learned from it"
    if solved is not None and solved.score < top:
        return f"its solution scores {solved.score:g}, not {top:g}: {solved.detail or 'tests/test.sh does not accept it'}"
    if solved is not None and solved.score <= untouched.score:
        return f"its solution scores {solved.score:g}, no more than an untouched workspace"
    return ""


def _run(task: Task, config: HarnessConfig) -> Outcome:
    async def called() -> int:
        return 1  # no model is called here: the workspace is to be scored all the same

    async def run(folder: Path) -> Outcome:
        (folder / "gateway").mkdir()
        gateway = GatewayAddress(str(folder / "gateway" / "harness.sock"), "http://127.0.0.1:9")
        async with Launcher(config, [gateway], work=folder / "work", failed=folder / "failed") as launcher:
            return await launcher.run_execution(ExecutionSpec(f"solve-{task.name}", task, "none"), called)

    with tempfile.TemporaryDirectory(prefix="qwengyre-solve-") as folder:
        return asyncio.run(run(Path(folder)))
