"""Random runs with losses at any moment: the invariants hold after every event, the run ends, a replay says the same bytes."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.random_driver import RandomDriver, random_config, replay

NUM_EVENTS = 100_000
"""At least, in one test run."""


def test_invariants_hold_after_every_event_and_every_run_ends_and_replays():
    num_events = 0

    @settings(max_examples=60)
    @given(seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.0, 0.01, 0.05, 0.15]))
    def hold(seed: int, fault_rate: float) -> None:
        nonlocal num_events
        num_events += run_and_replay(seed, fault_rate)

    hold()
    rng = np.random.default_rng(7)
    while num_events < NUM_EVENTS:
        num_events += run_and_replay(int(rng.integers(2**32)), float(rng.choice([0.0, 0.01, 0.05, 0.15])))
    assert num_events >= NUM_EVENTS


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), cap=st.integers(0, 4), fault_rate=st.sampled_from([0.0, 0.02]), data=st.data())
def test_no_group_is_staler_than_the_cap_however_slow_and_out_of_order_executions_are(
    seed: int, cap: int, fault_rate: float, data: st.DataObject
):
    """phi + mu = D + 1, the deepest dispatch that the cap allows: no place may be given away. `validate` looks at each group."""
    rng, mu = np.random.default_rng(seed), data.draw(st.integers(1, cap + 1))
    config = msgspec.structs.replace(
        random_config(rng), steps=8, max_staleness=cap, steps_per_burst=mu, dispatch_depth=float(cap + 1 - mu), slots_per_cell=8,
        groups_per_step=data.draw(st.integers(1, 3)), executions_per_group=1,
    )  # fmt: skip
    RandomDriver(config, rng, fault_rate, end_rate=0.1).run()


def run_and_replay(seed: int, fault_rate: float) -> int:
    """One random run to its end (`RandomDriver.run` checks every invariant); returns its number of events."""
    rng = np.random.default_rng(seed)
    config = random_config(rng)
    driver = RandomDriver(config, rng, fault_rate, num_changes=int(rng.choice([0, 0, 1, 4])))
    driver.run()
    journal = [msgspec.msgpack.encode(event) for event in driver.events]
    assert replay(config, journal) == [msgspec.msgpack.encode(commands) for commands in driver.commands], seed
    return len(driver.events)
