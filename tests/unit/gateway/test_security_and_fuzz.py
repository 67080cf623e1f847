"""What no client may do: break the gateway, read another execution, or learn a key."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.keys import derive, load_secret
from qwengyre.gateway.protocol.request import ItemCache
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.engines import ScriptedEngine, replies

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
LIST_OF = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


async def post(bench, path, body, key, **headers):
    return await begin(bench.harness_app, "POST", path, headers={"x-api-key": key, **headers}, body=body).finish()


def is_error_of(path: str, body: bytes) -> bool:
    error = json.loads(body)
    return error["type"] == "error" and bool(error["error"]["message"]) if "messages" in path else bool(error["error"]["message"])


@given(st.binary(max_size=200), st.sampled_from(PATHS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_random_bytes_are_refused_in_the_dialect(bench, body, path):
    execution = await bench.open("e-fuzz")
    refused = await post(bench, path, body, execution.keys.key)
    assert refused.status == 400
    assert is_error_of(path, refused.body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "input", "tools", "system"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON, JSON, st.sampled_from(PATHS[:2] + PATHS[3:]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_json_is_answered(bench, item, tools, path):
    """Whatever stands in a message: a client error, or a call that runs; never a server error."""

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        bench.gateway._tasks = tasks
        execution = await bench.open("e-json", max_context_tokens=4000)
        body = json.dumps({LIST_OF[path]: [{"role": "user", "content": "a"}, item], "tools": tools}).encode()
        exchange = begin(bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key}, body=body)
        while not exchange.is_done and not execution.live:
            await asyncio.sleep(0)
        await exchange.hang_up()
        assert exchange.status in (0, 400), exchange.body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"[" * 10_000, b'{"messages":' * 10_000, b'{"messages": [' + b'{"content":' * 10_000, CHAT[:-3]]
)
async def test_deep_nesting_and_cut_json(bench, path, body):
    execution = await bench.open()
    refused = await post(bench, path, body, execution.keys.key)
    assert refused.status == 400
    assert is_error_of(path, refused.body)


DEEP = "[" * 1200 + "]" * 1200
NESTED = '{"a":' * 900 + "1" + "}" * 900


@pytest.mark.parametrize(
    ("path", "item"),
    [
        (PATHS[0], {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": DEEP}}]}),
        (PATHS[0], {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": NESTED}}]}),
        (PATHS[1], {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "NESTED"}]}),
        (PATHS[3], {"type": "function_call", "call_id": "x", "name": "f", "arguments": DEEP}),
        (PATHS[3], {"type": "custom_tool_call", "call_id": "x", "name": "f", "input": DEEP}),
    ],
)
async def test_deep_nesting_inside_a_tool_call_is_served_or_refused(bench, path, item):
    async with bench.running():
        execution = await bench.open(engine=bench.says("fine<|im_end|>"))
        body = json.dumps({LIST_OF[path]: [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]})
        answer = await post(bench, path, body.replace('"NESTED"', NESTED).encode(), execution.keys.key)
        assert answer.status == 200 or (answer.status == 400 and is_error_of(path, answer.body)), answer.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [DEEP, NESTED, "9" * 5000, "NaN"], ids=["deep", "nested", "digits", "nan"])
@pytest.mark.parametrize("path", [PATHS[0], PATHS[1], PATHS[3]])
async def test_policy_that_writes_json_which_nobody_reads_breaks_nothing(bench, path, value, stream):
    """Deeper than a reader recurses, longer than a number may be: the call ends like any other, in every dialect."""

    bench.gateway.config = GatewayConfig(max_context_tokens=100_000, max_tokens_per_call=100_000)
    async with bench.running():
        arguments = f'{{"a": {value}}}'
        said = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name in ("f", "own")]
        unusual = f'<tool_call>\n{{"arguments": {arguments}, "name": "g"}}\n</tool_call>'
        answer = "\n".join((*said, unusual)) + "<|im_end|>"
        execution = await bench.open(engine=bench.says(answer, tokens_per_chunk=5000))
        own = {"type": "custom", "name": "own"} if path == PATHS[3] else {"name": "own"}
        tools = {} if path == PATHS[0] else {"tools": [own]}
        body = {LIST_OF[path]: [{"role": "user", "content": "a"}], "stream": stream, **tools}
        heard = await post(bench, path, json.dumps(body).encode(), execution.keys.key)
        assert heard.status == 200 and b"the gateway failed" not in heard.body
        calls = await bench.gateway.close(execution.id)
        assert calls[0].finished.reason == "stop" and calls.answer_ids(0) == bench.ids(answer)


async def test_text_beyond_any_context_is_refused_without_encoding_it_all(bench):
    execution = await bench.open(max_context_tokens=4000)
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 1_000_000}]}).encode()
    before = bench.rendering.tokenizer.num_encoded_tokens
    refused = await post(bench, PATHS[1], body, execution.keys.key)
    counted = await post(bench, PATHS[2], body, execution.keys.key)
    assert refused.status == 400 and b"prompt is too long: 5000000 tokens > 4000 maximum" in refused.body
    assert json.loads(counted.body) == {"input_tokens": 5_000_000}
    assert bench.rendering.tokenizer.num_encoded_tokens == before


async def test_long_text_that_fits_is_answered(bench):
    bench.gateway.config = GatewayConfig(max_context_tokens=100_000_000)
    async with bench.running():
        engine = ScriptedEngine(replies([bench.ids("read<|im_end|>")]), max_context_tokens=1 << 20)
        execution = await bench.open(engine=engine, max_context_tokens=90_000_000)
        body = json.dumps({"messages": [{"role": "user", "content": "w" * 300_000}]}).encode()
        answer = await post(bench, PATHS[0], body, execution.keys.key)
        assert b"read" in answer.body and len(engine.requests[0].token_ids) > 4 * 300_000


def test_memory_of_parsed_messages_is_bounded():
    cache = ItemCache({}, max_bytes=1000)
    for number in range(100):
        assert cache.get("message", b"%099d" % number, int) == number
    assert len(cache._parsed) == 10
    assert cache.get("message", b"%099d" % 99, lambda raw: -1) == 99
    assert cache.get("message", b"%099d" % 0, lambda raw: -1) == -1


async def test_large_bodies_are_refused_unread(bench):
    execution = await bench.open()
    big = bytes(50_000_000)
    announced = await post(bench, PATHS[0], b"", execution.keys.key, **{"content-length": str(len(big))})
    sent = await post(bench, PATHS[1], big, execution.keys.key)
    assert (announced.status, sent.status) == (413, 413)
    assert is_error_of(PATHS[1], sent.body)


async def test_a_key_opens_its_own_execution_only_and_dies_with_it(bench):
    async with bench.running():
        one, two = await bench.open("e1", engine=bench.says("1<|im_end|>", "2<|im_end|>")), await bench.open("e2")
        own, other = f"{one.keys.path}/chat/completions", f"{two.keys.path}/chat/completions"
        wrong = [(own, two.keys.key), (other, one.keys.key), (own, "sk-wrong"), (PATHS[0], "sk-wrong"), (PATHS[0], "")]
        wrong.append((f"/e/{'0' * 32}/v1/chat/completions", one.keys.key))
        for path, key in wrong:
            assert (await post(bench, path, CHAT, key)).status == 401
        assert (await post(bench, own, CHAT, one.keys.key)).status == 200
        without_key = await begin(bench.harness_app, "POST", own, headers={}, body=CHAT).finish()
        assert without_key.status == 200
        await bench.gateway.close("e1")
        assert (await post(bench, own, CHAT, one.keys.key)).status == 401
        assert (await begin(bench.harness_app, "POST", own, headers={}, body=CHAT).finish()).status == 401


async def test_no_key_in_journal_or_log(bench, caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario():
        async with bench.running():
            execution = await bench.open(engine=bench.says("1<|im_end|>"))
            await post(bench, PATHS[0], CHAT, execution.keys.key)
            await bench.gateway.close(execution.id)
            return execution.keys

    keys = await scenario()
    journal = (bench.folder / "gateway.journal").read_bytes()
    for secret in (keys.key, keys.path_secret):
        assert secret.encode() not in journal
        assert secret not in caplog.text


def test_secret_file_is_private_and_stable(tmp_path):
    secret = load_secret(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert load_secret(tmp_path / "secret") == secret
    assert derive(secret, "e1", 0) == derive(secret, "e1", 0)
    assert len({derive(secret, execution, attempt).key for execution in ("e1", "e2") for attempt in (0, 1)}) == 4
    os.chmod(tmp_path / "secret", 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(tmp_path / "secret")


async def test_one_execution_cannot_starve_others(bench):
    async with bench.running():
        greedy, other = await bench.open("e1"), await bench.open("e2", engine=bench.says("fine<|im_end|>"))
        bodies = [json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode() for number in range(65)]
        held = [begin(bench.harness_app, "POST", PATHS[0], headers={"x-api-key": greedy.keys.key}, body=body) for body in bodies]
        await held[-1].finish()
        assert held[-1].status == 429
        other.route.set("cell-0")
        assert (await post(bench, PATHS[0], CHAT, other.keys.key)).status == 200
        for exchange in held[:-1]:
            await exchange.hang_up()
        assert bench.gateway.stats.calls_abandoned == 64
