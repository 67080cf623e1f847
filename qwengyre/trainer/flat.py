"""All parameters that are trained as one flat array, and all gradients as another: copies, sums and updates are one operation.

`N` numbers of all of them; parameters that want no gradient, as those under adapters, stay as they are. Both arrays are on the model's device. Parameters become views of the one; gradients are added up in the
other, in the dtype of sums: where that is the parameters' own, `.grad` is a view and autograd adds in place, else each gradient is
added as soon as a backward pass has it, and dropped. Other processes read and write memory of the host: on the host the weights
themselves, elsewhere a copy of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.models.placement import HOST, place, wide

NUM_COUNTERS = 3
"""Numbers after the gradient that are summed with it: trained tokens, trained trajectories, squared advantages."""


class FlatParameters:
    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device = HOST):
        """Move the parameters of `model` that are trained (tied ones once) into one array of `dtype` on `device`."""
        place(model, device)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        sizes = [p.numel() for p in self.parameters.values()]
        ends = np.cumsum(sizes).tolist()
        self.spans = {name: (end - size, end) for name, size, end in zip(self.parameters, sizes, ends, strict=True)}
        self.num_parameters = ends[-1]
        self.dtype, self.sums, self.device = dtype, wide(dtype), device
        self.weights = torch.cat([p.detach().to(dtype).reshape(-1) for p in self.parameters.values()])
        self._gradient: Tensor | None = None
        self._staged: Tensor | None = None
        """The weights on the host, for others; None until somebody wants them, and always when they are there anyway."""
        self._is_zero = False
        """The gradient is as it was allocated: nothing has been added and nobody has been given it."""
        self._bind_weights()
        if self.sums != self.dtype:
            for name, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._adder(name))

    @property
    def has_memory(self) -> bool:
        return self._gradient is not None

    @property
    def gradient(self) -> Tensor:
        """(N + NUM_COUNTERS,): sums, not means; allocated at first use."""
        self.open_gradient()
        assert self._gradient is not None
        return self._gradient

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[a:b].view(self.shapes[name]) for name, (a, b) in self.spans.items()}

    def decay_mask(self) -> Tensor:
        """1.0 where weight decay applies (matrices), 0.0 elsewhere (N,)."""
        mask = torch.zeros_like(self.weights, dtype=self.sums)
        for name, (a, b) in self.spans.items():
            if len(self.shapes[name]) >= 2:
                mask[a:b] = 1.0
        return mask

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by Hugging Face name, on the host, bit by bit: bfloat16, which numpy lacks, as uint16. Views, no copy on the host."""
        return self._as_arrays(self.weights if self.device == HOST else self._host().copy_(self.weights))

    def landing(self) -> dict[str, np.ndarray]:
        """Where `arrays` of another process can be read to; `landed` takes them."""
        return self._as_arrays(self.weights if self.device == HOST else self._host())

    def landed(self) -> None:
        if self.device != HOST:
            self.weights.copy_(self._host())

    def whole(self, flat: Tensor) -> dict[str, np.ndarray]:
        """`flat` (N,) by Hugging Face name, on the host, in numbers that numpy knows: bfloat16 becomes float32. Views where they can be."""
        here = flat.to(HOST)
        return {name: view.numpy() for name, view in self.views(here.to(wide(here.dtype))).items()}

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

    def root(self, squares: float) -> float:
        """L2 of numbers whose squares add up to this."""
        return math.sqrt(squares)

    def zero_gradient(self) -> None:
        if not self._is_zero:
            self.gradient.zero_()

    def release(self, *, keep_weights: bool) -> None:
        """Give back the gradient, and the weights too unless `keep_weights`."""
        self._gradient = None
        for parameter in self.parameters.values():
            parameter.grad = None
        if not keep_weights:
            self.weights, self._staged = torch.empty(0, dtype=self.dtype, device=self.device), None
            for parameter in self.parameters.values():
                parameter.data = self.weights

    def restore(self) -> None:
        """Take the memory again. Weights that were released hold nothing until they are loaded."""
        if not len(self.weights):
            self.weights = _taken(self.num_parameters, self.dtype, self.device)
            self._bind_weights()
        if self._gradient is None:
            self._gradient, self._is_zero = _untouched_zeros(self.num_parameters + NUM_COUNTERS, self.sums, self.device), True
            if self.sums == self.dtype:
                for name, view in self.views(self._gradient).items():
                    self.parameters[name].grad = view

    def open_gradient(self) -> None:
        """Say that a backward pass is about to add to the gradient; take its memory if there is none."""
        self.restore()
        self._is_zero = False

    def sum_of(self, name: str) -> Tensor:
        """Where the gradient of this parameter is added up, in its shape."""
        a, b = self.spans[name]
        return self.gradient[a:b].view(self.shapes[name])

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        """A closure for each parameter; a gradient that nobody sums (a model is tried) stays."""

        def add(parameter: Tensor) -> None:
            if self._gradient is not None and parameter.grad is not None:
                self.sum_of(name).add_(parameter.grad)
                parameter.grad = None

        return add

    def _bind_weights(self) -> None:
        for name, view in self.views(self.weights).items():
            self.parameters[name].data = view

    def _host(self) -> Tensor:
        """Memory of the host for the weights, pinned where a device copies to it by itself."""
        if self._staged is None:
            is_pinned = self.device.type == "cuda"
            self._staged = torch.empty(self.num_parameters, dtype=self.dtype, device=HOST, pin_memory=is_pinned)
        return self._staged

    def _as_arrays(self, here: Tensor) -> dict[str, np.ndarray]:
        bits = here.view(torch.uint16) if here.dtype == torch.bfloat16 else here
        return {name: view.numpy() for name, view in self.views(bits).items()}


def _taken(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory whose content is unknown. The host's by numpy, which asks for huge pages: filling it costs half of what torch's own does."""
    if device != HOST or dtype == torch.bfloat16:
        return torch.empty(num, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(num, torch.empty(0, dtype=dtype, device=HOST).numpy().dtype))


def _untouched_zeros(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host their memory comes when it is first used, and goes back to the system when they are dropped."""
    if device != HOST:
        return torch.zeros(num, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
