"""What is known of each harness: how to tell its sub-agents, summaries and side calls. Data only; `roles` applies it.

A user adds a harness with a `[[harness]]` table of the same fields in a TOML file (docs/harnesses.md). The gateway reads from here which
headers to keep and which text markers to look for, so a rule never needs a second place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from qwengyre.core.errors import ConfigError

Place = Literal["system", "first_user", "new_user", "last"]


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A regular expression that is looked for in one text of the request."""

    name: str
    """Unique over all harnesses: it is what the journal keeps."""
    place: Place
    """`system`: all system text; `first_user`: the first user message; `new_user`: the user messages after the last answer that was
    recorded here; `last`: the last text block, if the user's."""
    pattern: str


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds when everything named here holds; an empty condition never does."""

    header: str = ""
    """Lower-case name of a header that must be present."""
    value: str = ""
    """Regular expression that must be found in that header."""
    marker: str = ""
    """Name of a marker that must have been found."""
    has_tools: bool | None = None

    def __post_init__(self) -> None:
        if self.header != self.header.lower():
            raise ValueError(f"header {self.header!r} must be lower case")
        if self.value and not self.header:
            raise ValueError(f"value {self.value!r} needs a header to be looked for in")

    @property
    def is_empty(self) -> bool:
        return not (self.header or self.marker) and self.has_tools is None


class HarnessRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one harness marks its calls. What no rule tells is left to structure."""

    name: str
    detect: tuple[Condition, ...]
    """Any of these on any call of an execution says that this harness runs it."""
    agent_header: str = ""
    """Header that names the agent (session, thread) of a call: what is known of one of its calls holds for all."""
    sub_agent: tuple[Condition, ...] = ()
    summary: tuple[Condition, ...] = ()
    side: tuple[Condition, ...] = ()
    fork: tuple[Condition, ...] = ()
    """The first call of a sub-agent that takes over another agent's context; what goes on from it is its, too."""
    markers: tuple[Marker, ...] = ()

    def __post_init__(self) -> None:
        known = {marker.name for marker in self.markers}
        for condition in self.conditions:
            if condition.marker and condition.marker not in known:
                raise ValueError(f"harness {self.name}: condition names marker {condition.marker!r}, which it does not define")
        for marker in self.markers:
            try:
                re.compile(marker.pattern)
            except re.error as error:
                raise ValueError(f"harness {self.name}: marker {marker.name!r} is not a regular expression: {error}") from None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return (*self.detect, *self.sub_agent, *self.summary, *self.side, *self.fork)


class _RulesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    harness: tuple[HarnessRules, ...]


class RequestTexts(msgspec.Struct, frozen=True):
    """The texts of one request in which markers are looked for."""

    system: str
    first_user: str
    last: str
    new_user: str = ""


def rules_from_toml(text: str, file: str = "harness rules") -> tuple[HarnessRules, ...]:
    """The `[[harness]]` tables of a user's file, before the built-in ones. Raises ConfigError, naming `file`.

    >>> rules_from_toml('[[harness]]\\nname = "mine"\\ndetect = [{header = "x-mine"}]')[0].name
    'mine'
    """
    try:
        table = msgspec.toml.decode(text.encode(), type=_RulesFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"no harness rules can be read: {error}", file=file) from None
    return (*table.harness, *BUILTIN)


def captured_headers(rules: Iterable[HarnessRules]) -> frozenset[str]:
    """Every header that some rule reads."""
    names: set[str] = set()
    for harness in rules:
        names |= {condition.header for condition in harness.conditions if condition.header}
        names |= {harness.agent_header} - {""}
    return frozenset(names)


def find_markers(texts: RequestTexts, rules: Sequence[HarnessRules]) -> tuple[str, ...]:
    """Names of the markers found, in the order of the tables."""
    return tuple(
        marker.name for harness in rules for marker in harness.markers if re.search(marker.pattern, getattr(texts, marker.place))
    )


BUILTIN: tuple[HarnessRules, ...] = (
    HarnessRules(
        name="claude-code",
        detect=(Condition(header="x-claude-code-session-id"), Condition(header="user-agent", value=r"^claude-cli/")),
        agent_header="x-claude-code-agent-id",
        sub_agent=(Condition(header="x-claude-code-agent-id"), Condition(marker="claude-subagent")),
        summary=(Condition(marker="claude-compact"),),
        side=(Condition(marker="claude-title", has_tools=False),),
        markers=(
            Marker("claude-subagent", "system", r"\bcc_is_subagent=true\b"),
            Marker("claude-compact", "last", r"(?s)<example>\s*<analysis>.*<summary>.*</example>"),
            Marker("claude-title", "system", r"(?i)\b(?:short|concise|sentence-case) title\b"),
        ),
    ),
    HarnessRules(
        name="codex",
        detect=(Condition(header="x-codex-turn-metadata"), Condition(header="originator", value=r"^codex")),
        agent_header="thread-id",
        sub_agent=(Condition(header="x-openai-subagent"), Condition(header="x-codex-parent-thread-id")),
        summary=(Condition(header="x-codex-turn-metadata", value=r'"request_kind"\s*:\s*"compaction"'),),
    ),
    HarnessRules(
        name="qwen-code",
        detect=(Condition(header="user-agent", value=r"^QwenCode/"),),
        summary=(Condition(marker="qwen-compact-system"), Condition(marker="qwen-compact-request")),
        side=(Condition(marker="qwen-memory"),),
        fork=(Condition(marker="qwen-fork"),),
        markers=(
            Marker("qwen-compact-system", "system", r"(?s)<analysis>.*<state_snapshot>.*</state_snapshot>"),
            Marker("qwen-compact-request", "last", r"(?s)<analysis>.*<state_snapshot>"),
            Marker("qwen-fork", "new_user", r"(?m)^<fork-boilerplate>$"),
            Marker("qwen-memory", "system", r"(?i)\bacting as the managed (?:[\w-]+ )*memory\b"),
        ),
    ),
    HarnessRules(
        name="gemini-cli",
        detect=(Condition(header="user-agent", value=r"^GeminiCLI\b"),),
        summary=(Condition(marker="gemini-compact"),),
        markers=(Marker("gemini-compact", "system", r"distilling chat history into a structured XML <state_snapshot>"),),
    ),
    HarnessRules(
        name="opencode",
        detect=(Condition(header="user-agent", value=r"^opencode/"),),
        agent_header="x-session-id",
        sub_agent=(Condition(header="x-parent-session-id"),),
        summary=(Condition(marker="opencode-compact", has_tools=False),),
        side=(Condition(marker="opencode-title", has_tools=False),),
        markers=(
            Marker("opencode-compact", "last", r"(?s)<template>.*</template>"),
            Marker("opencode-title", "system", r"(?s)<task>.*<rules>.*<examples>|\btitle generator\b"),
        ),
    ),
    HarnessRules(
        name="mini-swe-agent",
        detect=(Condition(marker="mini-swe-agent"),),
        markers=(Marker("mini-swe-agent", "first_user", r"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),),
    ),
    HarnessRules(
        name="aider",
        detect=(Condition(marker="aider"), Condition(marker="aider-commit")),
        side=(Condition(marker="aider-commit"),),
        summary=(Condition(marker="aider-summary"),),
        markers=(
            Marker("aider", "system", r"\*SEARCH/REPLACE block\*"),
            Marker("aider-commit", "system", r"(?i)generates concise, one-line git commit messages"),
            Marker("aider-summary", "system", r"(?i)\*?briefly\*? summarize this partial conversation"),
        ),
    ),
    HarnessRules(
        name="qwengyre-harness",
        detect=(Condition(marker="qwengyre-main"), Condition(marker="qwengyre-sub-agent")),
        sub_agent=(Condition(marker="qwengyre-sub-agent"),),
        summary=(Condition(marker="qwengyre-compact"),),
        markers=(
            Marker("qwengyre-main", "system", r"^You are a coding agent\. Work in the current folder with the tools\."),
            Marker("qwengyre-sub-agent", "system", r"^You are a sub-agent\. Do this one piece of work with the tools,"),
            Marker("qwengyre-compact", "last", r"^Your context is full\. Summarize what is done and what is left;"),
        ),
    ),
)
"""The harnesses whose traffic was recorded, and the reference harness. The first that is detected is applied."""
