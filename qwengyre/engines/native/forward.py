"""`Forward` by the compiled kernels: one call into C per pass, which frees the interpreter for others meanwhile."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, ModelSpec, rope_table
from qwengyre.engines.native.build import library
from qwengyre.engines.passes import Pass
from qwengyre.models.placement import HOST

LANES = 16
PANEL = 64
GROUPS = (1, 2, 4)
HEAD_VECTORS = (1, 2, 4, 8)


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("qkv", "qk_norm", "out", "gate_up", "down")]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, ctypes.c_int32) for name in ("vocabulary", "head_width", "num_blocks", "block_size")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embedding", "head", "rope")),
        ("layers", ctypes.POINTER(_Layer)),
        ("kv", ctypes.c_void_p),
    ]


def is_supported(spec: ModelSpec) -> bool:
    """Whether the kernels know this shape and this machine can build them."""
    widths = (spec.hidden, spec.intermediate, spec.head_dim)
    return (
        all(width % LANES == 0 for width in widths)
        and spec.heads % spec.kv_heads == 0
        and spec.heads // spec.kv_heads in GROUPS
        and spec.head_dim // LANES in HEAD_VECTORS
        and library() is not None
    )


class NativeForward:
    """Packs the weights for the kernels; `refresh` after every change of `weights`."""

    routes: np.ndarray | None = None

    def __init__(self, weights: EngineWeights, memory: KVMemory):
        kernels = library()
        assert kernels is not None
        self._forward, self._sample, self._scratch_floats = kernels.forward, kernels.sample, kernels.scratch_floats
        self._scratch_floats.restype = ctypes.c_int64
        self._weights, self._memory = weights, memory
        self._rope = torch.empty(0, device=HOST)
        self._head_width = -(-weights.spec.vocabulary // LANES) * LANES
        self._scratch = np.empty(0, np.float32)
        self.refresh()

    def refresh(self) -> None:
        spec, weights = self._weights.spec, self._weights
        head = torch.zeros(spec.hidden, self._head_width, device=HOST)
        torch.mul(weights.head, weights.norm.unsqueeze(1), out=head[:, : spec.vocabulary])
        self._packed = [
            [pack(layer.qkv), layer.qk_norm, pack(layer.out), pack(layer.gate_up), pack(layer.down)] for layer in weights.layers
        ]
        self._head = pack(head)
        self._layers = (_Layer * spec.num_layers)(*(_Layer(*(part.data_ptr() for part in parts)) for parts in self._packed))
        self._model = _Model(
            *(spec.num_layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate),
            *(spec.vocabulary, self._head_width, self._memory.num_blocks, self._memory.block_size),
            spec.rms_eps,
            *(weights.embedding.data_ptr(), self._head.data_ptr(), self._rope.data_ptr()),
            self._layers,
            self._memory.blocks.data_ptr(),
        )
        self._pointer = ctypes.pointer(self._model)

    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        num_wanted, logits = len(batch.wanted), self._padded_logits(batch)
        tokens, logprobs = np.empty(num_wanted, np.int64), np.empty(num_wanted, np.float32)
        temperatures, draws = np.array(batch.temperatures, np.float32), np.array(batch.draws)
        arrays = (logits, temperatures, draws, tokens, logprobs)
        self._sample(self._pointer, ctypes.c_int64(num_wanted), *(_address(array) for array in arrays))
        return tokens.tolist(), logprobs.tolist()

    def logits(self, batch: Pass) -> torch.Tensor:
        """(W, V) of the wanted tokens."""
        return torch.from_numpy(self._padded_logits(batch)[:, : self._weights.spec.vocabulary])

    def _padded_logits(self, batch: Pass) -> np.ndarray:
        """(W, V), then up to `LANES` columns that mean nothing."""
        num_tokens, num_wanted = len(batch.token_ids), len(batch.wanted)
        self._prepare(num_tokens, batch.table_RB.shape[1])
        logits = np.empty((num_wanted, self._head_width), np.float32)
        self._forward(
            self._pointer,
            ctypes.c_int64(num_tokens),
            *(_address(array) for array in (batch.token_ids, batch.positions, batch.slots, batch.table_RB)),
            ctypes.c_int64(batch.table_RB.shape[1]),
            ctypes.c_int64(num_wanted),
            *(_address(array) for array in (batch.wanted, self._scratch, logits)),
        )
        return logits

    def _prepare(self, num_tokens: int, table_width: int) -> None:
        """Rotations and scratch for this many tokens, and for calls of this many blocks."""
        num_positions = table_width * self._memory.block_size
        if len(self._rope) < num_positions:
            self._rope = torch.view_as_real(rope_table(self._weights.spec, num_positions)).contiguous()
            self._model.rope = self._rope.data_ptr()
        needed = self._scratch_floats(self._pointer, ctypes.c_int64(num_tokens), ctypes.c_int64(num_positions))
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.float32)


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Panels of up to 64 columns of (inputs, columns), each contiguous, one after the other."""
    return torch.cat([panel.flatten() for panel in matrix.split(PANEL, dim=1)])


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
