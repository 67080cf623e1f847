"""All parameters of a model as one flat array, and all gradients as another: copies, sums and updates are one operation.

`N` numbers of all parameters. Parameters and their `.grad` become views; autograd accumulates into the flat array in place.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor, nn

NUM_COUNTERS = 3
"""Numbers behind the gradient that are summed with it: trained tokens, trained trajectories, squared advantages."""


class FlatParameters:
    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """Move the parameters of `model` (tied ones once) into one array of `dtype`."""
        self.parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        sizes = [p.numel() for p in self.parameters.values()]
        ends = np.cumsum(sizes).tolist()
        self.spans = {name: (end - size, end) for name, size, end in zip(self.parameters, sizes, ends, strict=True)}
        self.num_parameters = ends[-1]
        self.dtype = dtype
        self.weights = torch.cat([p.detach().to(dtype).reshape(-1) for p in self.parameters.values()])
        self._gradient: Tensor | None = None
        self._is_zero = False
        """The gradient is as it was allocated: nothing has been added and nobody has been given it."""
        self._bind_weights()

    @property
    def has_memory(self) -> bool:
        return self._gradient is not None

    @property
    def gradient(self) -> Tensor:
        """(N + NUM_COUNTERS,): sums, not means; allocated at first use."""
        self.open_gradient()
        return self._gradient

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[a:b].view(self.shapes[name]) for name, (a, b) in self.spans.items()}

    def decay_mask(self) -> Tensor:
        """1.0 where weight decay applies (matrices), 0.0 elsewhere (N,)."""
        mask = torch.zeros_like(self.weights)
        for name, (a, b) in self.spans.items():
            if len(self.shapes[name]) >= 2:
                mask[a:b] = 1.0
        return mask

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by Hugging Face name; views, no copy."""
        return self.whole(self.weights)

    def whole(self, flat: Tensor) -> dict[str, np.ndarray]:
        """`flat` (N,) by Hugging Face name; views, no copy."""
        return {name: view.numpy() for name, view in self.views(flat).items()}

    def copy_in(self, flat: Tensor, arrays: dict[str, np.ndarray]) -> None:
        """Copy into `flat` (N,), by name. Raises KeyError and ValueError for a name or shape that does not fit."""
        if missing := self.spans.keys() - arrays.keys():
            raise KeyError(f"weights lack {sorted(missing)[:3]}")
        for name, view in self.views(flat).items():
            if arrays[name].shape != view.shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}, the model has {tuple(view.shape)}")
            view.copy_(torch.from_numpy(arrays[name]))

    def commit(self) -> None:
        """Nothing to do: the model's parameters are views of `weights`."""

    def norm(self, gradient_N: Tensor) -> float:
        return float(torch.linalg.vector_norm(gradient_N))

    def zero_gradient(self) -> None:
        if not self._is_zero:
            self.gradient.zero_()

    def release(self, *, keep_weights: bool) -> None:
        """Give back the gradient, and the weights too unless `keep_weights`."""
        self._gradient = None
        for parameter in self.parameters.values():
            parameter.grad = None
        if not keep_weights:
            self.weights = torch.empty(0, dtype=self.dtype)
            for parameter in self.parameters.values():
                parameter.data = self.weights

    def restore(self) -> None:
        """Take the memory again. Weights that were released hold nothing until they are loaded."""
        if not len(self.weights):
            self.weights = _taken(self.num_parameters, self.dtype)
            self._bind_weights()
        if self._gradient is None:
            self._gradient, self._is_zero = _untouched_zeros(self.num_parameters + NUM_COUNTERS, self.dtype), True
            for name, view in self.views(self._gradient).items():
                self.parameters[name].grad = view

    def open_gradient(self) -> None:
        """Say that a backward pass is about to add to the gradient; take its memory if there is none."""
        self.restore()
        self._is_zero = False

    def _bind_weights(self) -> None:
        for name, view in self.views(self.weights).items():
            self.parameters[name].data = view


def _taken(num: int, dtype: torch.dtype) -> Tensor:
    """Memory whose content is unknown. By numpy, which asks for huge pages: filling it costs half of what torch's own does."""
    return torch.from_numpy(np.empty(num, torch.empty(0, dtype=dtype).numpy().dtype))


def _untouched_zeros(num: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system gives when it is first used, and takes back when they are dropped."""
    memory = mmap.mmap(-1, num * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
