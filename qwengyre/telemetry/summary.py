"""summary.json: the outcome of a run in numbers, for programs. Rewritten at every step, never half written."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from qwengyre.core.errors import JournalError, JournalFull


class Summary(msgspec.Struct, kw_only=True):
    """Scores are means over held-out tasks; None until measured. Counts are of the whole run, resumes included."""

    score_before: float | None = None
    """At version 0, at the training temperature."""
    score_after: float | None = None
    """At the last version evaluated, same temperature and limits."""
    greedy_before: float | None = None
    """At version 0, at temperature 0."""
    greedy_after: float | None = None
    steps: int = 0
    """Optimizer steps done."""
    minutes: float = 0.0
    """On the run's clock."""
    peak_rss_gb: float = 0.0
    """Largest sampled sum of PSS over all processes of the run, in 1e9 bytes."""
    switches_to_training: int = 0
    """Cells that changed from rollout to training."""
    switches_to_rollout: int = 0
    calls_moved: int = 0
    """Calls that changed the server in mid-generation."""
    tokens_recomputed_after_move: int = 0
    """Prefix tokens that a destination computed again: 0 when every move brought its KV."""
    tokens_recomputed_at_publish: int = 0
    """Tokens of running calls whose KV was computed again under new weights."""
    steps_that_taught_nothing: int = 0
    """Steps from which the policy learned nothing: all scores of every group were equal, or all was clipped, or nothing was applied."""
    note: str = ""
    """Why, and what to look at. Empty when it learned from every step."""
    clip_fraction: float = 0.0
    """Share of trained trajectories whose gradient the objective clipped away, over the run."""
    joins_mid_step: int = 0
    """Satellites that joined a running step."""
    compactions: int = 0
    """Summaries that a harness went on from, in finished executions."""
    sub_agents: int = 0
    timeouts_scored: int = 0
    """Executions that ran into the harness timeout and whose workspace scored above 0."""
    executions_finished: int = 0
    executions_lost: int = 0
    """Executions that a dead process took along; they were dispatched again."""
    max_logprob_gap: float | None = None
    """Engine against trainer over all trained tokens, each span under its own version. None until audited."""
    staleness_mean: float = 0.0
    """Steps between dispatch and training, over trained groups."""
    staleness_max: int = 0
    idle_share: float = 0.0
    """Share of the cells' time in which they neither generated, trained nor changed role."""


def write_summary(path: str | Path, summary: Summary) -> None:
    """Replace the file as a whole: a reader sees the old or the new one. Raises JournalFull when there is no room for it."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise JournalFull(str(path), num_bytes=len(data), reason=error.strerror or str(error)) from error


def read_summary(path: str | Path) -> Summary | None:
    """None when the run has not written one yet. Raises JournalError when it was damaged afterwards."""
    path = Path(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary) if path.exists() else None
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}: not a summary of a run ({error}). Remove it: the next step writes a new one") from error
