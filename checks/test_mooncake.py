"""The Mooncake transport beyond the contract of all transports. `make test-mooncake` installs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.mooncake import MooncakeTransport, hcas
from qwengyre.transfer.transports import open_transport

OWNER = """
import sys, msgspec, numpy as np
from qwengyre.transfer.mooncake import MooncakeTransport
transport = MooncakeTransport()
sys.stdout.buffer.write(msgspec.json.encode(transport.expose({"x": np.arange(1_000_000)}, version=1, incarnation=0)) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_rdma_without_an_hca_refuses_to_start():
    assert not hcas(), "this host has an HCA: run the contract tests over it instead"
    with pytest.raises(TransferError, match="no HCA"):
        open_transport(TransferConfig(transport="mooncake", mooncake_protocol="rdma"), prefix="unused")


def test_memory_that_is_taken_again_is_not_taken_for_what_was_released():
    transport = MooncakeTransport()
    first = transport.expose({"x": np.arange(5)}, version=1, incarnation=0)
    transport.release(first)
    others = [transport.expose({"x": np.arange(5)}, version=1, incarnation=0) for _ in range(8)]
    with pytest.raises(StaleRead):
        transport.read(first)
    np.testing.assert_array_equal(transport.read(others[-1])["x"], np.arange(5))
    transport.close()


def test_an_owner_that_is_stopped_is_a_transfer_error_and_can_be_read_again():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    exposure = msgspec.json.decode(owner.stdout.readline(), type=Exposure)
    reader = MooncakeTransport()
    np.testing.assert_array_equal(reader.read(exposure)["x"], np.arange(1_000_000))
    os.kill(owner.pid, signal.SIGSTOP)
    with pytest.raises(TransferError):
        reader.read(exposure)
    os.kill(owner.pid, signal.SIGCONT)
    np.testing.assert_array_equal(reader.read(exposure)["x"], np.arange(1_000_000))
    reader.close()
    owner.kill()
    owner.communicate()
