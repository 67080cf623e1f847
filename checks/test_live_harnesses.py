"""Harnesses of others, unchanged, through the gateway against a scripted policy. Nobody may notice what happens behind it.

Each makes a file whose bytes matter, works through many turns, delegates to a sub-agent and to two at once, and compacts. Meanwhile an
engine fails in mid-answer, and a call is stopped in mid-stream, held for QWENGYRE_HOLD_S (90 s), and goes on at another server.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from checks.harness_table import HARNESSES, Harness
from checks.scripted_policy import Said, ScriptedPolicy
from qwengyre.core.arrays import TOKEN
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import MoveCalls
from qwengyre.gateway.gateway import Execution
from qwengyre.gateway.moves import move
from qwengyre.gateway.serve import GatewayServer
from qwengyre.gateway.stats import GatewayStats
from qwengyre.sandbox.harness import PATIENCE
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.records import Opened
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

HOLD_S = float(os.environ.get("QWENGYRE_HOLD_S", "90"))
CONTEXT_TOKENS = 1 << 20


class Session:
    """One run of a harness, and what the gateway recorded of it."""

    def __init__(self, harness: Harness, folder: Path):
        self.harness, self.folder = harness, folder
        self.workspace, self.home = folder / "workspace", folder / "home"
        self.answers: dict[bytes, Said] = {}
        self.first = ScriptedPolicy(harness.script, self.answers, pace_s=0.02)
        self.second = ScriptedPolicy(harness.script, self.answers, failures_left=1)
        self.config = GatewayProcessConfig(
            model=str(write_byte_tokenizer(folder / "model")),
            journal=str(folder / "gateway.log"),
            secret_file=str(folder / "secret"),
            control_socket=str(folder / "c.sock"),
            port=0,
            gateway=GatewayConfig(renderer={"name": "qwen3", "thinking_retention": "all"}, max_context_tokens=CONTEXT_TOKENS),
        )

    async def run(self) -> None:
        async with GatewayServer(self.config) as server:
            gateway = server.gateway
            execution = await gateway.open(Opened(-1, "e000001-0", 0, 1, 1.0, True, CONTEXT_TOKENS, 1 << 16, "policy"))
            await gateway.set_server("cell-0", self.first)
            await gateway.set_server("cell-1", self.second)
            execution.route.set("cell-0")
            process = await self._start(f"http://127.0.0.1:{server.listening.port}{execution.keys.path}", execution.keys.key)
            while not any(call.tokens.num_sampled >= 16 and call.server for call in execution.live.values()):
                assert process.returncode is None, self.output()
                await asyncio.sleep(0.005)
            await move(gateway, MoveCalls("cell-0", {"e000001-0": None}))
            await asyncio.sleep(HOLD_S)
            execution.route.set("cell-1")
            self.exit_code = await process.wait()
            await gateway.close("e000001-0")
        self.execution: Execution = execution
        self.stats: GatewayStats = gateway.stats

    async def _start(self, base: str, key: str) -> asyncio.subprocess.Process:
        start = self.harness.start(base, key)
        for folder, files in ((self.home, start.files), (self.workspace, start.workspace_files)):
            folder.mkdir()
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        (self.folder / "stdin").write_text(start.stdin)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **PATIENCE, **start.environment}
        with open(self.folder / "output", "wb") as output, open(self.folder / "stdin", "rb") as stdin:
            return await asyncio.create_subprocess_exec(
                *start.command, cwd=self.workspace, env=environment, stdin=stdin, stdout=output, stderr=output
            )

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_harness_finishes_and_notices_nothing(harness, tmp_path):
    session = Session(harness, tmp_path)
    asyncio.run(session.run())
    calls, stats = session.execution.session.calls, session.stats
    assert session.exit_code == 0, session.output()
    assert (session.workspace / "notes.txt").read_bytes() == harness.notes

    assert (stats.client_errors, stats.server_errors) == (0, 0)
    assert stats.calls_moved >= 1 and session.second.failures_left == 0
    assert max(call.finished.held_s for call in calls) >= HOLD_S

    tree = TrajectoryTree(calls)
    tree.validate()
    roles = {call: role.value for call, role in assign_roles(tree.calls).items()}
    said = {}
    for call in calls:
        prompt = calls.sequence(call.number, call.num_prompt - call.started.first_index).astype(TOKEN).tobytes()
        said[call.id] = session.answers[prompt]
        if not call.is_abandoned:
            assert calls.answer_ids(call.number) == said[call.id].token_ids
    assert roles == {call: answer.role for call, answer in said.items()}
    assert harness.roles <= set(roles.values())
    sampled = sum(span.num_tokens for node in tree.nodes for span in node.spans if span.is_sampled)
    assert sampled == sum(call.num_sampled for call in calls)
