"""An answer with a tool call is known after a restart of the gateway as it is without one, in every renderer's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.renderers import ANSWER_FORMATS, write_renderer_model
from qwengyre.trajectory.match import Turn
from tests.unit.gateway.conftest import Bench

RENDERED_ANEW = ("deepseek-r1", "gemma4")
"""Their templates show a past answer in another way than it was sampled: it is known, and its context is rendered anew."""
ARGUMENTS = {"cmd": "ls -la", "n": 3}
TOOL = {
    "name": "run",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}, "required": ["cmd"]},
}


async def ask(bench: Bench, execution, history: list) -> dict:
    body = json.dumps({"messages": history, "tools": [{"type": "function", "function": TOOL}]}).encode()
    headers = {"x-api-key": execution.keys.key}
    answer = await begin(bench.harness_app, "POST", "/v1/chat/completions", headers=headers, body=body).finish()
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"][0]["message"]


@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "restarted"])
@pytest.mark.parametrize("name", ANSWER_FORMATS)
async def test_the_next_turn_extends_the_answer(tmp_path: Path, name: str, restarts: bool):
    rendering = Rendering.from_folder(write_renderer_model(tmp_path / "model", name), {"name": name})
    said = ANSWER_FORMATS[name].write(text="" if name == "llama-3" else "Look.", calls=(("run", ARGUMENTS),))
    prompt = rendering.tokenizer.decode(rendering.render([Turn(role="user", text="go")], [TOOL]).tolist())
    if prompt.rstrip().endswith("<think>"):
        said = f"so\n</think>\n\n{said}"
    config = GatewayConfig(max_context_tokens=100_000)

    async def scenario() -> list[str]:
        bench = Bench(rendering, tmp_path, config)
        history = [{"role": "user", "content": "go"}]
        async with bench.running():
            execution = await bench.open(engine=bench.says(said, said))
            message = await ask(bench, execution, history)
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
            if not restarts:
                await ask(bench, execution, history)
                return [call.started.cause for call in execution.session.calls]
        again = Bench(rendering, tmp_path, config)
        async with again.running():
            (execution,) = again.gateway.executions.values()
            await again.gateway.set_server("cell-0", again.says(said))
            execution.route.set("cell-0")
            await ask(again, execution, history)
            return [call.started.cause for call in execution.session.calls]

    assert await scenario() == ["root", "rerendered" if name in RENDERED_ANEW else "extends"]
