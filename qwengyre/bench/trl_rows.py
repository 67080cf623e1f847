"""TRL's tree rows (trl >= 1.16, `experimental/async_grpo/packing.py`) as an alternative that `bench tree-training` measures.

TRL attends with a CUDA kernel over keys gathered per segment. Here the same gather, copies and all, goes through SDPA on CPU.
Only TRL's packing module is loaded, so `pip install --no-deps trl` is enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.trainer.rows import Targets
from qwengyre.trajectory.layout import LayoutPath, TreeRow

NAME = "bench-trl"
PACKING = "experimental/async_grpo/packing.py"


def packing_module() -> ModuleType | None:
    """TRL's packing module, None when no TRL that has it is installed."""
    found = importlib.util.find_spec("trl")
    file = Path(found.submodule_search_locations[0]) / PACKING if found and found.submodule_search_locations else None
    if file is None or not file.exists():
        return None
    spec = importlib.util.spec_from_file_location("trl_packing", file)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pack(module: ModuleType, paths: Sequence[LayoutPath], fresh_P: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """TRL's packed row; `fresh_P`: for each path, which of its tokens (T,) no path before it has."""
    row = module.TreeRow()
    for path, fresh_T in zip(paths, fresh_P, strict=True):
        ids_T = torch.from_numpy(path.token_ids_T.astype(np.int64))
        sample = {"input_ids": ids_T, "completion_mask": torch.from_numpy(fresh_T), "old_log_probs": torch.zeros(len(ids_T))}
        row.add({**sample, "advantage": 0.0, "group_id": 0})
    packed: dict[str, Tensor] = row.pack()
    return packed


def as_row(packed: dict[str, Tensor]) -> tuple[TreeRow, Targets, np.ndarray]:
    """TRL's row in our records (without chains: its attention brings its own), its targets, and their order in TRL's."""
    token_ids_R, position_R = packed["input_ids"].numpy().astype(np.int32), packed["position_ids"].numpy().astype(np.int32)
    row = TreeRow(token_ids_R, position_R, np.full(len(token_ids_R), -1, np.int32), (), (), ())
    order = np.argsort(packed["token_index"].numpy(), kind="stable")
    targets = Targets.plain(packed["token_index"].numpy()[order], packed["targets"].numpy()[order])
    return row, targets, order


def register(packed: dict[str, Tensor]) -> str:
    """Make transformers attend as TRL does over `packed`; return the name of the attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    segments = list(
        zip(pairwise(packed["tree_cu_seqlens_q"].tolist()), pairwise(packed["tree_cu_seqlens_k"].tolist()), strict=True)
    )

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
        gathered = [x[:, :, packed["tree_kv_index"]] for x in (key, value)]
        lengths = [end - start for _, (start, end) in segments]
        keys, values = (torch.split(x, lengths, dim=2) for x in gathered)
        queries = torch.split(query, [end - start for (start, end), _ in segments], dim=2)
        parts = [_segment(q, k, v, options.get("scaling")) for q, k, v in zip(queries, keys, values, strict=True)]
        return torch.cat(parts, 2).transpose(1, 2), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME


def _segment(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Bottom-right causal attention of one segment over its path."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    if num_rows == num_keys:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool).tril_(num_keys - num_rows)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, **options)
