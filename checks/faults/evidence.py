"""What a run's journals say about it afterwards: nothing finished was lost, and every recorded token is one that an engine made."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from checks.faults.plan import Noted
from checks.faults.recording_cell import Began, Made
from qwengyre.core.arrays import TOKEN
from qwengyre.gateway.records import Asked, GatewayRecord, Opened, Sampled
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler.commands import Dispatch
from qwengyre.telemetry.folder import RunFolder
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
    sessions: dict[int, Opened] = {}
    next_index: dict[tuple[int, int], int] = {}
    wrong, count = [], 0
    for _, record in read(folder.gateway_journal, GatewayRecord):
        match record:
            case Opened():
                sessions[record.session] = record
            case Asked():
                next_index[record.session, record.call] = record.first_index
            case Sampled():
                call = _call_name(sessions[record.session], record.call)
                for token in np.frombuffer(record.token_ids, TOKEN).tolist():
                    index = next_index[record.session, record.call]
                    next_index[record.session, record.call] += 1
                    count += 1
                    if (token, record.version) not in made.get((call, index), ()):
                        wrong.append((call, index, token, record.version))
    assert wrong == [], f"{len(wrong)} of {count} recorded tokens were not made so: {wrong[:5]}"
    return count


def _call_name(opened: Opened, call: int) -> str:
    attempt = f"a{opened.attempt}" if opened.attempt else ""
    return f"{opened.execution}/{attempt}c{call}"
