"""The KV connector that vLLM loads: tells the worker who has which blocks, and puts keys and values that came from elsewhere into them.

    scheduler side (engine core)                    worker side
      get_num_new_matched_tokens: how much an         start_load_kv: imported keys and values
      import knows beyond the prefix cache            into the blocks of the request
      build_connector_meta: blocks and tokens   ->    BlockLedger: what can be exported
      of this step

An import is bytes that `worker.WorkerExtension.qg_import_kv` has read before the request came; a request names it in its
`kv_transfer_params`, so nothing waits for the network inside a step.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from qwengyre.engines.vllm.ledger import BlockLedger, Scheduled
from qwengyre.engines.vllm.staging import Staging

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Load:
    """Put tokens `start..end` of an import into the blocks of a request, before it computes anything."""

    import_id: str
    start: int
    end: int
    blocks: list[int]
    """The request's table from its beginning."""


class Import(NamedTuple):
    """Keys and values that were read and wait for their call."""

    content: dict[str, np.ndarray]
    """Layer -> its blocks as bytes (B, bytes of a block), as in the cache, in an order of their own."""
    order_B: np.ndarray
    """Which block of the tokens each is."""
    buffer: np.ndarray | None
    """What `content` lies in, of `staging`; None when it lies where the source exposed it."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    scheduled: list[Scheduled] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class GyreConnector(KVConnectorBase_V1):
    """One instance per role. Only models whose layers share one table of blocks: plain attention."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("keys and values of models with several kinds of KV cache cannot be moved yet")
        self.block_size = vllm_config.cache_config.block_size
        self._requests: dict[str, Request] = {}
        self._admitted: set[str] = set()
        """Requests that have had blocks: what they imported was used or is of an older version."""
        self._loads: dict[str, Load] = {}
        self.ledger = BlockLedger(self.block_size)
        self.imports: dict[str, Import] = {}
        self.staging = Staging()
        self.load_cpu_s = 0.0
        self.caches: dict[str, torch.Tensor] = {}

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of the request's import beyond those in the prefix cache; the last known token is always computed."""
        named = request.kv_transfer_params
        if not named or request.request_id in self._admitted:
            return 0, False
        return max(0, min(named["num_tokens"], request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._admitted.add(request.request_id)
        if num_external_tokens:
            named = request.kv_transfer_params
            end = min(named["num_tokens"], request.num_tokens - 1)
            table = list(blocks.get_block_ids()[0])
            self._loads[request.request_id] = Load(named["import_id"], end - num_external_tokens, end, table)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        step = StepMetadata(ended=list(scheduler_output.finished_req_ids), loads=list(self._loads.values()))
        count = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            step.scheduled.append(self._afresh(new.req_id, new.block_ids, new.num_computed_tokens, count[new.req_id]))
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                step.scheduled.append(self._afresh(name, blocks, start, count[name]))
            elif request := self._requests.get(name):
                token_ids = list(request.all_token_ids[start : start + count[name]])
                step.scheduled.append(Scheduled(name, start, token_ids, list(blocks[0]) if blocks else []))
        self._loads = {}
        return step

    def _afresh(self, name: str, blocks: tuple[list[int], ...], num_known: int, num_scheduled: int) -> Scheduled:
        load = self._loads.get(name)
        num_shared = (load.start if load else num_known) // self.block_size
        token_ids = list(self._requests[name].all_token_ids[: num_known + num_scheduled])
        return Scheduled(name, 0, token_ids, list(blocks[0]), is_new=True, num_shared=num_shared)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._admitted.discard(request.request_id)
        self._loads.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Other weights: what waiting requests wanted to import is of an older version."""
        self._admitted.update(self._requests)
        self._loads = {}
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        began = time.thread_time()
        for load in step.loads:
            self._put(load)
        self.load_cpu_s += time.thread_time() - began
        for scheduled in step.scheduled:
            self.ledger.record(scheduled)
        self.ledger.end(step.ended)

    def _put(self, load: Load) -> None:
        first, last = load.start // self.block_size, -(-load.end // self.block_size)
        content, order_B, _ = self.imports[load.import_id]
        is_whole = last - first == len(order_B)
        which = slice(None) if is_whole else np.flatnonzero((order_B >= first) & (order_B < last))
        blocks = np.asarray(load.blocks)[order_B[which]]
        for layer, cache in self.caches.items():
            rows = content[layer][which]
            if (lying := host_rows(cache)) is not None:
                lying[blocks] = rows
            else:
                values = torch.from_numpy(rows).view(cache.dtype).view(len(blocks), *cache.shape[1:])
                cache.index_copy_(0, torch.from_numpy(blocks).to(cache.device), values.to(cache.device))

    def forget_import(self, import_id: str) -> None:
        held = self.imports.pop(import_id, None)
        if held is not None and held.buffer is not None:
            self.staging.give(held.buffer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Nothing is saved on the way: an export reads the blocks when it is asked for."""

    def wait_for_save(self) -> None:
        """Nothing is saved on the way."""


def host_rows(cache: torch.Tensor) -> np.ndarray | None:
    """The blocks of `cache` as bytes, a row each, where they lie; None when that is not contiguous host memory."""
    if cache.device.type != "cpu" or not cache.is_contiguous():
        return None
    # Not by `cache.numpy()`, after which torch would refuse to shrink the storage.
    content = (ctypes.c_uint8 * (cache.numel() * cache.element_size())).from_address(cache.data_ptr())
    return np.ctypeslib.as_array(content).reshape(len(cache), -1)
