"""Which of the tokens before it a token sees, as the model says in its own mask, by positions in the text.

`Q` queries, `K` keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' `mask_function(batch, head, query position, key position)`."""


class Visibility:
    """What transformers would have made a mask of. `everything`: all before it and itself."""

    def __init__(self, function: MaskFunction | None = None):
        self._function = function
        self._windows: dict[int, int | None] = {}

    def sees(self, query_Q: Tensor, key_K: Tensor) -> Tensor:
        """bool (Q, K), of int64 positions."""
        queries, keys = query_Q[:, None], key_K[None, :]
        causal = keys <= queries
        if self._function is None:
            return causal
        zero = torch.zeros((), dtype=torch.int64, device=query_Q.device)
        return causal & self._function(zero, zero, queries, keys)

    def window(self, num_tokens: int) -> int | None:
        """The sliding window that says the same for texts of `num_tokens`; at least that many when all is seen. None: no window does.

        >>> Visibility().window(9)
        9
        >>> Visibility(lambda b, h, q, k: k > q - 4).window(9), Visibility(lambda b, h, q, k: k > q - 4).window(3)
        (4, 3)
        >>> Visibility(lambda b, h, q, k: k // 4 == q // 4).window(9) is None
        True
        """
        if self._function is None or not num_tokens:
            return max(num_tokens, 1)
        if num_tokens not in self._windows:
            self._windows[num_tokens] = self._find_window(num_tokens)
        return self._windows[num_tokens]

    def _find_window(self, num_tokens: int) -> int | None:
        """Looked for at the last position; checked at those around it, around the window's own length and at a few between."""
        positions = torch.arange(num_tokens, device="cpu")
        window = int(self.sees(positions[-1:], positions).sum())
        last, at = num_tokens - 1, min(window, num_tokens - 1)
        wanted = {0, 1, last, last - 1, last - 2, at - 1, at, at + 1, *(last * part // 7 for part in range(7))}
        queries = torch.tensor(sorted({max(0, min(last, place)) for place in wanted}), device="cpu")
        expected = (positions <= queries[:, None]) & (positions > queries[:, None] - window)
        return window if torch.equal(self.sees(queries, positions), expected) else None
