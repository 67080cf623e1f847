"""Every error of core/errors.py crosses a wire with its type, its words and its fields."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from qwengyre.core import errors
from qwengyre.core.errors import QwenGyreError
from qwengyre.rpc.refusal import Refused, describe, rebuild

SAMPLES = {
    "str": "some text",
    "int": 7,
    "float": 0.5,
    "str | None": None,
    "int | None": 12,
    "tuple[float, ...]": (0.5, 1.0),
    "tuple[object, ...]": ("CellLost(cell=1)", "Published(version=3)"),
    "object": "draining",
}


def subclasses(kind: type[QwenGyreError]) -> list[type[QwenGyreError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in subclasses(child))]


def example(kind: type[QwenGyreError]) -> QwenGyreError:
    """An instance, each argument by its annotation."""
    if kind.__init__ in (Exception.__init__, QwenGyreError.__init__):
        return kind("what went wrong, and what to do")
    given = list(inspect.signature(kind.__init__).parameters.values())[1:]
    by_position = [SAMPLES[one.annotation] for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]
    return kind(*by_position, **{one.name: SAMPLES[one.annotation] for one in given if one.kind is one.KEYWORD_ONLY})


def crossed(error: QwenGyreError, said_by: str = "") -> QwenGyreError:
    return rebuild(msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error)), type=Refused), said_by)


ALL = sorted(
    {kind for kind in subclasses(QwenGyreError) if kind.__module__.startswith("qwengyre.")}, key=lambda kind: kind.__name__
)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_it_was(kind: type[QwenGyreError]):
    error = example(kind)
    arrived = crossed(error)
    assert type(arrived) is kind and str(arrived) == str(error) and vars(arrived) == vars(error)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_defined_where_rebuild_looks(kind: type[QwenGyreError]):
    assert kind.__module__ == "qwengyre.core.errors"


def test_who_said_it_stands_before_the_message_and_the_fields_stay():
    arrived = crossed(errors.CellFailed(3, "stalled"), "cell 3: Compute: ")
    assert (str(arrived), arrived.cell, arrived.reason) == ("cell 3: Compute: cell 3: stalled", 3, "stalled")


def test_what_is_not_a_plain_value_arrives_as_its_text():
    class State:
        def __str__(self) -> str:
            return "draining"

    assert crossed(errors.IllegalTransition("cell 1", State(), State())).state == "draining"


def test_an_error_that_this_side_does_not_have_keeps_its_words():
    for kind in ("SomethingNewer", "annotations", "QwenGyreErrors"):
        arrived = rebuild(Refused(kind, "odd"))
        assert type(arrived) is QwenGyreError and str(arrived) == "odd"
