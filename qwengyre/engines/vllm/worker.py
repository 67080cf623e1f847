"""What the adapter asks of vLLM's worker process, called by name through `AsyncLLM.collective_rpc`.

Every method returns one msgpack `Reply`, so that errors keep their type on the way.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import msgspec
import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from qwengyre.core.errors import KVRefused, ModelRefused, QwenGyreError
from qwengyre.engines.api import KVHandle
from qwengyre.engines.kv import runs
from qwengyre.engines.model import expected_shapes, read_spec
from qwengyre.engines.vllm.connector import GyreConnector, Import, host_rows
from qwengyre.engines.vllm.messages import WORKER_FAILED, Reply, Setup
from qwengyre.engines.vllm.probe import PROBE_TOKENS, reference_logprobs
from qwengyre.engines.vllm.sampler import KeyedSampler
from qwengyre.rpc.refusal import Refused, describe
from qwengyre.transfer.api import Carrier, Exposure, Pieces

log = logging.getLogger(__name__)
TOKENS = "token_ids"
"""Region of exported KV that holds the tokens themselves."""
ORDER = "order"
"""Region (B,) int64: which block of the tokens lies where. Blocks are exposed as they lie in the cache, in as few pieces as can be."""
KV_EPOCH = 0


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
    """Mixed into vLLM's worker class. `self.model_runner` and `self.device` are the worker's."""

    @replies
    def qg_setup(self, setup: bytes) -> Reply:
        self.qg: Setup = msgspec.msgpack.decode(setup, type=Setup)
        self.qg_spec = read_spec(Path(self.qg.model_dir))
        self.qg_carrier: Carrier = self.qg.place.open()
        self.qg_exports: dict[str, Exposure] = {}
        self.qg_numbers = itertools.count()
        self.model_runner.sampler = KeyedSampler(self.model_runner)
        return Reply()

    @replies
    def qg_load(self, snapshot: bytes) -> Reply:
        """Read a snapshot and put it in place of the weights; keys and values known so far are void."""
        parameters = self.qg_carrier.read(msgspec.msgpack.decode(snapshot, type=Exposure))
        for name, shape in expected_shapes(self.qg_spec).items():
            if name not in parameters or tuple(parameters[name].shape) != shape:
                raise ModelRefused(f"the snapshot lacks parameter {name!r} of shape {shape}")
        self.model_runner.reload_weights(weights_iterator=_tensors(parameters))
        refresh_heads(self.model_runner.get_model())
        self._qg_forget()
        return Reply(logprobs=reference_logprobs(self.qg_spec, parameters, PROBE_TOKENS))

    @replies
    def qg_export_kv(self, token_ids: bytes, version: int) -> Reply:
        """Copy the blocks of the longest computed prefix to where others can read them."""
        connector = _connector()
        wanted = np.frombuffer(token_ids, np.int32)
        blocks, num_tokens = connector.ledger.match(wanted)
        if not num_tokens:
            return Reply()
        order = np.argsort(blocks)
        lying = np.asarray(blocks)[order].tolist()
        pieces = runs(lying)
        regions = {layer: _rows(cache, lying, pieces) for layer, cache in connector.caches.items()}
        known = {TOKENS: np.ascontiguousarray(wanted[:num_tokens]), ORDER: order}
        exposure = self.qg_carrier.expose(known | regions, version=version, epoch=KV_EPOCH)
        handle_id = f"{exposure.location}/{next(self.qg_numbers)}"
        self.qg_exports[handle_id] = exposure
        return Reply(handle=KVHandle(handle_id, exposure, num_tokens, self.qg.fingerprint, version))

    @replies
    def qg_import_kv(self, handle: bytes) -> Reply:
        """Read exported blocks; requests that name `handle.handle_id` find them. Returns the tokens."""
        given = msgspec.msgpack.decode(handle, type=KVHandle)
        connector = _connector()
        num_blocks = -(-given.num_tokens // connector.block_size)
        shapes = {layer: (num_blocks, _block_bytes(cache)) for layer, cache in connector.caches.items()}
        offered = {region.name: tuple(region.shape) for region in given.exposure.regions}
        if offered != {TOKENS: (given.num_tokens,), ORDER: (num_blocks,)} | shapes:
            raise KVRefused(f"the blocks at {given.exposure.location} are not laid out as this engine's")
        content = self.qg_carrier.view(given.exposure) if self.device.type == "cpu" else None
        buffer = None
        if content is None:
            arrays, buffer = connector.staging.take(shapes)
            arrays |= {TOKENS: np.empty(given.num_tokens, np.int32), ORDER: np.empty(num_blocks, np.int64)}
            content = self.qg_carrier.read(given.exposure, arrays)
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
            self.qg_carrier.release(exposure)
        return Reply()

    @replies
    def qg_offload(self) -> Reply:
        """Give back weights and KV cache. On a GPU vLLM's sleep mode does it, on a CPU their storages shrink to nothing."""
        self._qg_forget()
        _connector().staging.clear()
        if self.device.type == "cpu":
            for module in self.model_runner.get_model().modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None
            self.qg_shrunk = _shrink_storages(self._qg_tensors())
        else:
            self.sleep(2)
        return Reply()

    @replies
    def qg_wake(self) -> Reply:
        """Take the memory again; `qg_load` must follow."""
        if self.device.type == "cpu":
            _restore_storages(self._qg_tensors(), self.qg_shrunk)
        else:
            self.wake_up()
        return Reply()

    @replies
    def qg_close(self) -> Reply:
        self.qg_carrier.close()
        return Reply()

    def _qg_forget(self) -> None:
        connector = _connector()
        connector.ledger.clear()
        for import_id in list(connector.imports):
            connector.forget_import(import_id)

    def _qg_tensors(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.model_runner.get_model().parameters()] + list(_connector().caches.values())


def refresh_heads(model: torch.nn.Module) -> None:
    """Prepare embeddings and heads again from their weights.

    On a CPU vLLM keeps a packed copy of the head's matrix. Reloading renews those of the layers that it loaded; a head tied
    to the embedding is loaded under the embedding's name, and its packed copy would stay as it was.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _connector() -> GyreConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, GyreConnector)
    return connector


def _tensors(parameters: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in parameters.items():
        yield name, torch.from_numpy(array)


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _rows(cache: torch.Tensor, blocks: list[int], pieces: list[tuple[int, int]]) -> Pieces:
    """Blocks as raw bytes, a row each; where they lie in host memory, they are not copied: `pieces` are their runs."""
    if (rows := host_rows(cache)) is not None:
        return [rows[first:last] for first, last in pieces]
    taken = cache.index_select(0, torch.tensor(blocks, device=cache.device)).contiguous()
    return taken.view(torch.uint8).view(len(blocks), -1).cpu().numpy()


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
