"""`gateway.renderer = auto` finds the renderer in the model's own files, and `default` is the model's own template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.rendering import How, Rendering
from qwengyre.gateway.templates.found import keep_renderer, settings_for
from qwengyre.gateway.tokenizer import FastTokenizer
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.match import ToolUse, Turn
from qwengyre.warmup.chat_template import CHAT_TEMPLATE

TOOL = {"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object", "properties": {}}}}
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def model(folder: Path, template: str | None = None, **config: object) -> Path:
    write_byte_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def found(folder: Path, **asked: object) -> dict:
    return dict(settings_for(folder, FastTokenizer.from_folder(folder), {"name": "auto", **asked}))


def test_template_tells_the_renderer_and_its_settings(tmp_path):
    assert found(model(tmp_path, CHAT_TEMPLATE)) == {"name": "qwen3", "enable_thinking": False}


def test_template_of_nobody_is_used_itself(tmp_path):
    assert found(model(tmp_path, PLAIN, model_type="qwen3")) == {"name": "default"}


def test_template_in_the_tokenizers_config_is_seen_too(tmp_path):
    folder = model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    assert found(folder)["name"] == "qwen3"


def test_without_a_template_the_architecture_tells(tmp_path):
    assert found(model(tmp_path, model_type="qwen3_moe")) == {"name": "qwen3"}


def test_architecture_that_leaves_a_choice_is_asked_about(tmp_path):
    with pytest.raises(ConfigError, match=r"one of nemotron-3, nemotron-3-ultra, nemotron-3\.5; the folder has no chat template"):
        found(model(tmp_path, model_type="nemotron_h"))


def test_what_was_kept_beside_a_checkpoint_is_used(tmp_path):
    folder = model(tmp_path, PLAIN)
    keep_renderer(folder, {"name": "qwen3", "thinking_retention": "all"})
    assert found(folder) == {"name": "qwen3", "thinking_retention": "all"}


def test_settings_beside_auto_stand_above_what_is_found(tmp_path):
    assert found(model(tmp_path, CHAT_TEMPLATE), enable_thinking=True) == {"name": "qwen3", "enable_thinking": True}


def test_setting_that_the_found_renderer_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gateway.renderer: .*clear_thinking"):
        Rendering.from_folder(model(tmp_path, CHAT_TEMPLATE), {"name": "auto", "clear_thinking": True})


def test_renderer_that_the_tokenizer_cannot_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gateway.renderer: .*<\|begin_of_text\|>"):
        Rendering.from_folder(model(tmp_path), {"name": "llama-3"})


def test_default_without_a_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no chat template: name the renderer of its family"):
        Rendering.from_folder(model(tmp_path), {"name": "default"})


def test_template_that_is_not_jinja_is_refused_by_its_file(tmp_path):
    with pytest.raises(ConfigError, match=r"chat_template.jinja: this chat template is not valid Jinja"):
        Rendering.from_folder(model(tmp_path, "{% for %}"), {"name": "auto"})


def test_model_without_a_token_that_ends_answers_is_refused(tmp_path):
    folder = model(tmp_path, PLAIN)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no token that ends an answer"):
        Rendering.from_folder(folder, {"name": "default"})


def test_default_renders_as_the_template_does(tmp_path):
    rendering = Rendering.from_folder(model(tmp_path, PLAIN), {"name": "default"})
    ids = rendering.render([Turn(role="system", text="S"), Turn(role="user", text="U")], ())
    assert rendering.tokenizer.decode(ids.tolist()) == "[system] S<|im_end|>[user] U<|im_end|>[assistant] "


def test_default_ends_where_the_folder_says(tmp_path):
    folder = model(tmp_path, PLAIN)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256]}')
    tokenizer = FastTokenizer.from_folder(folder)
    ends = Rendering.from_folder(folder, {"name": "default"}).stop_token_ids
    assert [tokenizer.decode(token) for token in ends] == ["<|endoftext|>", "<|im_end|>"]


def test_default_reads_the_calls_that_its_template_writes(tmp_path):
    rendering = Rendering.from_folder(model(tmp_path, HERMES), {"name": "default"})
    ids = rendering.tokenizer.encode('So.<tool_call>{"name": "run", "arguments": {"a": 1}}</tool_call><|im_end|>')
    parsed = rendering.parse_whole(ids, [1], [TOOL])
    assert (parsed.text, [(block.name, json.loads(block.arguments)) for block in parsed.blocks]) == ("So.", [("run", {"a": 1})])


def test_default_gives_arguments_to_the_template_as_it_takes_them(tmp_path):
    rendering = Rendering.from_folder(model(tmp_path, HERMES), {"name": "default"})
    use = ToolUse(id="c", name="run", arguments='{"a":  1}')
    ids = rendering.render([Turn(role="user", text="U"), Turn(role="assistant", tool_uses=(use,))], [TOOL])
    assert '"arguments": {"a": 1}}</tool_call>' in rendering.tokenizer.decode(ids.tolist())


def test_default_goes_on_after_what_was_sampled(tmp_path):
    """The answer keeps its own tokens, whatever the template would have made of it."""
    rendering = Rendering.from_folder(model(tmp_path, HERMES), {"name": "default"})
    said = rendering.tokenizer.encode('So.<tool_call>{"name":  "run", "arguments": {}}</tool_call><|im_end|>')
    asked = [Turn(role="system", text="S"), Turn(role="user", text="U")]
    prompt = rendering.render(asked, [TOOL])
    row = np.asarray([*prompt.tolist(), *said], np.int32)
    answer = Turn(role="assistant", text="So.", tool_uses=(ToolUse(id="c", name="run", arguments="{}"),))
    turns = [*asked, answer, Turn(role="tool", text="result", tool_use_id="c", name="run")]
    extended = rendering.extend(row, len(said), turns, 3, [TOOL])
    assert (extended.how, extended.keep) == (How.BRIDGED, len(row))
    assert rendering.tokenizer.decode(extended.new_T.tolist()) == "[tool] result<|im_end|>[assistant] "


def test_default_closes_an_answer_that_was_cut(tmp_path):
    rendering = Rendering.from_folder(model(tmp_path, PLAIN), {"name": "default"})
    prompt, said = rendering.render([Turn(role="user", text="U")], ()), rendering.tokenizer.encode("So")
    row = np.asarray([*prompt.tolist(), *said], np.int32)
    turns = [Turn(role="user", text="U"), Turn(role="assistant", text="So"), Turn(role="user", text="on")]
    extended = rendering.extend(row, len(said), turns, 2, ())
    assert (extended.how, extended.keep) == (How.BRIDGED, len(row))
    assert rendering.tokenizer.decode(extended.new_T.tolist()) == "<|im_end|>[user] on<|im_end|>[assistant] "


def test_template_without_tools_says_so_to_a_harness_that_has_some(tmp_path):
    rendering = Rendering.from_folder(model(tmp_path, PLAIN), {"name": "default"})
    with pytest.raises(ValueError, match="no place for tools"):
        rendering.render([Turn(role="user", text="U")], [TOOL])
