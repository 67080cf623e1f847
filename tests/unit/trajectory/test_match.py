from __future__ import annotations

from qwengyre.trajectory.match import Answer, ContextIndex, KeyedTurn, ToolUse, Turn, canonical_json, digest, key_turn

ROOT = digest(b"tools")
USE = ToolUse(id="call_1", name="run", arguments='{ "b": 1.0,  "a": "x " }')


def user(text: str) -> Turn:
    return Turn(role="user", text=text)


def said(text: str = "", reasoning: str | None = None, *uses: ToolUse) -> Turn:
    return Turn(role="assistant", text=text, reasoning=reasoning, tool_uses=uses)


class Kit:
    """An index and the tool calls that were issued."""

    def __init__(self, *issued: ToolUse):
        self.index, self.issued = ContextIndex(), {use.id: use for use in issued}
        self.num_calls = 0

    def keyed(self, *turns: Turn) -> list[KeyedTurn]:
        return [key_turn(turn, self.issued) for turn in turns]

    def match(self, *turns: Turn, root: bytes = ROOT):
        return self.index.match(root, self.keyed(*turns))

    def call(self, *turns: Turn, answer: Turn, num_sampled: int = 5) -> str:
        call = f"c{self.num_calls}"
        self.num_calls += 1
        matched = self.match(*turns)
        self.index.ask(call, matched)
        reasoning = key_turn(answer, self.issued).reasoning_digest
        self.index.answer(matched.key, Answer(call, answer, reasoning, num_sampled), self.issued)
        return call


def test_deepest_answer_wins():
    kit = Kit()
    first = kit.call(user("a"), answer=said("1"))
    second = kit.call(user("a"), said("1"), user("b"), answer=said("2"))
    matched = kit.match(user("a"), said("1"), user("b"), said("2"), user("c"))
    assert (matched.answer.call, matched.num_turns) == (second, 4)
    assert kit.match(user("a"), said("1"), user("other")).answer.call == first


def test_whitespace_and_missing_reasoning_do_not_count_but_changed_reasoning_does():
    kit = Kit()
    call = kit.call(user("a"), answer=said("text", "because"))
    assert kit.match(user("a"), said("  text \n\n"), user("b")).answer.call == call
    assert kit.match(user("a"), said("text", "because\n\n"), user("b")).answer.call == call
    changed = kit.match(user("a"), said("text", "other"), user("b"))
    assert changed.answer is None
    assert changed.key != kit.match(user("a"), said("text"), user("b")).key


def test_issued_tool_call_is_known_by_its_id_only_in_the_same_message():
    kit = Kit(USE)
    call = kit.call(user("a"), answer=said("go", None, USE))
    rewritten = ToolUse(id="call_1", name="invalid", arguments="{}")
    assert kit.match(user("a"), said("go", None, rewritten), user("b")).answer.call == call
    assert kit.match(user("a"), said("replaced text", None, rewritten), user("b")).answer is None
    assert kit.match(user("a"), said("go", None, ToolUse(id="x", name="run", arguments="{}")), user("b")).answer is None


def test_invented_assistant_turns_are_context_and_answers_behind_them_are_found():
    kit = Kit()
    call = kit.call(user("a"), said("invented"), user("b"), answer=said("real"))
    matched = kit.match(user("a"), said("invented"), user("b"), said("real"), user("c"))
    assert (matched.answer.call, matched.num_turns) == (call, 4)
    assert kit.match(user("a"), said("invented"), user("c")).answer is None


def test_an_answer_kept_under_another_prefix_is_no_match():
    kit = Kit()
    kit.call(user("a"), answer=said("1"))
    assert kit.match(user("summary"), said("1"), user("b")).answer is None
    assert kit.match(user("a"), said("1"), user("b"), root=digest(b"other tools")).answer is None


def test_same_context_again_names_the_earlier_calls_in_order():
    kit = Kit()
    calls = [kit.call(user("a"), answer=said(text)) for text in ("1", "2")]
    assert kit.match(user("a")).earlier == tuple(calls)
    assert kit.match(user("b")).earlier == ()


def test_without_an_answer_the_longest_shared_beginning_is_named():
    kit = Kit()
    call = kit.call(user("a"), user("b"), answer=said("1"))
    matched = kit.match(user("a"), user("c"))
    assert (matched.answer, matched.shares, matched.num_shared) == (None, call, 1)


def test_siblings_with_one_text_are_told_apart_by_their_reasoning():
    kit = Kit()
    one = kit.call(user("a"), answer=said("same", "one"))
    two = kit.call(user("a"), answer=said("same", "two"))
    assert kit.match(user("a"), said("same", "two"), user("b")).answer.call == two
    assert kit.match(user("a"), said("same"), user("b")).answer.call == one


def test_a_chain_of_1100_calls_needs_no_recursion():
    kit = Kit()
    turns: list[Turn] = []
    for number in range(1100):
        turns.append(user(str(number)))
        call = kit.call(*turns, answer=said(f"answer {number}")) if number % 100 == 99 else None
        turns.append(said(f"answer {number}"))
    matched = kit.match(*turns, user("end"))
    assert (matched.answer.call, matched.num_turns) == (call, 2200)


def test_digest_of_parts_is_no_digest_of_their_sum():
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")


def test_canonical_json_ignores_key_order_spaces_and_float_form():
    assert canonical_json('{"b": 1.0, "a": [2, {"d": 1, "c": 2.5}]}') == canonical_json('{ "a":[2.0,{"c":2.5,"d":1}],"b":1}')
    assert canonical_json("not json ") == b"not json"
