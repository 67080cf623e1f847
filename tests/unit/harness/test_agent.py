"""The reference harness's loop against a scripted model: tools, compaction, delegation, limits."""

from __future__ import annotations

import json

from qwengyre_harness.agent import MAIN_SYSTEM, SUB_SYSTEM, SUMMARY_REQUEST, Agent, Limits, Reply, ToolCall

LIMITS = Limits(context_tokens=100, turns=10, depth=1)


class Script:
    """Answers with the given replies in order and remembers what it was asked."""

    def __init__(self, *replies: Reply):
        self.replies, self.asked = list(replies), []

    def __call__(self, messages, tools):
        self.asked.append(([dict(message) for message in messages], [tool["function"]["name"] for tool in tools]))
        return self.replies.pop(0)


class Notebook:
    """A workspace that notes what it was told to do."""

    def __init__(self, changed: str = ""):
        self.calls, self.changed = [], changed

    def call(self, name, arguments):
        if name == "nonsense":
            raise KeyError(name)
        self.calls.append((name, arguments))
        return f"{name} ok"

    def after_change(self):
        return self.changed


def call(name: str, num_tokens: int = 10, **arguments: str) -> Reply:
    return Reply("", (ToolCall("c1", name, json.dumps(arguments)),), num_tokens)


def say(text: str, num_tokens: int = 10) -> Reply:
    return Reply(text, (), num_tokens)


def test_tool_results_follow_the_call_and_the_answer_without_a_call_ends_the_work():
    script, notebook = Script(call("run", command="ls"), say("finished")), Notebook()
    assert Agent(script, notebook, LIMITS).work("task") == "finished"
    assert notebook.calls == [("run", {"command": "ls"})]
    roles = [message["role"] for message in script.asked[1][0]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert script.asked[1][0][-1] == {"role": "tool", "tool_call_id": "c1", "content": "run ok"}
    assert script.asked[0][0][0]["content"] == MAIN_SYSTEM


def test_a_full_context_is_summarized_and_the_work_goes_on_from_the_summary_alone():
    script = Script(call("run", 101, command="ls"), say("half is done"), say("finished"))
    assert Agent(script, Notebook(), LIMITS).work("task") == "finished"
    assert script.asked[1][0][-1] == {"role": "user", "content": SUMMARY_REQUEST}
    fresh = script.asked[2][0]
    assert [message["role"] for message in fresh] == ["system", "user"]
    assert fresh[1]["content"].startswith("task") and fresh[1]["content"].endswith("half is done")


def test_a_context_at_its_limit_is_not_yet_full():
    script = Script(call("run", 100, command="ls"), say("finished"))
    Agent(script, Notebook(), LIMITS).work("task")
    assert len(script.asked) == 2


def test_a_sub_agent_has_a_fresh_context_another_prompt_and_cannot_delegate_further():
    script = Script(call("delegate", task="one piece"), say("piece done"), say("finished"))
    Agent(script, Notebook(changed="next g"), LIMITS).work("task")
    messages, tools = script.asked[1]
    assert messages == [{"role": "system", "content": SUB_SYSTEM}, {"role": "user", "content": "one piece"}]
    assert "delegate" not in tools and "delegate" in script.asked[0][1]
    assert script.asked[2][0][-1]["content"] == "piece done\nnext g"


def test_turns_are_limited():
    script = Script(*(call("run", command="ls") for _ in range(10)))
    Agent(script, Notebook(), LIMITS).work("task")
    assert len(script.asked) == LIMITS.turns


def test_summaries_count_as_turns():
    script = Script(*(reply for _ in range(10) for reply in (call("run", 101, command="ls"), say("summary"))))
    Agent(script, Notebook(), LIMITS).work("task")
    assert len(script.asked) == LIMITS.turns


def test_what_the_model_gets_wrong_is_told_to_the_model():
    bad_json = Reply("", (ToolCall("c1", "run", "{"),), 10)
    not_an_object = Reply("", (ToolCall("c1", "run", "3"),), 10)
    script = Script(bad_json, not_an_object, call("nonsense"), say("finished"))
    Agent(script, Notebook(), LIMITS).work("task")
    told = [messages[-1]["content"] for messages, _ in script.asked[1:]]
    assert told[0].startswith("error: the arguments are not JSON (")
    assert told[1] == "error: the arguments are not a JSON object"
    assert told[2] == "error: there is no tool 'nonsense'"


def test_several_calls_of_one_reply_are_answered_in_order():
    reply = Reply("", (ToolCall("a", "run", '{"command": "1"}'), ToolCall("b", "run", '{"command": "2"}')), 10)
    script, notebook = Script(reply, say("finished")), Notebook()
    Agent(script, notebook, LIMITS).work("task")
    assert [message.get("tool_call_id") for message in script.asked[1][0][-2:]] == ["a", "b"]
    assert [arguments["command"] for _, arguments in notebook.calls] == ["1", "2"]
