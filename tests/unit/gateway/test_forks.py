"""A sub-agent that takes over the main agent's context, as a harness asks for it over HTTP: its role, its retries, its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import httpx2 as httpx
import pytest

from qwengyre.core.records import Role
from qwengyre.testing.answers import TOOLS
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
REPORT = "Scope: the parser. Result: it drops the last line of every file."
MAIN, SUB = Role.MAIN, Role.SUB_AGENT
DIRECTIVE = {"role": "user", "content": "You are a fork. Look at the parser."}
SYSTEM = {"role": "system", "content": "You are the agent."}
TASK = {"role": "user", "content": "Mend the parser."}


class Harness:
    """Asks in the chat dialect, one execution, and keeps what was answered."""

    def __init__(self, http: httpx.AsyncClient):
        self._http, self.agent = http, "some-harness/1.0"

    async def ask(self, history: list[dict]) -> list[dict]:
        body = {"model": "m", "messages": history, "tools": TOOLS}
        reply = await self._http.post("/chat/completions", json=body, headers={"user-agent": self.agent})
        assert reply.status_code == 200, reply.text
        return [*history, reply.json()["choices"][0]["message"]]


async def roles(bench, session: Callable[[Harness], Awaitable[None]], answers: Sequence[str]) -> list[Role]:
    """Of the calls of a session, in order, whose calls are answered so."""
    async with bench.running():
        live = await bench.open(engine=bench.says(*(f"{answer}<|im_end|>" for answer in answers)))
        async with bench.http(live) as http:
            await session(Harness(http))
        tree = TrajectoryTree(live.session.calls)
        tree.validate()
        return list(assign_roles(tree.calls).values())


def result(history: list[dict], text: str) -> dict:
    return {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": text}


def inside(main: list[dict]) -> list[dict]:
    """After the call that starts it, which has a placeholder for its result."""
    return [*main, result(main, "Fork started"), DIRECTIVE]


def beside(main: list[dict]) -> list[dict]:
    """In place of the last user message."""
    return [SYSTEM, DIRECTIVE]


@pytest.mark.parametrize("take_over", [inside, beside])
@pytest.mark.parametrize("report", ["{}", "The agent says:\n{}\nIt took 3 s."])
async def test_fork_is_a_sub_agent_by_the_text_that_comes_back(bench, take_over, report):
    async def session(harness: Harness) -> None:
        main = await harness.ask([SYSTEM, TASK])
        fork = await harness.ask(take_over(main))
        fork = await harness.ask([*fork, result(fork, "parser.py")])
        assert fork[-1]["content"] == REPORT
        main = await harness.ask([*main, result(main, report.format(REPORT))])
        await harness.ask([*main, result(main, "mended")])

    assert await roles(bench, session, [CALL, CALL, REPORT, CALL, "Done."]) == [MAIN, SUB, SUB, MAIN, MAIN]


async def test_context_of_a_fork_that_was_asked_twice_is_its_both_times(bench):
    async def session(harness: Harness) -> None:
        main = await harness.ask([SYSTEM, TASK])
        for _ in range(2):
            fork = await harness.ask(inside(main))
        await harness.ask([*main, result(main, fork[-1]["content"])])

    assert await roles(bench, session, [CALL, "Scope: no.", REPORT, "Done."]) == [MAIN, SUB, SUB, MAIN]


@pytest.mark.parametrize("rest", [[], [{"role": "assistant", "content": "Understood."}, {"role": "user", "content": "Begin."}]])
async def test_fork_of_qwen_code_that_reports_in_the_background_is_known_by_its_first_message(bench, rest):
    first = {"role": "user", "content": "<fork-boilerplate>\nSTOP.\n</fork-boilerplate>\n\nDirective: look."}

    async def session(harness: Harness) -> None:
        harness.agent = "QwenCode/0.24.4 (linux; x64)"
        main = await harness.ask([SYSTEM, TASK])
        fork = await harness.ask([*main, result(main, "Fork started"), first, *rest])
        main = await harness.ask([*main, result(main, "Fork started")])
        fork = await harness.ask([*fork, result(fork, "parser.py")])
        await harness.ask([*main, {"role": "user", "content": f"<task-notification>{fork[-1]['content']}</task-notification>"}])

    assert await roles(bench, session, [CALL, CALL, "I wait.", REPORT, "Done."]) == [MAIN, SUB, MAIN, SUB, MAIN]


async def test_short_text_that_a_tool_result_has_by_accident_makes_no_fork(bench):
    async def session(harness: Harness) -> None:
        main = await harness.ask([SYSTEM, TASK])
        await harness.ask(inside(main))
        await harness.ask([*main, result(main, "it looks ok to me")])

    assert await roles(bench, session, [CALL, "ok", "Done."]) == [MAIN] * 3
