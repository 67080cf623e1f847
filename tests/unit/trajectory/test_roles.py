"""Roles by rule and by structure: what each harness sends, and what only the shape of the calls tells."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.core.records import Role
from qwengyre.testing.call_records import call_records, tree_of
from qwengyre.trajectory.harness_rules import BUILTIN, RequestTexts, captured_headers, find_markers, rules_from_toml
from qwengyre.trajectory.records import RoleHints
from qwengyre.trajectory.roles import assign_roles, detect_harness
from qwengyre_harness.agent import MAIN_SYSTEM, SUB_SYSTEM, SUMMARY_REQUEST

MAIN, MAIN_SUMMARY, SUB, SUB_SUMMARY, SIDE = Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY, Role.SIDE


def hints(system="main", *, tools=3, headers=None, markers=(), quotes=None, replays=None, returns=()) -> RoleHints:
    return RoleHints(
        "chat",
        headers=headers or {},
        system_digest=system,
        num_tools=tools,
        markers=markers,
        quotes=quotes and f"e/c{quotes[0]}",
        replays=replays and f"e/c{replays[0]}",
        returns=tuple(f"e/c{call}" for call in returns),
    )


def roles_of(*asked: RoleHints | tuple[RoleHints, int], rules=BUILTIN) -> list[Role]:
    """Roles of calls in order; a pair names the call whose whole sequence is extended."""
    records, lengths = [], []
    for index, item in enumerate(asked):
        what, base = item if isinstance(item, tuple) else (item, None)
        base_tokens = lengths[base] if base is not None else 0
        records += call_records(
            index,
            [index],
            [100 + index],
            base=base if base is not None else -1,
            base_tokens=base_tokens,
            at=index,
            hints=what,
        )
        lengths.append(base_tokens + 2)
    return list(assign_roles(tree_of(records).calls, rules).values())


class TestStructure:
    def test_other_system_prompt_is_a_sub_agent(self):
        assert roles_of(hints(), hints("helper"), (hints("helper"), 1), (hints(), 0)) == [MAIN, SUB, SUB, MAIN]

    def test_quoted_answer_was_a_summary(self):
        assert roles_of(hints(), (hints(), 0), hints(quotes=[1])) == [MAIN, MAIN_SUMMARY, MAIN]

    def test_answer_quoted_to_ask_for_a_commit_message_was_no_summary(self):
        asked = (hints(tools=0), hints("commit", tools=0, quotes=[0]), (hints(tools=0), 0))
        assert roles_of(*asked) == [MAIN, SIDE, MAIN]

    def test_answer_that_was_gone_on_from_was_no_summary(self):
        assert roles_of(hints(), (hints(), 0), hints(quotes=[0])) == [MAIN, MAIN, MAIN]

    def test_quoted_by_a_sub_agent_was_its_summary(self):
        asked = (hints(), hints("helper"), hints("summarizer", tools=0), hints("helper", quotes=[2]))
        assert roles_of(*asked) == [MAIN, SUB, SUB_SUMMARY, SUB]

    def test_summary_under_its_own_prompt_belongs_to_who_reads_it(self):
        assert roles_of(hints(), hints("summarizer", tools=0), hints(quotes=[1])) == [MAIN, MAIN_SUMMARY, MAIN]

    def test_summary_that_stands_as_an_answer_in_the_next_context(self):
        assert roles_of(hints(), hints("summarizer", tools=0), hints(replays=[1])) == [MAIN, MAIN_SUMMARY, MAIN]

    def test_one_shot_call_without_tools_is_a_side_call(self):
        assert roles_of(hints("title", tools=0), hints(), hints("commit", tools=0)) == [SIDE, MAIN, SIDE]

    def test_main_agent_without_tools_is_main(self):
        assert roles_of(hints(tools=0), hints("commit", tools=0), (hints(tools=0), 0)) == [MAIN, SIDE, MAIN]

    def test_memory_extraction_retells_main_under_another_prompt(self):
        asked = (hints(), hints("memory", tools=2, replays=[0]), (hints("memory", tools=2), 1), (hints(), 0))
        assert roles_of(*asked) == [MAIN, SIDE, SIDE, MAIN]

    def test_sub_agent_without_tools_that_goes_on_is_no_side_call(self):
        assert roles_of(hints(), hints("helper", tools=0), (hints("helper", tools=0), 1))[1:] == [SUB, SUB]


class TestForks:
    """Sub-agents under the main agent's system prompt, inside its context."""

    def test_context_whose_text_comes_back_as_a_tool_result_is_a_sub_agents(self):
        asked = (hints(), (hints(), 0), (hints(), 1), (hints(returns=[2]), 0), (hints(), 3))
        assert roles_of(*asked) == [MAIN, SUB, SUB, MAIN, MAIN]

    def test_two_that_run_side_by_side(self):
        asked = (hints(), (hints(), 0), (hints(), 0), (hints(), 2), (hints(), 1), (hints(returns=[3, 4]), 0))
        assert roles_of(*asked) == [MAIN, SUB, SUB, SUB, SUB, MAIN]

    def test_one_that_has_nothing_of_the_context_but_its_system_prompt(self):
        assert roles_of(hints(), hints(), (hints(returns=[1]), 0)) == [MAIN, SUB, MAIN]

    def test_one_whose_text_is_fetched_by_a_later_tool_call(self):
        assert roles_of(hints(), (hints(), 0), (hints(), 0), (hints(returns=[1]), 2)) == [MAIN, SUB, MAIN, MAIN]

    def test_agent_that_reads_its_own_text_again_is_none(self):
        assert roles_of(hints(), (hints(), 0), (hints(returns=[0]), 1)) == [MAIN, MAIN, MAIN]

    def test_context_before_a_compaction_is_none(self):
        asked = (hints(), (hints(), 0), hints("summarizer", tools=0), hints(quotes=[2]), (hints(returns=[1]), 3))
        assert roles_of(*asked) == [MAIN, MAIN, MAIN_SUMMARY, MAIN, MAIN]

    def test_qwen_code_forks_are_known_by_their_first_message_and_compact_for_themselves(self):
        agent = {"user-agent": "QwenCode/0.24.4"}
        fork = hints(headers=agent, markers=("qwen-fork",))
        compact = hints(headers=agent, markers=("qwen-compact-request",))
        plain = hints(headers=agent)
        asked = (plain, (fork, 0), (compact, 1), hints(headers=agent, quotes=[2]), (plain, 0), (compact, 4))
        assert roles_of(*asked) == [MAIN, SUB, SUB_SUMMARY, SUB, MAIN, MAIN_SUMMARY]
        asked_for = "<fork-boilerplate>\nSTOP.\n</fork-boilerplate>\n\nDirective: look"
        assert find_markers(RequestTexts("", "task", "Begin.", asked_for), BUILTIN) == ("qwen-fork",)


class TestRules:
    def test_claude_code(self):
        session = {"x-claude-code-session-id": "s"}
        sub = session | {"x-claude-code-agent-id": "a"}
        asked = (
            hints(headers=session),
            hints(headers=sub),
            (hints(headers=sub, markers=("claude-compact",)), 1),
            (hints(headers=session, markers=("claude-compact",)), 0),
        )
        assert roles_of(*asked) == [MAIN, SUB, SUB_SUMMARY, MAIN_SUMMARY]

    def test_codex(self):
        metadata = {"x-codex-turn-metadata": '{"request_kind":"turn"}', "thread-id": "t0"}
        compaction = metadata | {"x-codex-turn-metadata": '{"a":1,"request_kind":"compaction"}'}
        helper = {"x-codex-turn-metadata": "{}", "x-openai-subagent": "collab_spawn", "thread-id": "t1"}
        assert roles_of(hints(headers=metadata), hints(headers=helper), hints(headers=compaction)) == [MAIN, SUB, MAIN_SUMMARY]

    def test_opencode_summary_of_a_sub_agent_is_known_by_its_session(self):
        main = {"user-agent": "opencode/1.18", "x-session-id": "s0"}
        helper = {"user-agent": "opencode/1.18", "x-session-id": "s1"}
        asked = (
            hints("title", tools=0, headers=main, markers=("opencode-title",)),
            hints(headers=main),
            hints(headers=helper | {"x-parent-session-id": "s0"}),
            hints("summarizer", tools=0, headers=helper, markers=("opencode-compact",)),
        )
        assert roles_of(*asked) == [SIDE, MAIN, SUB, SUB_SUMMARY]

    def test_reference_harness_is_known_by_its_prompts(self):
        found = [
            find_markers(RequestTexts(system, "task", last), BUILTIN)
            for system, last in ((MAIN_SYSTEM, "task"), (SUB_SYSTEM, "task"), (MAIN_SYSTEM, SUMMARY_REQUEST))
        ]
        asked = [hints(f"system {index % 2}", markers=markers) for index, markers in enumerate(found)]
        assert roles_of(*asked) == [MAIN, SUB, MAIN_SUMMARY]

    def test_aider_answers_that_the_next_summary_quotes_were_no_summaries(self):
        aider, summary, commit = (
            hints(name, tools=0, markers=(marker,), quotes=quotes)
            for name, marker, quotes in (("chat", "aider", None), ("s", "aider-summary", [0]), ("c", "aider-commit", [0]))
        )
        asked = (aider, commit, summary, aider, msgspec.structs.replace(summary, quotes="e/c3"))
        assert roles_of(*asked) == [MAIN, SIDE, MAIN_SUMMARY, MAIN, MAIN_SUMMARY]

    def test_claude_compaction_is_told_from_a_context_that_holds_its_result(self):
        request = "Answer so: <example>\n<analysis>\n...</analysis>\n<summary>\n...</summary>\n</example>\nNo tools."
        result = "This session goes on.\n<analysis>x</analysis>\n<summary>y</summary>"
        assert find_markers(RequestTexts("", "", request), BUILTIN) == ("claude-compact",)
        assert find_markers(RequestTexts("", result, result), BUILTIN) == ()


class TestTables:
    def test_user_table_goes_before_the_built_in_ones(self):
        rules = rules_from_toml(
            """
            [[harness]]
            name = "mine"
            detect = [{ header = "x-mine" }]
            agent_header = "x-mine-agent"
            sub_agent = [{ header = "x-mine-agent", value = "^worker" }]
            side = [{ marker = "mine-title", has_tools = false }]
            markers = [{ name = "mine-title", place = "system", pattern = "Name this chat" }]
            """
        )
        assert {"x-mine", "x-mine-agent"} <= captured_headers(rules)
        assert find_markers(RequestTexts("Name this chat.", "", ""), rules) == ("mine-title",)
        mine = {"x-mine": "1"}
        asked = (
            hints(headers=mine),
            hints(headers=mine | {"x-mine-agent": "worker-1"}),
            hints(tools=0, headers=mine, markers=("mine-title",)),
        )
        assert roles_of(*asked, rules=rules) == [MAIN, SUB, SIDE]
        assert detect_harness({}, rules) is None

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ('[[harness]]\nname = "a"\ndetect = [{heder = "x"}]', "heder"),
            ('[[harness]]\nname = "a"\ndetect = [{marker = "m"}]', "does not define"),
            (
                '[[harness]]\nname = "a"\ndetect = []\nmarkers = [{name = "m", place = "system", pattern = "("}]',
                "is not a regular expression",
            ),
            ('[[harness]]\nname = "a"\ndetect = [{header = "X-Mine"}]', "lower case"),
            ('[[harness]]\nname = "a"\ndetect = [{value = "x"}]', "needs a header"),
            ("[[harness]\n", "no harness rules"),
        ],
    )
    def test_table_that_cannot_be_used_is_refused_with_its_file(self, table, message):
        with pytest.raises(ConfigError, match=message) as error:
            rules_from_toml(table, "mine.toml")
        assert error.value.file == "mine.toml"

    def test_marker_names_are_unique(self):
        names = [marker.name for harness in BUILTIN for marker in harness.markers]
        assert len(set(names)) == len(names)
