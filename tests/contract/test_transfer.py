"""What every transport must do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.api import Exposure, Transport
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmTransport, cleanup
from qwengyre.transfer.transports import open_transport
from qwengyre.transfer.tree import hold, let_go

OWNER = """
import sys, msgspec, numpy as np
from qwengyre.transfer.transports import open_transport
from qwengyre.transfer.config import TransferConfig
transport = open_transport(TransferConfig(transport=sys.argv[1]), prefix=sys.argv[2])
arrays = {"weights": np.arange(300_000, dtype=np.float32), "empty": np.zeros((0, 4), np.float32)}
sys.stdout.buffer.write(msgspec.json.encode(transport.expose(arrays, version=5, incarnation=2)) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


KINDS = ["shm", "tcp", *(["mooncake"] if find_spec("mooncake") else [])]
"""`make test-mooncake` installs the third."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def transport(kind: str, prefix: str) -> Iterator[Transport]:
    made = make(kind, prefix)
    yield made
    made.close()


def make(kind: str, prefix: str) -> Transport:
    return open_transport(msgspec.convert({"transport": kind, "deadline_s": 10}, TransferConfig), prefix=prefix)


def arrays() -> dict[str, np.ndarray]:
    return {
        "float": np.linspace(0, 1, 1000, dtype=np.float32).reshape(10, 100),
        "int": np.arange(7, dtype=np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "bytes": np.frombuffer(b"qwengyre", np.uint8),
        "transposed": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    }


def test_a_view_shows_what_was_exposed_and_outlives_its_release(transport, kind):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    view = transport.view(exposure)
    transport.release(exposure)
    assert (view is not None) == (kind == "shm")
    if view is None:
        return
    for name, array in arrays().items():
        np.testing.assert_array_equal(view[name], array)
        assert not view[name].flags.writeable
    with pytest.raises(StaleRead):
        transport.view(exposure)


def test_a_stale_view_is_refused(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    if transport.view(exposure) is None:
        return
    later = msgspec.structs.replace(exposure.regions[-1], offset=1 << 20)
    for wrong in ({"version": 4}, {"incarnation": 2}, {"regions": (*exposure.regions, later)}):
        with pytest.raises(StaleRead):
            transport.view(msgspec.structs.replace(exposure, **wrong))


def test_what_is_read_is_what_was_exposed(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    read = transport.read(exposure)
    assert list(read) == list(arrays())
    for name, array in arrays().items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
        assert read[name].flags.writeable


def test_an_exposure_survives_the_control_plane(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(exposure), type=Exposure)
    np.testing.assert_array_equal(transport.read(told)["int"], arrays()["int"])


def test_reading_into_some_arrays_touches_those_alone(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    target = np.zeros(7, np.int64)
    assert list(transport.read(exposure, {"int": target})) == ["int"]
    np.testing.assert_array_equal(target, arrays()["int"])


@pytest.mark.parametrize(
    "target",
    [
        {"int": np.zeros(8, np.int64)},
        {"int": np.zeros(7, np.int32)},
        {"int": np.zeros(14, np.int64)[::2]},
        {"unknown": np.zeros(1)},
    ],
)
def test_a_destination_that_does_not_fit_is_refused(transport, target):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    with pytest.raises(TransferError):
        transport.read(exposure, target)


def test_a_region_can_be_gathered_from_pieces_and_scattered_to_others(transport):
    whole = np.arange(3000 * 4, dtype=np.float32).reshape(3000, 4)
    exposure = transport.expose(
        {"x": [whole[:1], whole[1:1], *np.split(whole[1:], 2999)], "y": np.arange(3)}, version=3, incarnation=1
    )
    np.testing.assert_array_equal(transport.read(exposure)["x"], whole)
    target = np.zeros((6000, 4), np.float32)
    transport.read(exposure, {"x": [target[2 * row : 2 * row + 1] for row in range(3000)]})
    np.testing.assert_array_equal(target[::2], whole)
    assert not target[1::2].any()
    for wrong in ([target[:1]], [target[:2999], np.zeros((1, 4), np.float64)], [target[:2999], np.zeros((1, 5), np.float32)]):
        with pytest.raises(TransferError):
            transport.read(exposure, {"x": wrong})


def test_another_version_or_epoch_is_stale(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    for other in ({"version": 4}, {"incarnation": 2}):
        with pytest.raises(StaleRead):
            transport.read(msgspec.structs.replace(exposure, **other))


def test_bytes_change_under_a_new_version_only(transport):
    exposure = transport.expose({"x": np.zeros(5, np.float32)}, version=1, incarnation=1)
    transport.begin_write(exposure)
    with pytest.raises(StaleRead):
        transport.read(exposure)
    transport.buffers(exposure)["x"][:] = 7
    newer = transport.republish(exposure, version=2)
    np.testing.assert_array_equal(transport.read(newer)["x"], np.full(5, 7, np.float32))
    with pytest.raises(StaleRead):
        transport.read(exposure)


def test_reserved_memory_is_fenced_until_it_is_filled(transport):
    exposure = transport.reserve(arrays(), version=3, incarnation=1)
    with pytest.raises(StaleRead):
        transport.read(exposure)
    for name, buffer in transport.buffers(exposure).items():
        np.copyto(buffer, arrays()[name])
    np.testing.assert_array_equal(transport.read(transport.republish(exposure, version=3))["int"], arrays()["int"])


def test_released_memory_cannot_be_read(transport):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    transport.release(exposure)
    transport.release(exposure)
    with pytest.raises(StaleRead):
        transport.read(exposure)
    with pytest.raises(TransferError):
        transport.buffers(exposure)


def test_who_has_read_serves_it_on_when_the_owner_has_gone_and_of_all_ranks(transport, kind, prefix):
    reader, last = make(kind, prefix), make(kind, prefix)
    rank = transport.expose({"shard": np.arange(5)}, version=3, incarnation=1)
    exposure = msgspec.structs.replace(transport.expose(arrays(), version=3, incarnation=1), others=(rank,))
    held = hold(reader, exposure)
    for part in (exposure, rank):
        transport.release(part)
    assert (held.version, held.incarnation, held.regions) == (3, 1, exposure.regions)
    for name, array in last.read(held).items():
        np.testing.assert_array_equal(array, arrays()[name])
    np.testing.assert_array_equal(last.read(held.others[0])["shard"], np.arange(5))
    let_go(reader, held)
    with pytest.raises(StaleRead):
        last.read(held)
    with pytest.raises(StaleRead):
        hold(last, held)
    for each in (reader, last):
        each.close()


def test_only_the_owner_writes(transport, kind, prefix):
    exposure = transport.expose(arrays(), version=3, incarnation=1)
    other = make(kind, prefix)
    for forbidden in (other.buffers, other.begin_write):
        with pytest.raises(TransferError):
            forbidden(exposure)
    other.release(exposure)
    other.close()
    np.testing.assert_array_equal(transport.read(exposure)["int"], arrays()["int"])


def test_no_read_under_concurrent_updates_is_torn(transport, kind, prefix):
    size, num_updates = 60_000, 300
    latest = [transport.expose({"x": np.zeros(size, np.int64), "y": np.zeros(size, np.int64)}, version=0, incarnation=1)]
    failures: list[str] = []
    reads = {"good": 0, "stale": 0}
    stop = threading.Event()

    def read_on() -> None:
        reader = make(kind, prefix)
        while not stop.is_set():
            exposure = latest[0]
            try:
                got = reader.read(exposure)
            except StaleRead:
                reads["stale"] += 1
                continue
            reads["good"] += 1
            if not (np.all(got["x"] == exposure.version) and np.all(got["y"] == exposure.version)):
                failures.append(f"version {exposure.version} read as {np.unique(got['x'])}, {np.unique(got['y'])}")
        reader.close()

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in readers:
        thread.start()
    for version in range(1, num_updates):
        transport.begin_write(latest[0])
        for buffer in transport.buffers(latest[0]).values():
            buffer[:] = version
        latest[0] = transport.republish(latest[0], version=version)
    stop.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert np.all(transport.read(latest[0])["x"] == num_updates - 1)


def start_owner(kind: str, prefix: str) -> tuple[subprocess.Popen[bytes], Exposure]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, prefix], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    return owner, msgspec.json.decode(owner.stdout.readline(), type=Exposure)


def end(owner: subprocess.Popen[bytes]) -> None:
    owner.kill()
    owner.communicate()


def test_another_process_is_read_while_it_waits_for_something_else(kind, prefix):
    owner, exposure = start_owner(kind, prefix)
    reader = make(kind, prefix)
    try:
        read = reader.read(exposure)
        np.testing.assert_array_equal(read["weights"], np.arange(300_000, dtype=np.float32))
        assert read["empty"].shape == (0, 4)
    finally:
        reader.close()
        end(owner)


def test_an_owner_that_was_killed_gives_whole_bytes_or_an_error(kind, prefix):
    owner, exposure = start_owner(kind, prefix)
    reader = make(kind, prefix)
    results: list[object] = []

    def read_on() -> None:
        try:
            for _ in range(400):
                results.append(bool(np.all(reader.read(exposure)["weights"] == np.arange(300_000, dtype=np.float32))))
        except TransferError as error:
            results.append(error)

    thread = threading.Thread(target=read_on)
    thread.start()
    while not results:
        thread.join(0.001)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    thread.join()
    reader.close()
    assert all(result is True for result in results if not isinstance(result, TransferError))
    if kind != "shm":
        assert isinstance(results[-1], TransferError)
    else:
        assert cleanup(prefix) == 1
        with pytest.raises(StaleRead):
            ShmTransport(prefix).read(exposure)
