"""Hold and continue: the calls of a leaving server go on at another one, and their KV with them. Clients notice a pause.

    hold new calls -> stop the running ones, keep their tokens -> pin KV at the source -> read it at the destination
    -> confirm, unpin -> route -> every call goes on from its last token

A source that is dead moves nothing: its calls are held, and go on from their tokens wherever they are routed.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from qwengyre.core.errors import EngineError, TransferError
from qwengyre.core.ids import ServerId
from qwengyre.engines.api import Serving
from qwengyre.gateway.call import LiveCall
from qwengyre.gateway.control_api import MoveCalls, Moved
from qwengyre.gateway.gateway import Execution, Gateway

log = logging.getLogger(__name__)
ABORT_AGAIN_S = 2.0  # what still runs then is aborted once more
STOP_DEADLINE_S = 30.0  # at most, and never more than half of what the whole move may take
MAX_CONTEXTS = 8
"""Contexts of one execution whose KV is moved, the latest first."""
CONCURRENT_TRANSFERS = 4  # exports and reads overlap, and all share one link


class _Count:
    def __init__(self) -> None:
        self.calls = self.contexts = self.tokens = self.recomputed = self.kv_bytes = 0


async def move(gateway: Gateway, asked: MoveCalls) -> Moved:
    """Take the executions of `asked` off its source and to their destinations; None holds them until a route comes.

    Executions that are closed meanwhile are passed over.
    """
    began = asyncio.get_running_loop().time()
    leaving = [(gateway.executions[execution], to) for execution, to in asked.moves.items() if execution in gateway.executions]
    for execution, _ in leaving:
        execution.route.set(None)
    engine = gateway.engine(asked.source)
    running = [call for execution, _ in leaving for call in execution.live.values() if call.server == asked.source]
    count = _Count()
    await _stop(engine, running, min(STOP_DEADLINE_S, asked.deadline_s / 2))
    count.calls = sum(_goes_elsewhere(execution, to, asked.source, call) for execution, to in leaving for call in running)
    transfers = asyncio.Semaphore(CONCURRENT_TRANSFERS)
    try:
        async with asyncio.timeout_at(began + asked.deadline_s), asyncio.TaskGroup() as tasks:
            for execution, to in leaving:
                destination = gateway.engine(to) if to is not None else None
                tasks.create_task(_carry(execution, running, engine, destination, transfers, count))
    except TimeoutError:
        log.warning("move_took_too_long", extra={"source": asked.source, "deadline_s": asked.deadline_s})
    finally:  # whatever becomes of the KV, the calls go on
        for execution, to in leaving:
            if execution.route.server is None:
                execution.route.set(to)
    gateway.stats.tokens_moved += count.tokens
    moved = Moved(
        calls_moved=count.calls,
        contexts_moved=count.contexts,
        tokens_moved=count.tokens,
        tokens_recomputed=count.recomputed,
        kv_bytes=count.kv_bytes,
        seconds=asyncio.get_running_loop().time() - began,
    )
    log.info("calls_moved", extra={"source": asked.source, **msgspec.structs.asdict(moved)})
    return moved


def _goes_elsewhere(execution: Execution, to: ServerId | None, source: ServerId, call: LiveCall) -> bool:
    """Whether a call that was stopped has more to generate, and on another server: its last tokens may have ended it."""
    is_its_own = execution.live.get(call.tokens.number) is call
    return is_its_own and to not in (None, source)


async def _stop(engine: Serving | None, running: list[LiveCall], deadline_s: float) -> None:
    """Stop calls and wait for their last tokens. An engine that is gone ends their streams by itself."""
    for call in running:
        call.stop_for_move()
    try:
        async with asyncio.timeout(deadline_s):
            left = running
            while left and engine is not None:
                await engine.abort([call.request_id for call in left])
                waiting = [asyncio.ensure_future(call.wait_parked()) for call in left]
                await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
                left = [call for call, parked in zip(left, waiting, strict=True) if not parked.done()]
                for parked in waiting:
                    parked.cancel()
    except (EngineError, OSError, TimeoutError) as error:
        log.warning("source_does_not_stop_calls", extra={"reason": str(error), "num_calls": len(running)})


async def _carry(
    execution: Execution,
    running: list[LiveCall],
    source: Serving | None,
    destination: Serving | None,
    transfers: asyncio.Semaphore,
    count: _Count,
) -> None:
    """Carry the KV of an execution's contexts: running calls first, then where each path ended."""
    session = execution.session
    live = {call.tokens.number: call for call in running if call.tokens.number in execution.live}
    if source is None or destination is None:
        return
    for number in execution.contexts(live.keys())[:MAX_CONTEXTS]:
        async with transfers:
            exported, imported = await _carry_row(source, destination, session.calls.sequence(number).tobytes(), count)
        if number in live and exported is not None:
            live[number].exported(exported)
            count.recomputed += max(0, exported - imported)


async def _carry_row(source: Serving, destination: Serving, row: bytes, count: _Count) -> tuple[int | None, int]:
    """Carry the KV of one row; return how many tokens the source had (None if it did not say), and the destination has now.

    Nothing is said to a source when the deadline of the move cuts this short: its own deadline for pinned KV frees it.
    """
    exported: int | None = None
    try:
        handle = await source.export_kv(row)
        exported = handle.num_tokens if handle is not None else 0
        if handle is None:
            return exported, 0
        try:
            imported = await destination.import_kv(handle)
        except (EngineError, TransferError, OSError):
            await source.release(handle.handle_id)
            raise
        await source.release(handle.handle_id)
    except (EngineError, TransferError, OSError) as error:
        log.info("kv_not_moved", extra={"reason": str(error), "num_tokens": len(row) // 4})
        return exported, 0
    count.contexts += 1
    count.tokens += handle.num_tokens
    count.kv_bytes += handle.exposure.num_bytes
    return exported, imported
