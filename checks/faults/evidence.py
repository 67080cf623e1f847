"""What a run's journals say about it afterwards: nothing finished was lost, and every recorded token is one that an engine made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from checks.faults.plan import Noted
from checks.faults.recording_cell import Began, Made
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler.commands import Dispatch
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.records import GatewayRecord
from tests.integration.run_kit import executions_done

MadeTokens = dict[tuple[str, int], set[tuple[int, int]]]
"""(call, index) -> (token, version), of every life of every cell."""


def notes(path: Path) -> list[Noted]:
    return [msgspec.json.decode(line, type=Noted) for line in path.read_bytes().splitlines()] if path.exists() else []


def num_dispatched(folder: RunFolder) -> int:
    """Executions that were ever dispatched, each once."""
    decided = (record for _, record in read(folder.controller_journal, ControllerRecord) if isinstance(record, Decided))
    groups = {command.group: command.num_executions for d in decided for command in d.commands if isinstance(command, Dispatch)}
    return sum(groups.values())


def expect_nothing_lost(folder: RunFolder) -> None:
    """Every dispatched execution has ended, and has ended once."""
    assert len(executions_done(folder)) == num_dispatched(folder)


def made_tokens(folder: Path) -> MadeTokens:
    found: MadeTokens = {}
    for file in folder.glob("*.jsonl"):
        next_index: dict[str, int] = {}
        for line in file.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue  # a kill cut it; nothing of it was sent
            match msgspec.json.decode(line, type=Began | Made):
                case Began() as began:
                    next_index[began.request] = began.first_index
                case Made() as made:
                    for token in made.token_ids:
                        call = made.request.partition("#")[0]
                        found.setdefault((call, next_index[made.request]), set()).add((token, made.version))
                        next_index[made.request] += 1
    return found


def expect_only_made_tokens(folder: RunFolder, made: MadeTokens) -> int:
    """Each recorded token was made for its call, at its index, under its version. Returns how many there are."""
    wrong, count = [], 0
    for attempt in recorded_attempts(record for part in folder.gateway_journals for _, record in read(part, GatewayRecord)):
        for call in attempt:
            sampled = zip(call.sampled_S.tolist(), call.version_S.tolist(), strict=True)
            for index, (token, version) in enumerate(sampled, call.started.first_index):
                count += 1
                if (token, version) not in made.get((call.id, index), ()):
                    wrong.append((call.id, index, token, version))
    assert wrong == [], f"{len(wrong)} of {count} recorded tokens were not made so: {wrong[:5]}"
    return count
