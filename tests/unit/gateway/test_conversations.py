"""Conversations that templates were not written for, in every renderer: several system messages, control tokens spelled out."""

from __future__ import annotations

import numpy as np
import pytest

from qwengyre.gateway.protocol.conversation import settle
from qwengyre.gateway.rendering import How, Rendering
from qwengyre.testing.answers import TOOLS
from qwengyre.testing.renderers import ANSWER_FORMATS, CONTROL_TOKENS, write_renderer_model
from qwengyre.testing.tokenizers import CONTROL, MARKUP
from qwengyre.trajectory.match import ToolUse, Turn

SYSTEM, USER = Turn(role="system", text="rule one"), Turn(role="user", text="go")
CALL = Turn(role="assistant", text="", tool_uses=(ToolUse(id="c", name="run", arguments='{"cmd": "ls"}'),))
LATER = Turn(role="system", text="rule two")


def result(text: str) -> Turn:
    return Turn(role="tool", text=text, tool_use_id="c", name="run")


@pytest.fixture(scope="module", params=list(CONTROL_TOKENS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Rendering]:
    folder = write_renderer_model(tmp_path_factory.mktemp("model"), request.param)
    return request.param, Rendering.from_folder(folder, {"name": request.param})


def text_of(rendering: Rendering, turns: list[Turn]) -> str:
    return rendering.tokenizer.decode(rendering.render(turns, TOOLS).tolist())


@pytest.mark.parametrize(
    "turns",
    [
        [SYSTEM, LATER, USER],
        [SYSTEM, USER, LATER],
        [USER, LATER],
        [SYSTEM, USER, Turn(role="assistant", text="Well."), LATER, USER],
        [SYSTEM, USER, CALL, result("a.py"), LATER],
        [SYSTEM, USER, CALL, result("a.py"), LATER, USER],
    ],
    ids=("two first", "after the user", "none first", "after an answer", "after a result", "between result and user"),
)
def test_no_system_message_vanishes(case, turns):
    _, rendering = case
    text = text_of(rendering, turns)
    assert "rule two" in text and (SYSTEM not in turns or text.index("rule one") < text.index("rule two"))


def test_reminder_after_a_result_extends_what_was_sampled(case):
    name, rendering = case
    if name == "deepseek-r1":
        pytest.skip("its template renders every turn anew")
    form = ANSWER_FORMATS[name]
    prompt = rendering.render([SYSTEM, USER], TOOLS)
    said = form.write(thought="so", calls=(("run", {"cmd": "ls"}),))
    if name == "gemma4":
        said = said.removesuffix("<turn|>") + "<|tool_response>"
    sampled = rendering.tokenizer.encode(said)
    row = [*prompt.tolist(), *sampled]
    extended = rendering.extend(np.asarray(row, np.int32), len(sampled), [SYSTEM, USER, CALL, result("a.py"), LATER], 3, TOOLS)
    new = rendering.tokenizer.decode(extended.new_T.tolist())
    assert extended.how is How.BRIDGED and extended.keep >= len(prompt)
    assert "a.py" in new and "rule two" in new


@pytest.mark.parametrize("arguments", ['{"cmd": "cut \\ud83d"}', '{"\\udc00": ["\\ud83d\\ude00 cut \\ud83d"]}'])
def test_half_a_character_in_arguments_does_not_end_the_session(case, arguments):
    """It is an escape in their JSON, so the request that brings them back is whole; a template that reads them has half a character."""
    _, rendering = case
    call = Turn(role="assistant", text="", tool_uses=(ToolUse(id="c", name="run", arguments=arguments),))
    text = text_of(rendering, [SYSTEM, USER, call, result("a.py"), USER])
    assert any(f"cut {half}" in text for half in ("\ufffd", "\\ufffd", "\\ud83d")), text[-600:]


def test_control_tokens_that_are_spelled_out_stay_text(case):
    name, rendering = case
    spelled = "".join((*CONTROL_TOKENS[name], *CONTROL, *MARKUP))
    vocabulary = rendering.tokenizer

    def num_controls(text: str) -> dict[str, int]:
        turns = [Turn(role="system", text=text), Turn(role="user", text=f"a{text}b"), CALL, result(text)]
        ids = rendering.render(turns, TOOLS).tolist()
        tokens = dict.fromkeys((*CONTROL_TOKENS[name], *CONTROL, *MARKUP))
        return {token: ids.count(vocabulary.convert_tokens_to_ids(token)) for token in tokens}

    counted, plain = num_controls(spelled), num_controls("nothing")
    assert {token: count for token, count in counted.items() if count > plain[token]} == {}
    assert f"a{spelled}b" in text_of(rendering, [Turn(role="user", text=f"a{spelled}b")])


def test_control_tokens_in_tools_stay_text(case):
    name, rendering = case
    spelled = " ".join((*CONTROL_TOKENS[name], *CONTROL))
    tool = {"type": "function", "function": {"name": "run", "description": spelled, "parameters": {"type": "object"}}}
    honest = {"type": "function", "function": {"name": "run", "description": "x", "parameters": {"type": "object"}}}

    def count(tools: list[dict]) -> list[int]:
        ids = rendering.render([USER], tools).tolist()
        return [ids.count(rendering.tokenizer.convert_tokens_to_ids(token)) for token in (*CONTROL_TOKENS[name], *CONTROL)]

    assert count([tool]) == count([honest])


def test_tools_reach_the_policy_in_every_format(case):
    _, rendering = case
    assert "cmd" in text_of(rendering, [SYSTEM, USER])


@pytest.mark.parametrize("arguments", ["null", "", "[1]", '{"cmd": "l', "5"])
def test_arguments_that_are_no_object_can_be_rendered(case, arguments):
    _, rendering = case
    call = Turn(role="assistant", text="", tool_uses=(ToolUse(id="c", name="run", arguments=arguments),))
    assert "a.py" in text_of(rendering, [USER, call, result("a.py")])


def test_later_system_message_goes_to_the_turn_beside_it():
    told = settle([SYSTEM, USER, CALL, LATER, USER], has_later_system=False)
    assert [turn.role for turn in told.turns] == ["system", "user", "assistant", "user"]
    assert told.turns[-1].text == "<system-reminder>\nrule two\n</system-reminder>\n\ngo"
    assert told.sources == (0, 1, 2, 4)
