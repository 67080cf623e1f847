"""What a policy cannot read does not end its session: images, documents, halves of characters."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.gateway.protocol import surrogates
from qwengyre.testing.asgi_client import begin

PNG = "iVBORw0KGgo="
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "Read", "input": {}}]}


def messages(*content: dict) -> dict:
    result = {"type": "tool_result", "tool_use_id": "x", "content": list(content)}
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}, CALL, {"role": "user", "content": [result]}]}


def source(**fields: object) -> dict:
    return {"source": {"type": "base64", **fields}}


def chat(part: dict) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


def responses(part: dict) -> dict:
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    return {"input": [{"role": "user", "content": "a"}, call, {"type": "function_call_output", "call_id": "c", "output": [part]}]}


LEFT_OUT = "left out: this model reads text only]"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "messages",
            messages({"type": "image", **source(media_type="image/png", data=PNG)}),
            f"[image/png of 8 bytes {LEFT_OUT}",
        ),
        (
            "messages",
            messages({"type": "document", "title": "a.pdf", **source(media_type="application/pdf", data="JVBERi0=")}),
            f"[application/pdf 'a.pdf' of 5 bytes {LEFT_OUT}",
        ),
        ("messages", messages({"type": "document", "source": {"type": "text", "data": "plain words"}}), "plain words"),
        (
            "messages",
            messages({"type": "search_result", "source": "s", "title": "T", "content": [{"text": "found"}]}),
            "T\nfound",
        ),
        (
            "chat/completions",
            chat({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}),
            "[image/png of 8",
        ),
        (
            "chat/completions",
            chat({"type": "image_url", "image_url": {"url": "https://h/a.png"}}),
            "[image at https://h/a.png left",
        ),
        (
            "chat/completions",
            chat({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}),
            "[audio of 8 bytes left",
        ),
        ("chat/completions", chat({"type": "file", "file": {"filename": "b.pdf", "file_data": PNG}}), "[file 'b.pdf' of 8 bytes"),
        (
            "responses",
            responses({"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}),
            "[image/png of 8 bytes left",
        ),
        ("responses", responses({"type": "input_file", "filename": "c.pdf", "file_data": PNG}), "[file 'c.pdf' of 8 bytes left"),
    ],
)
async def test_part_that_is_no_text_is_told_of(bench, path, body, told):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            answer = await http.post(f"/v1/{path}", json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        prompt = bench.text(execution.session.calls.sequence(0).tolist())
        assert told in prompt


@pytest.mark.parametrize(
    ("written", "read", "num_mended"),
    [
        (b"cut \\ud83d", "cut \ufffd", 1),
        (b"\\ude00 tail", "\ufffd tail", 1),
        (b"\\ud83d\\u0041", "\ufffdA", 1),
        (b"\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600", 1),
        (b"\\ude00\\ud83d", "\ufffd\ufffd", 2),
        (b"\xed\xa0\xbd raw", "\ufffd raw", 1),
        (b"\\ud83d\\ude00 whole", "\U0001f600 whole", 0),
        (b"\\\\ud83d escaped", "\\ud83d escaped", 0),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_half_of_a_character_is_read_as_one_that_is_missing(bench, path, written, read, num_mended):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>", "ok<|im_end|>"))
        body = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"%s"}]}' % written
        async with bench.http(execution) as http:
            answer = await http.post(f"/v1/{path}", content=body)
            assert answer.status_code == 200, answer.text
            again = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": read}]})
            await http.post(f"/v1/{path}", content=again)
        assert [call.started.cause for call in execution.session.calls] == ["root", "retry"]
        assert bench.gateway.stats.characters_mended == num_mended


USE = b'{"type":"tool_use","id":"x","name":"f","input":{"a":"cut %s"}}'
CALL = b'{"functionCall":{"name":"f","args":{"a":"cut %s"}}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", b'{"messages":[{"role":"user","content":"u"},{"role":"assistant","content":[' + USE + b"]}]}"),
        ("/v1beta/models/m:generateContent", b'{"contents":[{"parts":[{"text":"u"}]},{"role":"model","parts":[' + CALL + b"]}]}"),
    ],
)
@pytest.mark.parametrize("broken", [b"\x8a", b"\\ud83d"])
async def test_arguments_of_a_call_that_are_no_text_are_mended_too(bench, path, body, broken):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        headers = {"authorization": f"Bearer {execution.keys.key}"}
        got = await begin(bench.harness_app, "POST", path, headers=headers, body=body % broken).finish()
        assert got.status == 200, got.body
        assert "cut \ufffd" in bench.text(execution.session.calls.sequence(0).tolist())


async def test_body_that_is_not_json_is_refused_as_before(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            answer = await http.post("/v1/chat/completions", content=b'{"messages": [\xff')
        assert answer.status_code == 400


PARTS = [
    b"a",
    b"\x8a",
    b"\xed\xa0\xbd",
    "\u00e9".encode(),
    "\U0001f600".encode(),
    b"\\ud83d",
    b"\\ude00",
    b"\\\\",
    b"\\n",
    b"\xe2\x82",
]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), num_bytes=st.integers(1, 9))
def test_a_large_body_is_mended_in_pieces_as_in_one(parts, num_bytes):
    """Of pieces, because whoever mends one has the interpreter for himself; what lies across two of them is read as if it did not."""
    body = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surrogates, "PIECE_BYTES", 1 << 20)
        whole = surrogates.mended(body)
        patch.setattr(surrogates, "PIECE_BYTES", num_bytes)
        assert surrogates.mended(body) == whole
