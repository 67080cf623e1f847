"""What each policy does, in words that other code asks for, so that nothing asks for a policy's name."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

PolicyName = Literal["elastic", "colocate", "async"]


class Traits(NamedTuple):
    switches: bool = True
    """Cells change role. Without: the first `training_cells` train from the start to the end, the others never do."""
    leaves_one_by_one: bool = False
    """At most one cell is on its way to training."""
    streams: bool = False
    """Trains on groups as they get ready, unless `streaming` says otherwise."""


TRAITS: Final[dict[PolicyName, Traits]] = {
    "elastic": Traits(leaves_one_by_one=True, streams=True),
    "colocate": Traits(),
    "async": Traits(switches=False),
}
