"""The pages of one execution: its conversation, the tokens of a call, a file that it left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np

from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.core.ids import CallId, ExecutionId
from qwengyre.core.records import Trajectory
from qwengyre.dashboard.call_index import RecordedAttempt
from qwengyre.dashboard.conversation import (
    ShownCall,
    ShownThread,
    Threads,
    TokenReader,
    find_call,
    shown_call,
    trained_tokens,
)
from qwengyre.dashboard.executions import ExecutionEntry
from qwengyre.dashboard.frame import render
from qwengyre.dashboard.kept_files import LOGS, KeptFile, KeptText, list_kept, read_kept
from qwengyre.dashboard.open_run import OpenRun
from qwengyre.dashboard.run_pages import READING_S, frame_of
from qwengyre.dashboard.said import plain_answer, token_texts
from qwengyre.dashboard.tree_rows import short
from qwengyre.dashboard.view import clock
from qwengyre.trajectory.process import execution_rng
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.sampling import chosen_trajectories, sample_trajectories

CALLS_PER_PAGE: Final = 60
"""A page of a few hundred kilobytes for a usual harness."""
FINDING_S: Final = 4.0
"""Longest time that the controller's journal is read for an execution that somebody names: without its entry there is no page."""
SHADES: Final = (0.9, 0.7, 0.45, 0.2, 0.05)
"""Probabilities below which a token is drawn one shade darker."""


class ShownToken(msgspec.Struct, frozen=True):
    number: int
    token: int
    text: str
    logprob: float
    version: int
    is_trained: bool
    is_new_version: bool

    @property
    def probability(self) -> float:
        return math.exp(min(0.0, self.logprob))

    @property
    def shade(self) -> int:
        return sum(self.probability < bound for bound in SHADES)


class TrainedTokens(msgspec.Struct, frozen=True):
    """What was trained of an execution. `trained` is None while that is not known, `advantage` while its group runs."""

    advantage: float | None
    trained: dict[CallId, np.ndarray] | None
    step: int | None
    num_trajectories: int = 0


def execution_page(run: OpenRun, name: str, given: Mapping[str, str]) -> str:
    entry = find_entry(run, name)
    with run.lock:
        attempts = run.calls.attempts(entry.execution)
        group = run.table.groups[entry.group]
        members = [one.execution for one in run.table.members(entry.group)]
    attempt = _number(given.get("attempt"), entry.attempt)
    recorded, share, problem = _recorded(run, entry, attempt)
    place = members.index(entry.execution)
    values: dict[str, Any] = {
        "entry": entry,
        "group": group,
        "attempt": attempt,
        "attempts": attempts or [entry.attempt],
        "before": members[place - 1] if place else "",
        "after": members[place + 1] if place + 1 < len(members) else "",
        "share": share,
        "problem": problem,
        "advantage": None,
        **_kept(run, entry, attempt),
    }
    training = TrainedTokens(None, None, None)
    conversation: dict[str, Any] = {"threads": [], "shown": [], "page": 1, "num_pages": 1, "thread_links": {}}
    if recorded is not None:
        training = _training(run, entry, recorded)
        conversation = _conversation(run, recorded, training, given)
        values["advantage"] = training.advantage
    frame = frame_of(run, "Executions", crumbs=_crumbs(run, entry), live=entry.ended_at is None)
    return render(
        "execution.html",
        **frame | ({"live_s": 1} if share < 1 else {}),
        **values,
        **conversation,
        facts=_facts(entry, training, recorded),
    )


def tokens_page(run: OpenRun, name: str, call_name: str, given: Mapping[str, str]) -> str:
    entry = find_entry(run, name)
    recorded, _, problem = _recorded(run, entry, _number(given.get("attempt"), entry.attempt))
    call = find_call(recorded.tree, call_name) if recorded is not None else None
    if recorded is None or call is None:
        raise ConfigError(problem or f"{name} has no call {call_name}", file=run.name)
    trained = (_training(run, entry, recorded).trained or {}).get(call.id, np.zeros(call.num_sampled, bool))
    reader = _reader(run)
    ids, versions = call.sampled_S.tolist(), call.version_S.tolist()
    numbers = zip(ids, token_texts(ids, reader.decode), call.logprob_S.tolist(), versions, trained.tolist(), strict=True)
    tokens = [
        ShownToken(at, token, text, logprob, version, is_trained, at > 0 and version != versions[at - 1])
        for at, (token, text, logprob, version, is_trained) in enumerate(numbers)
    ]
    crumbs = [*_crumbs(run, entry, linked=True), (call_name, "")]
    return render(
        "tokens.html", **frame_of(run, "Executions", crumbs=crumbs, live=False), entry=entry, call=call_name, tokens=tokens
    )


def file_page(run: OpenRun, name: str, given: Mapping[str, str]) -> str:
    entry, path = find_entry(run, name), given.get("path", "")
    text = read_kept(_kept_folder(run, entry, _number(given.get("attempt"), entry.attempt)), path)
    crumbs = [*_crumbs(run, entry, linked=True), (path, "")]
    return render("file.html", **frame_of(run, "Executions", crumbs=crumbs, live=False), path=path, text=text)


def find_entry(run: OpenRun, name: str) -> ExecutionEntry:
    """Raises ConfigError when the run has no such execution."""
    with run.lock:
        is_read = run.table.refresh(FINDING_S)
        entry = run.table.executions.get(ExecutionId(name))
    if entry is None:
        more = "" if is_read else " yet: its journal is still being read, try again in a moment"
        raise ConfigError(f"there is no execution {name!r} in this run{more}", file=run.name)
    return entry


def _crumbs(run: OpenRun, entry: ExecutionEntry, *, linked: bool = False) -> list[tuple[str, str]]:
    base = f"/run/{quote(run.name)}/executions"
    return [("executions", base), (entry.execution, f"{base}/{quote(entry.execution)}" if linked else "")]


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 9 else default


def _recorded(run: OpenRun, entry: ExecutionEntry, attempt: int) -> tuple[RecordedAttempt | None, float, str]:
    """What was recorded of it, the share of the journal that was read, and what stands in the way."""
    try:
        found = run.attempt(entry.execution, attempt, READING_S)
    except QwenGyreError as error:
        return None, 1.0, str(error)
    with run.lock:
        share = run.calls.share_read if found is None or not found.is_closed else 1.0
    return found, share, ""


def _reader(run: OpenRun) -> TokenReader:
    """Token numbers in place of text where the run has no tokenizer."""
    if run.reader is not None:
        return run.reader

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    return TokenReader(decode, plain_answer(decode), None)


def _training(run: OpenRun, entry: ExecutionEntry, recorded: RecordedAttempt) -> TrainedTokens:
    """As it was trained, by the journal of that; before, as it would be: the choice depends on the seed and the execution alone."""
    with run.lock:
        run.trained.refresh()
        parts = run.trained.find(entry.execution) if entry.attempt == recorded.opened.attempt else []
        advantage = run.table.advantage(entry.execution, divide_by_std=bool(run.trajectory.divide_by_std))
    trajectories: tuple[Trajectory, ...] = ()
    if parts:
        trajectories = tuple(chosen for part in parts for chosen in part.execution.trajectories)
        trained = trained_tokens(recorded.tree, trajectories)
        return TrainedTokens(parts[0].execution.advantage, trained, parts[0].step, len(trajectories))
    if entry.kind != "train" or advantage is None:
        is_over = entry.kind != "train" and entry.ended_at is not None
        return TrainedTokens(None, {} if is_over else None, None)
    if advantage or run.trajectory.keep_zero_advantage:
        roles = assign_roles(recorded.tree.calls, run.rules)
        judgement = run.table.groups[entry.group].judgement
        choice = judgement.choices[entry.index] if judgement is not None else None
        if choice is not None:
            trajectories = chosen_trajectories(recorded.tree, roles, choice)
        else:
            rng = execution_rng(run.seed, entry.execution)
            trajectories = sample_trajectories(recorded.tree, roles, j_max=run.trajectory.max_trajectories, rng=rng)
    return TrainedTokens(advantage, trained_tokens(recorded.tree, trajectories), None, len(trajectories))


def _conversation(run: OpenRun, recorded: RecordedAttempt, training: TrainedTokens, given: Mapping[str, str]) -> dict[str, Any]:
    """The calls of one page: the one that is asked for, or that which holds the call that is asked for."""
    roles = assign_roles(recorded.tree.calls, run.rules)
    threads, reader = Threads(recorded.tree, roles), _reader(run)
    shown_threads = threads.shown()
    places = [(number, call) for number, line in enumerate(threads.lines) for call in line]
    num_pages = max(1, math.ceil(len(places) / CALLS_PER_PAGE))
    named = next((at for at, (_, call) in enumerate(places) if short(call.id) == given.get("call")), None)
    page = _number(given.get("page"), 1) if named is None else named // CALLS_PER_PAGE + 1
    page = min(max(1, page), num_pages)
    shown: list[tuple[ShownThread, list[ShownCall]]] = []
    for number, call in places[(page - 1) * CALLS_PER_PAGE : page * CALLS_PER_PAGE]:
        if not shown or shown[-1][0].number != number:
            shown.append((shown_threads[number], []))
        shown[-1][1].append(shown_call(threads, call, training.trained, reader))
    links, first = {}, 0
    for number, line in enumerate(threads.lines):
        on_page = first // CALLS_PER_PAGE + 1
        there = f"?page={on_page}&attempt={recorded.opened.attempt}" if on_page != page else ""
        links[number] = f"{there}#thread-{number}"
        first += len(line)
    return {"threads": shown_threads, "shown": shown, "page": page, "num_pages": num_pages, "thread_links": links}


def _facts(entry: ExecutionEntry, training: TrainedTokens, recorded: RecordedAttempt | None) -> list[tuple[str, str, str]]:
    reward = "-" if entry.counted_reward is None else f"{entry.counted_reward:.2f}"
    if training.advantage is None:
        learned = ("Advantage", "-", "its group has not ended" if entry.kind == "train" else "evaluations are not trained")
    else:
        num = int(sum(flags.sum() for flags in (training.trained or {}).values()))
        what = f"{num:,} tokens in {training.num_trajectories} trajector{'y' if training.num_trajectories == 1 else 'ies'}"
        learned = ("Advantage", f"{training.advantage:+.3f}", what if num else "nothing of it is trained")
    num_calls = len(recorded.tree.calls) if recorded is not None else entry.num_calls
    agents = ", ".join(
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((entry.sub_agents, "sub-agent"), (entry.compactions, "compaction"))
        if count
    )
    distinct = f"{entry.num_distinct:,} distinct in its tree" if entry.num_distinct is not None else ""
    return [
        ("Reward", reward, entry.validity if entry.reward is not None else "not scored yet"),
        learned,
        ("Calls", "-" if num_calls is None else str(num_calls), agents),
        ("Tokens sampled", "-" if entry.num_tokens is None else f"{entry.num_tokens:,}", distinct),
        ("Time", "-" if entry.seconds is None else f"{entry.seconds:.1f} s", f"began at {clock(entry.started_at)}"),
    ]


def _kept_folder(run: OpenRun, entry: ExecutionEntry, attempt: int) -> Path:
    return run.folder.workspaces / f"{entry.execution}.{attempt}"


def _kept(run: OpenRun, entry: ExecutionEntry, attempt: int) -> dict[str, Any]:
    folder = _kept_folder(run, entry, attempt)
    files = list_kept(folder)
    names = {file.path for file in files}
    logs: list[tuple[str, str, KeptText]] = []
    for name, title in LOGS:
        if name in names:
            text = read_kept(folder, name)
            if text.num_bytes and not text.is_binary:
                logs.append((name, title, text))
    kept: list[KeptFile] = [file for file in files if file.path.startswith("workspace/")]
    return {"kept": kept, "logs": logs, "kept_name": folder.name}
