"""`qwengyre gateway` in front of a completions server, without training: the real command, a real client, the real records."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.core.arrays import LOGPROB, TOKEN, unpack
from qwengyre.core.errors import ConfigError
from qwengyre.gateway.rendering import Rendering
from qwengyre.recorded.run import RecordedRun
from qwengyre.testing.completions_server import CompletionsServer
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.records import CallStarted, TokensSampled

pytestmark = pytest.mark.integration
COMMAND = (sys.executable, "-c", "from qwengyre.cli.main import main; main()")
USER = {"role": "user", "content": "hi"}


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


PREFILLED = ids("<think>\n\n</think>\n\n")


@contextlib.asynccontextmanager
async def alone(folder: Path, server: CompletionsServer, *executions: str) -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
    """The command, running: a client by execution."""
    model = write_byte_tokenizer(folder / "model")
    async with started(folder, ["gateway", "--engine", server.url, "--model", str(model)], *executions) as clients:
        yield clients


@contextlib.asynccontextmanager
async def started(folder: Path, arguments: list[str], *executions: str) -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
    arguments += ["--out", str(folder / "records"), "--port", "0", "--renderer", "qwen3"]
    for name in executions:
        arguments += ["--execution", name]
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=asyncio.subprocess.PIPE)
    clients = {}
    for _ in executions:
        line = (await process.stdout.readline()).decode()
        name, base, key = re.fullmatch(
            r"(\S+): OPENAI_BASE_URL=(\S+) ANTHROPIC_BASE_URL=\S+ GOOGLE_GEMINI_BASE_URL=\S+ API_KEY=(\S+)\n", line
        ).groups()
        clients[name] = openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)
    try:
        yield clients
    finally:
        for client in clients.values():  # one that is forgotten closes itself in a later test, whose loop is another
            await client.close()
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_harnesses_are_served_and_recorded_and_it_goes_on_after_a_stop(tmp_path):
    said = "<think>\nso\n</think>\n\nHello<|im_end|>"
    async with CompletionsServer(lambda prompt: ids(said), model="served", max_model_len=500) as server:
        async with alone(tmp_path, server, "one", "two") as clients:
            first = await clients["one"].chat.completions.create(model="m", messages=[USER])
            assert first.choices[0].message.content == "Hello"
            with pytest.raises(openai.BadRequestError, match=r"prompt is too long: \d+ tokens > 500 maximum"):
                await clients["one"].chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 600}])
        async with alone(tmp_path, server, "one") as again:
            assert again["one"].api_key == clients["one"].api_key
            history = [USER, {"role": "assistant", "content": "Hello"}, USER]
            await again["one"].chat.completions.create(model="m", messages=history)
        body = server.bodies[0]
        assert (body["model"], body["return_token_ids"], body["top_k"], body["top_p"]) == ("served", True, -1, 1.0)
        assert body["max_tokens"] == 500 - len(body["prompt"])
    records = {recorded.opened.execution: recorded for recorded in RecordedRun.open(tmp_path / "records").attempts()}
    events = records["one"].records()
    starts = [event for event in events if isinstance(event, CallStarted)]
    sampled = [event for event in events if isinstance(event, TokensSampled)]
    assert [start.base for start in starts] == [-1, starts[0].call]
    assert [unpack(event.token_ids, TOKEN).tolist() for event in sampled] == [ids(said)] * 2
    assert unpack(sampled[0].logprobs, LOGPROB).tolist() == [-0.5 - at / 64 for at in range(len(ids(said)))]


async def test_the_renderer_has_the_settings_that_are_given(tmp_path):
    async with CompletionsServer(lambda prompt: ids("Hello<|im_end|>"), model="served") as server:
        model = write_byte_tokenizer(tmp_path / "model")
        command = [
            "gateway",
            "--engine",
            server.url,
            "--model",
            str(model),
            "--set",
            "gateway.renderer.enable_thinking=false",
        ]
        async with started(tmp_path, command, "main") as clients:
            await clients["main"].chat.completions.create(model="m", messages=[USER])
        assert server.bodies[0]["prompt"][-len(PREFILLED) :] == PREFILLED


async def test_a_model_here_is_served_and_recorded(tmp_path):
    model = write_byte_tokenizer(tmp_path / "model")
    write_tiny_qwen3(model, vocab_size=512)
    command = ["serve", str(model), "--temperature", "0", "--max-context-tokens", "200"]
    async with started(tmp_path, [*command, "--set", "gateway.renderer.enable_thinking=false"], "main") as clients:
        create = clients["main"].chat.completions.create
        answers = [await create(model="m", messages=[USER], max_tokens=12) for _ in range(2)]
        with pytest.raises(openai.BadRequestError, match=r"prompt is too long: \d+ tokens > 200 maximum"):
            await create(model="m", messages=[{"role": "user", "content": "x" * 300}])
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    (recorded,) = RecordedRun.open(tmp_path / "records").attempts()
    events = recorded.records()
    sampled: dict[object, list[int]] = {}
    for event in events:
        if isinstance(event, TokensSampled):
            sampled.setdefault(event.call, []).extend(unpack(event.token_ids, TOKEN).tolist())
    first, second = sampled.values()
    assert first == second and 0 < len(first) <= 12
    (start, *_) = (event for event in events if isinstance(event, CallStarted))
    assert unpack(start.context_ids, TOKEN).tolist()[-len(PREFILLED) :] == PREFILLED


@pytest.mark.parametrize("command", [["gateway", "--engine", "http://127.0.0.1:1/v1", "--model"], ["serve"]])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("gateway.renderer.enable_thinkin=false", "enable_thinkin"),
        ("gateway.max_hold=3", "Did you mean gateway.max_hold_s?"),
        ("engine.num_threads=none", "engine.num_threads"),
    ],
)
def test_a_setting_that_there_is_not_is_refused(command, setting, said, tmp_path):
    model = write_byte_tokenizer(tmp_path / "model")
    write_tiny_qwen3(model, vocab_size=512)
    words = [*command, str(model), "--out", str(tmp_path / "out"), "--renderer", "qwen3", "--port", "0", "--set", setting]
    result = CliRunner().invoke(application(words), words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output


async def test_client_that_hangs_up_stops_the_server(tmp_path):
    server = CompletionsServer(lambda prompt: ids("one two<|im_end|>"), held=True)
    async with server, alone(tmp_path, server, "main") as clients:
        completions = clients["main"].chat.completions
        stream = await completions.create(model="m", messages=[USER], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not server.num_left:
            await asyncio.sleep(0.01)
        server.go.set()
        answer = await completions.create(model="m", messages=[USER])
        # the token that was made stays, and the scripted server says the whole answer behind it
        assert answer.choices[0].message.content == "o" + "one two"


async def test_model_that_the_server_does_not_have_is_said(tmp_path):
    async with CompletionsServer(lambda prompt: [], model="served") as server:
        model = write_byte_tokenizer(tmp_path / "model")
        arguments = ["gateway", "--engine", server.url, "--model", str(model), "--served-as", "other", "--renderer", "qwen3"]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, "--out", str(tmp_path / "out"), stderr=asyncio.subprocess.PIPE
        )
        _, error = await process.communicate()
        assert process.returncode == 2
        assert b"serves served, not 'other'" in b" ".join(error.split()) and b"--served-as" in error


def test_model_without_a_known_renderer_is_refused_at_start(tmp_path):
    model = write_byte_tokenizer(tmp_path / "nobody-knows")
    with pytest.raises(ConfigError, match=r"no renderer is known for .*nobody-knows: name one, such as qwen3"):
        Rendering.from_folder(model, {"name": "auto"})
