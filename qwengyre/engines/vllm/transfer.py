"""Weights of a snapshot into vLLM, as one of its own ways to take them: read one-sidedly, by the names of the model's folder.

    AsyncLLM.start_weight_update     nothing yet: a snapshot that is gone must leave the weights as they are
    AsyncLLM.update_weights          read the snapshot; hand every tensor to the model's own loader
    AsyncLLM.finish_weight_update    pack them for the kernels

What happened is asked for by `WorkerExtension.qg_received`, since an error would lose its type on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from qwengyre.core.errors import ModelRefused, QwenGyreError
from qwengyre.engines.vllm.messages import WORKER_FAILED, Reply
from qwengyre.models.load import as_in_folder, read_kept, skeleton
from qwengyre.models.probe import PROBE
from qwengyre.rpc.refusal import Refused, describe
from qwengyre.transfer.api import Exposure, Transport

log = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]


@dataclass
class SnapshotSource(WeightTransferInitInfo):
    """Where snapshots are read, and the folder whose names vLLM's loaders know."""

    model_dir: Path
    transport: Transport


@dataclass
class SnapshotToRead(WeightTransferUpdateInfo):
    exposure: bytes


class SnapshotTransfer(WeightTransferEngine[SnapshotSource, SnapshotToRead]):
    """An update is complete when the names that the loaders took are the names of all parameters, and no tensor was passed over."""

    init_info_cls, update_info_cls = SnapshotSource, SnapshotToRead
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SnapshotSource) -> None:
        self.source = init_info
        self._skeleton = skeleton(init_info.model_dir)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._skeleton.named_parameters()}
        self._names = {name for name, _ in self.model.named_parameters()}
        self._kept = read_kept(self._skeleton, init_info.model_dir)
        self._is_tried = False
        self.received: Reply | None = None
        """Of the update that goes on, or of the last one."""

    def start_weight_update(self) -> None:
        self.received = None

    def receive_weights(self, update_info: SnapshotToRead) -> None:
        try:
            arrays = self.source.transport.read(msgspec.msgpack.decode(update_info.exposure, type=Exposure))
            tensors = self._as_vllm_reads_them(arrays)
        except QwenGyreError as error:  # nothing was changed
            self.received = Reply(failure=describe(error))
            return
        try:
            initialize_layerwise_reload(self.model)
            missed = self._load(tensors)
        except Exception as error:  # of a loader: the weights are half of one version and half of another
            log.exception("loader_failed")
            self.received = Reply(failure=Refused(WORKER_FAILED, f"a loader of vLLM failed: {error!r}"))
            return
        self.received = Reply(missed=missed, probe=arrays[PROBE].tobytes() if PROBE in arrays else b"")

    def finish_weight_update(self) -> None:
        if self.received is not None and self.received.failure is None:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_heads(self.model)

    def shutdown(self) -> None:
        """The transport is closed by whoever opened it."""

    def _as_vllm_reads_them(self, arrays: Arrays) -> Arrays:
        for name, shape in self._shapes.items():
            if name not in arrays or tuple(arrays[name].shape) != shape:
                raise ModelRefused(f"the snapshot lacks parameter {name!r} of shape {shape}")
        found = as_in_folder(self._skeleton, {name: arrays[name] for name in self._shapes})
        return found | self._kept

    def _load(self, tensors: Arrays) -> list[str]:
        """Returns parameters that got nothing, and tensors that no loader took: found the first time, one by one."""
        passed_over: list[str] = []
        loaded: set[str] = set()
        if self._is_tried:
            loaded |= self.model.load_weights(_each(tensors)) or self._names
        else:
            for name, array in tensors.items():
                taken = self.model.load_weights(_each({name: array}))
                loaded |= taken or set()
                if not taken:
                    passed_over.append(name)
        self._is_tried = True
        return sorted(self._names - loaded) + passed_over


def refresh_heads(model: nn.Module) -> None:
    """Prepare embeddings and heads again from their weights.

    On a CPU vLLM keeps a packed copy of the head's matrix. Reloading renews those of the layers that it loaded; a head tied
    to the embedding is loaded under the embedding's name, and its packed copy would stay as it was.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _each(tensors: Arrays) -> Iterator[tuple[str, Any]]:
    for name, array in tensors.items():
        yield name, torch.from_numpy(array)
