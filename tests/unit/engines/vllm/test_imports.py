from __future__ import annotations

import numpy as np

from qwengyre.engines.api import KVHandle
from qwengyre.engines.vllm.imports import Imports, NamedImport
from qwengyre.transfer.api import Exposure


def handle(name: str, *, num_bytes: int = 10) -> KVHandle:
    return KVHandle(name, Exposure("shm", name, (), 0, 0, num_bytes), 4, "layout", 0)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_the_import_that_knows_most_is_named():
    imports = Imports(100)
    imports.add(handle("a"), tokens(1, 2, 3, 4))
    imports.add(handle("b"), tokens(1, 2, 5))
    assert imports.name_longest(tokens(1, 2, 5, 6)) == NamedImport("b", 3)
    assert imports.name_longest(tokens(1, 2, 3)) == NamedImport("a", 3)
    assert imports.name_longest(tokens(9)) is None


def test_only_the_call_that_takes_all_of_it_uses_an_import_up():
    imports = Imports(100)
    imports.add(handle("a"), tokens(1, 2, 3, 4))
    shares = imports.name_longest(tokens(1, 2, 9))
    moved = imports.name_longest(tokens(1, 2, 3, 4, 5))
    assert imports.started(shares) == []
    assert imports.started(moved) == ["a"]
    assert imports.name_longest(tokens(1, 2)) is None


def test_an_import_stays_for_calls_that_have_named_it():
    imports = Imports(100)
    imports.add(handle("a"), tokens(1, 2, 3, 4))
    first, second = imports.name_longest(tokens(1, 2, 3, 4)), imports.name_longest(tokens(1, 2))
    assert imports.started(first) == []
    assert imports.name_longest(tokens(1, 2)) is None
    assert imports.given_up(second) == ["a"]


def test_the_oldest_is_forgotten_when_there_are_too_many_bytes():
    imports = Imports(25)
    assert imports.add(handle("a"), tokens(1)) == []
    assert imports.add(handle("b"), tokens(2)) == []
    assert imports.add(handle("c"), tokens(3)) == ["a"]
    waited_for = imports.name_longest(tokens(2))
    assert imports.add(handle("d", num_bytes=99), tokens(4)) == ["c"]
    assert imports.has("b") and imports.has("d")
    assert imports.given_up(waited_for) == ["b"]


def test_after_clear_calls_that_had_named_something_change_nothing():
    imports = Imports(100)
    imports.add(handle("a"), tokens(1, 2))
    named = imports.name_longest(tokens(1, 2))
    imports.clear()
    assert imports.started(named) == []
