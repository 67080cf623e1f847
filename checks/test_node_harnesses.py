"""Claude Code, Codex, Qwen Code and opencode, unchanged, through the gateway against a scripted engine.

Each writes a file whose bytes matter, delegates to a sub-agent, and finishes. Meanwhile its calls move: one is stopped in
mid-stream, held for HOLD_S, and goes on at another server. An engine error in mid-answer is thrown in. No client may notice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import EngineUnavailable
from qwengyre.engines.api import GenerateRequest, TokenChunk
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.gateway import Execution
from qwengyre.gateway.moves import move
from qwengyre.gateway.records import Opened
from qwengyre.gateway.serve import GatewayServer
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

INSTALLED = Path(__file__).parents[1] / ".harnesses" / "node" / "node_modules"
HOLD_S = float(os.environ.get("QWENGYRE_HOLD_S", "90"))
TASK = "PROBE-MAIN Create notes.txt, check it, delegate a review to a sub-agent, then finish."
REVIEW = "PROBE-SUB Review notes.txt and report in one line."
WRITE = "printf 'h\u00e9llo  world  \\n' > notes.txt; echo written"
WRITTEN = "h\u00e9llo  world  \n".encode()
TOKENIZER = byte_tokenizer()


def says(name: str, **arguments: object) -> str:
    return f"Next.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


class Harness(msgspec.Struct, frozen=True):
    """How a harness is started, and what its tools are called."""

    name: str
    shell: Callable[[str], str]
    delegate: str
    command: Callable[[Path, Path, str, str], tuple[list[str], dict[str, str]]]
    """(workspace, home, base URL, key) -> command line and environment; writes what files it needs."""

    def script(self) -> dict[str, list[str]]:
        main = [self.shell(WRITE), self.delegate, self.shell("wc -c notes.txt"), "All done.<|im_end|>"]
        return {"main": main, "sub": [self.shell("cat notes.txt"), "Report: looks fine.<|im_end|>"]}


def _claude(workspace: Path, home: Path, base: str, key: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": base.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": key,
        "API_FORCE_IDLE_TIMEOUT": "0",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    return [str(INSTALLED / ".bin/claude"), "-p", TASK, "--model", "policy", "--dangerously-skip-permissions"], environment


def _codex(workspace: Path, home: Path, base: str, key: str) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    provider = f'[model_providers.gateway]\nname = "gateway"\nbase_url = "{base}"\nenv_key = "KEY"\nwire_api = "responses"\n'
    (home / ".codex/config.toml").write_text(f'model = "policy"\nmodel_provider = "gateway"\n{provider}')
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(INSTALLED / ".bin/codex"), "exec", *flags, TASK], {"KEY": key}


def _qwen(workspace: Path, home: Path, base: str, key: str) -> tuple[list[str], dict[str, str]]:
    environment = {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
    cli = INSTALLED / "@qwen-code/qwen-code/cli.js"
    return [str(INSTALLED / ".bin/node"), str(cli), "--yolo", "--auth-type", "openai", "-p", TASK], environment


def _opencode(workspace: Path, home: Path, base: str, key: str) -> tuple[list[str], dict[str, str]]:
    models = {"policy": {"limit": {"context": 200_000, "output": 8000}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": base, "apiKey": key}, "models": models}
    settings = {"provider": {"gateway": provider}, "model": "gateway/policy", "permission": {"bash": "allow", "edit": "allow"}}
    (workspace / "opencode.json").write_text(json.dumps(settings))
    return [str(INSTALLED / "opencode-linux-x64/bin/opencode"), "run", "--model", "gateway/policy", TASK], {}


HARNESSES = [
    Harness(
        "claude-code",
        lambda command: says("Bash", command=command, description="Run it"),
        says("Agent", description="Review", prompt=REVIEW, subagent_type="general-purpose", run_in_background=False),
        _claude,
    ),
    Harness("codex", lambda command: says("exec_command", cmd=command), says("spawn_agent", message=REVIEW), _codex),
    Harness(
        "qwen-code",
        lambda command: says("run_shell_command", command=command, description="Run it", is_background=False),
        says("agent", description="Review", prompt=REVIEW, subagent_type="general-purpose"),
        _qwen,
    ),
    Harness(
        "opencode",
        lambda command: says("bash", command=command, description="Run it"),
        says("task", description="Review", prompt=REVIEW, subagent_type="general"),
        _opencode,
    ),
]


class Engine(ScriptedEngine):
    """Answers by what stands in the prompt; fails once in mid-answer when told to."""

    def __init__(self, script: dict[str, list[str]], *, pace_s: float = 0.0):
        super().__init__(self._answer, max_context_tokens=1 << 20, tokens_per_chunk=4)
        self._script_by_kind, self._pace_s, self.failures_left = script, pace_s, 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().generate(request):
            if self.failures_left and request.sampling.first_index == 0 and chunk.finish_reason is None:
                self.failures_left -= 1
                raise EngineUnavailable("thrown in by the test")
            await asyncio.sleep(self._pace_s)
            yield chunk

    def _answer(self, request: GenerateRequest) -> list[int]:
        ids = list(memoryview(request.token_ids).cast("i"))
        prompt = TOKENIZER.decode(ids[: len(ids) - request.sampling.first_index], skip_special_tokens=False)
        kind = "main" if "PROBE-MAIN" in prompt else "sub"
        if "# Tools" not in prompt or (kind == "sub" and "PROBE-SUB" not in prompt):
            return TOKENIZER.encode("A title<|im_end|>").ids[request.sampling.first_index :]
        steps = self._script_by_kind[kind]
        said = steps[min(prompt.count("<tool_response>"), len(steps) - 1)]
        return TOKENIZER.encode(said).ids[request.sampling.first_index :]


async def session(harness: Harness, folder: Path) -> tuple[Execution, bytes, GatewayServer]:
    """One run of a harness to its end, its calls moved and held on the way."""
    workspace, home = folder / "workspace", folder / "home"
    workspace.mkdir()
    home.mkdir()
    config = GatewayProcessConfig(
        model=str(write_byte_tokenizer(folder / "model")),
        journal=str(folder / "journal"),
        secret_file=str(folder / "secret"),
        control_socket=str(folder / "c.sock"),
        port=0,
        gateway=GatewayConfig(renderer={"name": "qwen3", "thinking_retention": "all"}, max_context_tokens=1 << 20),
    )
    first, second = Engine(harness.script(), pace_s=0.05), Engine(harness.script())
    second.failures_left = 1
    async with GatewayServer(config) as server:
        execution = await server.gateway.open(Opened(-1, "e000001-0", 0, 1, 1.0, True, 1 << 20, 1 << 16, "policy"))
        await server.gateway.set_server("cell-0", first)
        await server.gateway.set_server("cell-1", second)
        execution.route.set("cell-0")
        base = f"http://127.0.0.1:{server.listening.port}{execution.keys.path}"
        command, environment = harness.command(workspace, home, base, execution.keys.key)
        environment |= {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
        with open(folder / "output", "wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=workspace, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        while not any(call.tokens.num_sampled > 8 for call in execution.live.values()):
            assert process.returncode is None, (folder / "output").read_text()
            await asyncio.sleep(0.01)
        await move(server.gateway, "cell-0", {"e000001-0": None})
        await asyncio.sleep(HOLD_S)
        execution.route.set("cell-1")
        assert await process.wait() == 0, (folder / "output").read_text()
        await server.gateway.close("e000001-0")
    return execution, (workspace / "notes.txt").read_bytes(), server


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_harness_finishes_and_notices_nothing(harness, tmp_path):
    execution, notes, server = asyncio.run(session(harness, tmp_path))
    rows, stats = execution.session.rows, server.gateway.stats
    assert notes == WRITTEN
    assert stats.calls_moved >= 1 and stats.client_errors == stats.server_errors == 0
    assert max(call.ended.held_s for call in rows) >= HOLD_S
    tree = TrajectoryTree.build(rows.events())
    tree.validate()
    roles = assign_roles(tree.calls)
    told = {role.value for role in roles.values()}
    assert {"main", "sub-agent"} <= told <= {"main", "sub-agent", "side"}
    known = {tuple(TOKENIZER.encode(text).ids) for steps in harness.script().values() for text in steps}
    for call in rows:
        if roles[call.id].value != "side" and not call.is_abandoned:
            assert tuple(rows.answer_ids(call.asked.call)) in known
