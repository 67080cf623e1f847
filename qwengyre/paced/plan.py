"""What an emulated device takes for everything, on a compressed clock: the script of a paced run.

`qwengyre bench elastic` draws it from a workload, so that the simulator and a run of real processes price the same work alike. Seconds are
real ones, compression applied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError

_CALL: Final = re.compile(r"e(\d+)-(\d+)/(?:a\d+)?c(\d+)")


class PacedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    executions_s: list[list[float]]
    """By group and index: from the start of the harness to its end, on a server that no load slows down."""
    micro_steps_s: list[float]
    """By group: each of its micro-steps on one replica."""
    num_replicas: int = 1
    """Data-parallel replicas in a cell; each computes whole micro-steps."""
    optimizer_s: float
    publish_s: float
    to_training_s: float
    to_rollout_s: float
    num_calls: int
    """Model calls of every execution."""
    decode_share: float
    """Share of an execution's time that is spent in calls; the rest is tools."""

    def __post_init__(self) -> None:
        if min(self.num_calls, self.num_replicas) < 1 or not 0 < self.decode_share < 1:
            raise ValueError("num_calls and num_replicas must be at least 1, and decode_share between 0 and 1")

    @classmethod
    def read(cls, file: str) -> PacedPlan:
        """Raises ConfigError when the file cannot be used."""
        try:
            return msgspec.json.decode(Path(file).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"the plan of the paced engine cannot be read: {error}", file=file, key="engine.paced_plan"
            ) from None

    def call(self, request_id: str) -> PacedCall:
        """What the call of this request takes. Raises ConfigError for an execution that the plan does not have."""
        found = _CALL.match(request_id)
        group, index, number = map(int, found.groups()) if found else (-1, -1, -1)
        if not found or group >= len(self.executions_s) or index >= len(self.executions_s[group]):
            raise ConfigError(f"the plan has no execution for request {request_id!r}", key="engine.paced_plan")
        turn_s = self.executions_s[group][index] / self.num_calls
        number = min(number, self.num_calls - 1)
        return PacedCall(turn_s * self.decode_share, turn_s * (number + 1), number == self.num_calls - 1)


class PacedCall(msgspec.Struct, frozen=True):
    decode_s: float
    """Time of the whole answer."""
    until_s: float
    """When the harness goes on after it, counted from its own start."""
    is_last: bool

    @property
    def text(self) -> str:
        """What the model says: `on 3.250` go on at 3.25 s, or `end 6.500`."""
        return f"{'end' if self.is_last else 'on'} {self.until_s:.3f}"
