"""Harnesses of others run unchanged: in the real sandbox, through the real gateway, against a scripted model.

`make test-harnesses` installs them, each in an environment of its own below .harnesses/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.preflight import check_harness
from qwengyre.testing.engines import ScriptedEngine, replies
from qwengyre.testing.sandbox_kit import Kit
from qwengyre.trajectory.records import BranchCause, CallFinished, CallRecord, CallStarted
from tests.integration.test_gateway_process import ids, running, serving

INSTALLED = Path(__file__).parents[1] / ".harnesses"
MAX_CONTEXT_TOKENS = 100_000


def tool_call(name: str, **arguments: str) -> str:
    """What a Qwen3 model says to call a tool."""
    return (
        f"<think>\n\n</think>\n\nNow.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"
    )


def interpreter_of(environment: Path) -> str:
    """The folder of the Python that an environment was made with."""
    return str((environment / "bin" / "python").resolve().parents[1])


async def run(kit: Kit, config: HarnessConfig, script: Sequence[str]) -> tuple[Outcome, list[CallRecord]]:
    """One execution whose model says `script`; how it ended, and what the gateway recorded of it."""
    engine = ScriptedEngine(replies([ids(text) for text in script]), max_context_tokens=MAX_CONTEXT_TOKENS)
    work, failed = kit.folder / "work", kit.folder / "failed"
    async with running(kit.folder) as process, serving(engine, kit.folder) as address:
        opened = await process.owner.open(OpenExecution("e000001-0"))
        await process.serve_by(address, "e000001-0")
        events: list[CallRecord] = []

        async def num_calls() -> int:
            events.extend((await process.owner.close_execution("e000001-0")).records)
            return sum(isinstance(event, CallStarted) for event in events)

        base_path = opened.path.removesuffix("/v1")
        spec = ExecutionSpec("e000001-0", kit.task("Make a file named hello."), opened.key, base_path=base_path)
        async with Launcher(
            config, [GatewayAddress(str(process.listening.harness_socket))], work=work, failed=failed
        ) as launcher:
            return await launcher.run_execution(spec, num_calls), events


@pytest.fixture
def mini_swe_agent() -> HarnessConfig:
    environment = (INSTALLED / "mini-swe-agent").resolve()
    return HarnessConfig(
        command=(
            str(environment / "bin" / "mini"), "--yolo", "--exit-immediately", "--cost-limit", "0",
            "--model", "openai/{model}", "--task", "{instruction}", "--output", "/tmp/trajectory.json",
        ),
        readable=(str(environment), interpreter_of(environment)),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        timeout_s=300.0,
    )  # fmt: skip


def test_mini_swe_agent(tmp_path, mini_swe_agent):
    check_harness(mini_swe_agent)
    script = [
        tool_call("bash", command="ls; cat data.txt"),
        "No tool call at all: mini-swe-agent answers with a format error.<|im_end|>",
        tool_call("bash", command="touch hello"),
        tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    outcome, events = asyncio.run(run(Kit(tmp_path), mini_swe_agent, script))
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.75), outcome.detail
    started = [event for event in events if isinstance(event, CallStarted)]
    finished = [event for event in events if isinstance(event, CallFinished)]
    assert [event.num_sampled for event in finished] == [len(ids(text)) for text in script]
    assert [event.reason for event in finished] == ["stop"] * 4
    assert started[0].cause is BranchCause.ROOT and started[1].cause is BranchCause.EXTENDS
    assert started[1].base == started[0].call
