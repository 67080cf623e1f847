"""What the adapter asks of vLLM's worker process, called by name through `AsyncLLM.collective_rpc`.

Every method returns one msgpack `Reply`, so that errors keep their type on the way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from qwengyre.core.errors import KVRefused, QwenGyreError
from qwengyre.engines.api import KVHandle
from qwengyre.engines.kv import runs
from qwengyre.engines.vllm.connector import GyreConnector, Import, host_rows
from qwengyre.engines.vllm.launch import BACKEND
from qwengyre.engines.vllm.messages import WORKER_FAILED, Reply, Setup
from qwengyre.engines.vllm.sampler import KeyedSampler
from qwengyre.engines.vllm.transfer import SnapshotSource, SnapshotTransfer
from qwengyre.rpc.refusal import Refused, describe
from qwengyre.rpc.tether import end_with_parent
from qwengyre.transfer.api import Exposure, Pieces, Transport

log = logging.getLogger(__name__)
TOKENS = "token_ids"
"""Region of exported KV that holds the tokens themselves."""
ORDER = "order"
"""Region (B,) int64: which block of the tokens lies where. Blocks are exposed as they lie in the cache, in as few pieces as can be."""
KV_INCARNATION = 0
WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer.__module__, SnapshotTransfer.__name__)


def replies(method: Callable[..., Reply]) -> Callable[..., bytes]:
    @wraps(method)
    def call(*arguments: object) -> bytes:
        try:
            reply = method(*arguments)
        except QwenGyreError as error:
            reply = Reply(failure=describe(error))
        except Exception as error:  # the outermost frame in vLLM's process: it records, and the engine ends
            log.exception("worker_failed")
            reply = Reply(failure=Refused(WORKER_FAILED, f"{method.__name__}: {error!r}"))
        return msgspec.msgpack.encode(reply)

    return call


class WorkerExtension:
    """Mixed into vLLM's worker class, which has these already."""

    rank: int
    device: torch.device
    model_runner: Any  # vLLM tells no types where it is not installed
    weight_transfer_engine: SnapshotTransfer
    sleep: Callable[[int], None]
    wake_up: Callable[[list[str]], None]

    @replies
    def qg_setup(self, setup: bytes) -> Reply:
        end_with_parent(os.getppid())
        self.qg: Setup = msgspec.msgpack.decode(setup, type=Setup)
        self.qg_transport: Transport = self.qg.place.open()
        self.qg_exports: dict[str, Exposure] = {}
        self.weight_transfer_engine.init_transfer_engine(SnapshotSource(Path(self.qg.model_dir), self.qg_transport))
        self.model_runner.sampler = KeyedSampler(self.model_runner)
        return Reply()

    @replies
    def qg_received(self) -> Reply:
        """What became of the snapshot that was to be read. When it was, keys and values known so far are void."""
        reply = self.weight_transfer_engine.received
        assert reply is not None, "asked before a snapshot was named"
        if reply.failure is None:
            self._qg_forget()
        return reply

    @replies
    def qg_export_kv(self, token_ids: bytes, version: int, handle_id: str) -> Reply:
        """Copy this rank's blocks of the longest computed prefix to where others can read them."""
        connector = _connector()
        wanted = np.frombuffer(token_ids, np.int32)
        blocks, num_tokens = connector.ledger.match(wanted)
        if not num_tokens:
            return Reply()
        order = np.argsort(blocks)
        lying = np.asarray(blocks)[order].tolist()
        pieces = runs(lying)
        regions = {layer: _rows(cache, lying, pieces) for layer, cache in connector.caches.items()}
        known: dict[str, Pieces] = {TOKENS: np.ascontiguousarray(wanted[:num_tokens]), ORDER: order}
        exposure = self.qg_transport.expose(known | regions, version=version, incarnation=KV_INCARNATION)
        self.qg_exports[handle_id] = exposure
        return Reply(handle=KVHandle(handle_id, exposure, num_tokens, self.qg.fingerprint, version))

    @replies
    def qg_import_kv(self, handle: bytes) -> Reply:
        """Read the blocks that this rank's like has exported; requests that name `handle.handle_id` find them. Returns the tokens."""
        given = msgspec.msgpack.decode(handle, type=KVHandle)
        given = msgspec.structs.replace(given, exposure=(given.exposure, *given.exposure.others)[self.rank])
        connector = _connector()
        num_blocks = -(-given.num_tokens // connector.block_size)
        shapes = {layer: (num_blocks, _block_bytes(cache)) for layer, cache in connector.caches.items()}
        offered = {region.name: tuple(region.shape) for region in given.exposure.regions}
        if offered != {TOKENS: (given.num_tokens,), ORDER: (num_blocks,)} | shapes:
            raise KVRefused(f"the blocks at {given.exposure.location} are not laid out as this engine's")
        content = self.qg_transport.view(given.exposure) if self.device.type == "cpu" else None
        buffer = None
        if content is None:
            content, buffer = connector.staging.take(shapes)
            content |= {TOKENS: np.empty(given.num_tokens, np.int32), ORDER: np.empty(num_blocks, np.int64)}
            self.qg_transport.read(given.exposure, content)
        connector.imports[given.handle_id] = Import(content, content[ORDER], buffer)
        return Reply(token_ids=content[TOKENS].tobytes())

    @replies
    def qg_forget_imports(self, import_ids: list[str]) -> Reply:
        for import_id in import_ids:
            _connector().forget_import(import_id)
        return Reply()

    @replies
    def qg_load_cpu_s(self) -> Reply:
        """CPU seconds spent so far in putting imports into blocks, for benches."""
        return Reply(seconds=_connector().load_cpu_s)

    @replies
    def qg_release(self, handle_id: str) -> Reply:
        if exposure := self.qg_exports.pop(handle_id, None):
            self.qg_transport.release(exposure)
        return Reply()

    @replies
    def qg_offload(self) -> Reply:
        """Give back weights and KV cache. On a GPU vLLM's sleep mode does it, on a CPU their storages shrink to nothing."""
        self._qg_forget()
        if has_kv_transfer_group():
            _connector().staging.clear()
        if self.device.type == "cpu":
            for module in self.model_runner.get_model().modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None
            self.qg_shrunk = {tag: _shrink_storages(tensors) for tag, tensors in self._qg_tensors().items()}
        else:
            self.sleep(2)
        return Reply()

    @replies
    def qg_wake(self, tag: str) -> Reply:
        """Take memory again: of "weights", which must be loaded then, or of the "kv_cache"."""
        if self.device.type == "cpu":
            _restore_storages(self._qg_tensors()[tag], self.qg_shrunk[tag])
        else:
            self.wake_up([tag])
        return Reply()

    @replies
    def qg_close(self) -> Reply:
        self.qg_transport.close()
        return Reply()

    def _qg_forget(self) -> None:
        if not has_kv_transfer_group():
            return
        connector = _connector()
        connector.ledger.clear()
        for import_id in list(connector.imports):
            connector.forget_import(import_id)

    def _qg_tensors(self) -> dict[str, list[torch.Tensor]]:
        """By vLLM's tags. States of recurrent layers are several tensors for each layer."""
        caches = [
            part for cache in self.model_runner.kv_caches for part in (cache if isinstance(cache, list | tuple) else [cache])
        ]
        return {"weights": [p.data for p in self.model_runner.get_model().parameters()], "kv_cache": caches}


def _connector() -> GyreConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, GyreConnector)
    return connector


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _rows(cache: torch.Tensor, blocks: list[int], pieces: list[tuple[int, int]]) -> Pieces:
    """Blocks as raw bytes, a row each; where they lie in host memory, they are not copied: `pieces` are their runs."""
    if (rows := host_rows(cache)) is not None:
        return [rows[first:last] for first, last in pieces]
    taken = cache.index_select(0, torch.tensor(blocks, device=cache.device)).contiguous()
    return taken.view(torch.uint8).view(len(blocks), -1).to("cpu").numpy()


def _shrink_storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Free what lies behind these tensors, which stay what they are; return the bytes of each storage, by index."""
    sizes = {}
    for index, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        if num_bytes := storage.nbytes():
            sizes[index] = num_bytes
            storage.resize_(0)
    return sizes


def _restore_storages(tensors: list[torch.Tensor], sizes: dict[int, int]) -> None:
    """Zeros, not what lay in the memory: a kernel multiplies slots that it masks by 0, and NaN times 0 is NaN."""
    for index, num_bytes in sizes.items():
        tensors[index].untyped_storage().resize_(num_bytes).fill_(0)
