"""Read the score that an evaluator wrote: bounded in size, strict in form. Anything else is a failure, never a score."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import msgspec

from qwengyre.core.errors import EvaluatorFailed

MAX_REWARD_BYTES = 64 * 1024  # a number takes a few bytes, and reward.json some more


def read_reward(folder: Path, low: float = 0.0, high: float = 1.0) -> float:
    """The score in `reward.txt`, else in `reward.json`, of the verifier log folder.

    reward.txt holds one number. reward.json holds one number, or an object with a number at `reward`, or with exactly one number.
    Raises EvaluatorFailed when there is no such file, or no finite number in [low, high].
    """
    for name, parse in (("reward.txt", _parse_text), ("reward.json", _parse_json)):
        data = _read(folder / name)
        if data is None:
            continue
        value = parse(data)
        if not math.isfinite(value):
            raise EvaluatorFailed(f"{name} holds {value}, which is not a score")
        if not low <= value <= high:
            raise EvaluatorFailed(
                f"{name} holds {value}, outside [{low:g}, {high:g}]; a task with other scores sets reward_range in [metadata]"
            )
        return value
    raise EvaluatorFailed("the evaluator wrote neither reward.txt nor reward.json into the verifier log folder")


def _read(path: Path) -> bytes | None:
    """Contents of a regular file; None when there is none. No link is followed, no pipe waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluatorFailed(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise EvaluatorFailed(f"{path.name} is not a regular file")
        if found.st_size > MAX_REWARD_BYTES:
            raise EvaluatorFailed(f"{path.name} has {found.st_size:,} bytes; at most {MAX_REWARD_BYTES:,} are read")
        return os.read(fd, MAX_REWARD_BYTES)
    finally:
        os.close(fd)


def _parse_text(data: bytes) -> float:
    try:
        text = data.decode("ascii").strip()
        if "_" not in text:
            return float(text)
    except ValueError:
        pass
    raise EvaluatorFailed(f"reward.txt holds {data[:60]!r}, which is not a number")


def _parse_json(data: bytes) -> float:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise EvaluatorFailed(f"reward.json is not JSON: {error}") from None
    if isinstance(value, dict):
        numbers = [item for item in value.values() if _is_number(item)]
        value = value["reward"] if "reward" in value else numbers[0] if len(numbers) == 1 else None
    if not _is_number(value):
        raise EvaluatorFailed("reward.json must hold a number, or an object with a number at `reward` or with exactly one number")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
