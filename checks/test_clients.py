"""Client libraries of others, unchanged: a tool loop each, whole and streamed, in every dialect that they speak.

`make test-clients` installs them, each in an environment of its own below .clients/. The policy is scripted: an answer with thoughts,
text and a call; one with two calls; a last one. Every turn must go on from the tokens before it (`extends`), and a full context must be
an error that the client knows, at the first request.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import shutil
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.serve import GatewayServer
from qwengyre.gateway.session import Session
from qwengyre.testing.engines import ScriptedEngine, replies
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.records import Opened

INSTALLED = Path(__file__).parents[1] / ".clients"
PROGRAMS = Path(__file__).parent / "clients"
MAX_TOKENS = 100_000
TINY = 1500
"""Tokens that a context may have where it is to be full: more than a tool loop's first request, less than `LONG`."""
LONG = "word " * 20_000
LAST = "All three are there: h\u00e9llo \U0001f600."


def call(path: str) -> str:
    """As a policy might write it: with spaces and an escape that a client's JSON would not have."""
    return f'<tool_call>\n{{"name":  "look", "arguments": {{ "path" :"{path}"}}}}\n</tool_call>'


ESCAPED = "a \\u00e9.txt"
SCRIPT = (
    f"<think>\nI look first.\n</think>\n\nLet me look.\n{call(ESCAPED)}<|im_end|>",
    f"<think>\nTwo more.\n</think>\n\n{call('b.txt')}\n{call('c/d.txt')}<|im_end|>",
    f"<think>\nDone.\n</think>\n\n{LAST}<|im_end|>",
)
FINAL_ANSWER = f'<think>\nDone.\n</think>\n\n<tool_call>\n{{"name": "final_answer", "arguments": {json.dumps({"answer": LAST})}}}\n</tool_call><|im_end|>'
TASK = "Look at three files."
RESULTS = ("contents of a \u00e9.txt", "contents of b.txt", "contents of c/d.txt")


class Client(msgspec.Struct, frozen=True):
    name: str
    environment: str
    """Its folder below .clients/."""
    dialects: tuple[str, ...]
    knows: str
    """What it calls a full context: a class of the error that it raises, or the code that the error has."""
    causes: tuple[str, str] = ("extends", "extends")
    """How its requests go on."""
    last: str = SCRIPT[-1]
    """The answer that ends its loop."""

    @property
    def answers(self) -> list[list[int]]:
        return [byte_tokenizer().encode(answer).ids for answer in (*SCRIPT[:-1], self.last)]


OPENAI = ("chat", "responses")
ALL = (*OPENAI, "messages")
CLIENTS = {
    "openai-chat": Client("openai-chat", "python", ("chat",), "context_length_exceeded"),
    "openai-responses": Client("openai-responses", "python", ("responses",), "context_length_exceeded"),
    "anthropic": Client("anthropic", "python", ("messages",), "BadRequestError"),
    "litellm": Client("litellm", "python", ALL, "ContextWindowExceededError"),
    "litellm-old": Client("litellm", "old", ALL, "ContextWindowExceededError"),
    "openai-agents": Client("openai-agents", "python", OPENAI, "context_length_exceeded"),
    "pydantic-ai": Client("pydantic-ai", "python", (*ALL, "gemini"), "ModelContextWindowExceededError"),
    "langchain": Client("langchain", "python", ALL, "ContextOverflowError"),
    # tells the policy's calls to the policy as text of its own ("Calling tools: ..."): what comes back is not what was said
    "smolagents": Client(
        "smolagents", "python", ("chat", "messages"), "AgentGenerationError", causes=("diverges", "diverges"), last=FINAL_ANSWER
    ),
    "vercel": Client("vercel", "node", (*ALL, "gemini"), "AI_APICallError"),
    "google-genai": Client("google-genai", "google", ("gemini",), "ClientError"),
}
CASES = [(name, dialect) for name, client in CLIENTS.items() for dialect in client.dialects]


class Loop(msgspec.Struct):
    """One tool loop of a client, and what the gateway recorded of it."""

    said: dict
    session: Session
    num_refused: int
    num_failed: int


class Program:
    """A client's process, which runs one loop after the other against a gateway in this process."""

    def __init__(self, client: Client, folder: Path):
        self.client, self.folder = client, folder
        self.config = GatewayProcessConfig(
            model=str(write_byte_tokenizer(folder / "model")),
            journal=str(folder / "gateway.log"),
            secret_file=str(folder / "secret"),
            control_socket=str(folder / "c.sock"),
            port=0,
            gateway=GatewayConfig(renderer={"name": "qwen3", "thinking_retention": "all"}, max_context_tokens=MAX_TOKENS),
        )

    async def run(self) -> dict[tuple[str, str, bool], Loop]:
        """Loops by dialect, mode and whether the context was full."""
        async with GatewayServer(self.config) as server:
            with open(self.folder / "errors", "wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *self._command(), cwd=self.folder, env=self._environment(), stdin=PIPE, stdout=PIPE, stderr=errors
                )
            loops = {}
            for number, job in enumerate(itertools.product(self.client.dialects, ("whole", "stream"), (False, True))):
                loops[job] = await self._loop(server, process, number, *job)
            process.stdin.close()
            await process.wait()
        return loops

    async def _loop(
        self, server: GatewayServer, process: asyncio.subprocess.Process, number: int, dialect: str, mode: str, is_full: bool
    ) -> Loop:
        gateway, stats = server.gateway, server.gateway.stats
        name = f"e{number:06}-0"
        opened = Opened(-1, name, 0, 1, 1.0, True, TINY if is_full else MAX_TOKENS, 4096, "policy")
        execution = await gateway.open(opened)
        await gateway.set_server(name, ScriptedEngine(replies(self.client.answers), max_context_tokens=MAX_TOKENS))
        execution.route.set(name)
        before = stats.client_errors, stats.server_errors
        base = f"http://127.0.0.1:{server.listening.port}{execution.keys.path}"
        job = {"dialect": dialect, "mode": mode, "base": base, "key": execution.keys.key, "prompt": LONG if is_full else TASK}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        line = await process.stdout.readline()
        assert line, (self.folder / "errors").read_text(errors="replace")[-3000:]
        session = execution.session
        await gateway.close(name)
        return Loop(json.loads(line), session, stats.client_errors - before[0], stats.server_errors - before[1])

    def _environment(self) -> dict[str, str]:
        home = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8"}
        return {**home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def _command(self) -> tuple[str, ...]:
        installed = INSTALLED / self.client.environment
        if self.client.environment == "node":  # modules are looked for beside the program
            return "node", shutil.copy(PROGRAMS / "tool_loops.mjs", installed)
        return str(installed / "bin" / "python"), str(PROGRAMS / "tool_loops.py"), self.client.name


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[tuple[str, str, bool], Loop]]:
    """What became of all loops of a client; one process runs them, for starting one takes longer than they do."""

    @functools.cache
    def run(name: str) -> dict[tuple[str, str, bool], Loop]:
        return asyncio.run(Program(CLIENTS[name], tmp_path_factory.mktemp(name)).run())

    return run


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_every_turn_of_a_tool_loop_goes_on_from_the_last(name, dialect, mode, loops):
    loop = loops(name)[dialect, mode, False]
    calls = loop.session.calls
    assert loop.said == {"text": LAST}
    assert (loop.num_refused, loop.num_failed) == (0, 0)
    assert [calls.answer_ids(call.number) for call in calls] == CLIENTS[name].answers
    assert [call.started.cause for call in calls] == ["root", *CLIENTS[name].causes]
    last = byte_tokenizer().decode(calls.sequence(2, calls[2].num_prompt).tolist(), skip_special_tokens=False)
    sampled = SCRIPT[:2] if "extends" in CLIENTS[name].causes else ()
    assert all(said in last for said in (*sampled, *RESULTS))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_a_full_context_is_known_at_the_first_request(name, dialect, mode, loops):
    loop = loops(name)[dialect, mode, True]
    assert CLIENTS[name].knows in (*loop.said["classes"], loop.said.get("code")), loop.said
    assert "prompt is too long" in loop.said["message"]
    assert (loop.num_refused, loop.num_failed, len(loop.session.calls)) == (1, 0, 0)
