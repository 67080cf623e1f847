"""What a client can cost before its request is known."""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.server import ServerState

from qwengyre.gateway.listener import HEAD_DEADLINE_S, IDLE_DEADLINE_S, PatientProtocol


class Loop:
    """Keeps what is to be called later; creates no task."""

    def __init__(self):
        self.later = []

    def call_later(self, delay, call, *arguments):
        handle = asyncio.TimerHandle(delay, call, arguments, self)
        self.later.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle):
        self.later.remove(handle)

    def get_debug(self):
        return False

    def create_task(self, coroutine):
        coroutine.close()
        return asyncio.Future(loop=self)


class Transport(asyncio.Transport):
    is_closed = False

    def close(self):
        self.is_closed = True

    def get_extra_info(self, name, default=None):
        return default


def connected() -> tuple[PatientProtocol, Loop, Transport]:
    config = uvicorn.Config(lambda scope: None, lifespan="off", log_config=None)
    config.load()
    loop, transport = Loop(), Transport()
    protocol = PatientProtocol(config, ServerState(), {}, loop)
    protocol.connection_made(transport)
    return protocol, loop, transport


def test_head_that_does_not_end_holds_no_socket():
    protocol, loop, transport = connected()
    (idle,) = loop.later  # a client may connect early and say nothing
    assert idle.when() == IDLE_DEADLINE_S
    for part in (b"POST /v1/messages HTTP/1.1\r\n", b"host: x\r\n", b"x-slow: "):
        protocol.data_received(part)
    (deadline,) = loop.later
    assert deadline.when() == HEAD_DEADLINE_S
    deadline._run()
    assert transport.is_closed


def test_a_connection_without_a_request_holds_no_socket_for_ever():
    protocol, loop, transport = connected()
    (idle,) = loop.later
    idle._run()
    assert transport.is_closed
    protocol.connection_lost(None)
    assert loop.later == []


def test_head_that_ends_is_given_all_the_time_of_its_call():
    protocol, loop, transport = connected()
    protocol.data_received(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n")
    assert len(loop.later) == 1
    protocol.data_received(b"content-length: 2\r\n\r\n")
    assert loop.later == [] and not transport.is_closed
