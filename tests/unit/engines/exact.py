"""Qwen3 in float64 from Hugging Face parameters, and how far any float32 computation of it must be expected to stray.

Float32 has no one right answer: each processor sums in another order. So nothing float32 is compared with anything float32.
Both the engine and Hugging Face are compared with float64, and the bound is what rounding alone does to this model, these
weights and these tokens. `Float32Noise` puts it after each operation of the float64 forward: a sum of n products, in whatever
order, strays by about sqrt(n) u times the root of the sum of their squares, where u = 2^-24 is half a float32's last place (Higham
and Mary, A new approach to probabilistic rounding error analysis, 2019). What comes out has grown with depth, width, the
steepness of the softmaxes and the size of the logits as an error of float32 does.

T tokens, H hidden, D head_dim, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from qwengyre.engines.model import LAYER, ModelSpec

U = 2.0**-24
RMS_FACTOR = 2.0
"""An error's root mean square over hundreds of tokens hardly varies. The noise counts each rounding at its largest and is seldom
reached: 0.5 to 0.9 of it was seen, of the engine and of Hugging Face, whatever the processor's instructions. Twice the noise is left."""
MAX_FACTOR = 4.0
"""The largest error is that of one token with an unlucky context, and varies twofold from one seed of the noise to the next;
0.4 to 1.7 of it was seen. What is wrong for a single token, with a block of another call say, is off by 1e-2 and more."""


class Exact:
    """No rounding but float64's."""

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """`a @ b` over the last axis of `a` and the second to last of `b`."""
        return a @ b

    def result(self, x: np.ndarray) -> np.ndarray:
        """What an operation on single numbers gave."""
        return x


class Float32Noise(Exact):
    """As large as float32's rounding, of random signs."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = a @ b
        return exact + self._draw(exact) * np.sqrt(a.shape[-1]) * np.sqrt(a**2 @ b**2)

    def result(self, x: np.ndarray) -> np.ndarray:
        return x * (1 + self._draw(x))

    def _draw(self, like: np.ndarray) -> np.ndarray:
        return self._generator.uniform(-U, U, like.shape)


class Row(NamedTuple):
    """A sequence, of which all but the first `num_known` tokens were drawn."""

    token_T: np.ndarray
    num_known: int
    temperature: float
    """0 takes the most likely token and counts as 1."""


class Qwen3:
    """A forward of one sequence at a time."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, np.ndarray]):
        self.spec = spec
        self._parameters = {name: array.astype(np.float64) for name, array in parameters.items()}

    def logprobs(self, row: Row, rounding: Exact) -> np.ndarray:
        """Of the drawn tokens, each under the distribution that it was drawn from."""
        logits = self._logits(row.token_T, rounding)[row.num_known - 1 : -1]
        logits = rounding.result(logits / (row.temperature or 1.0))
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = rounding.result(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
        return logprobs[np.arange(len(logprobs)), row.token_T[row.num_known :]]

    def _logits(self, token_T: np.ndarray, rounding: Exact) -> np.ndarray:
        """(T, V)."""
        spec, head = self.spec, "model.embed_tokens" if self.spec.tied else "lm_head"
        rotation, mask = _rotations(spec, len(token_T)), np.tril(np.ones((len(token_T),) * 2, bool))
        x = self._parameters["model.embed_tokens.weight"][token_T]
        for index in range(spec.num_layers):
            matrix = {name: self._parameters[f"{LAYER.format(index)}{name}.weight"].T for name in MATRICES}

            def norm(x: np.ndarray, name: str, matrix: dict[str, np.ndarray] = matrix) -> np.ndarray:
                return _norm(x, matrix[name], spec.rms_eps, rounding)

            h = norm(x, "input_layernorm")
            q, k, v = (
                rounding.product(h, matrix[f"self_attn.{name}_proj"]).reshape(len(token_T), -1, spec.head_dim).swapaxes(0, 1)
                for name in "qkv"
            )
            q, k = (_rotate(norm(x, f"self_attn.{name}_norm"), rotation, rounding) for name, x in (("q", q), ("k", k)))
            k, v = (np.repeat(x, spec.heads // spec.kv_heads, 0) for x in (k, v))
            score = np.where(mask, rounding.product(q, k.swapaxes(1, 2)) / np.sqrt(spec.head_dim), -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            mixed = rounding.product(rounding.result(weight / weight.sum(-1, keepdims=True)), v)
            mixed = mixed.swapaxes(0, 1).reshape(len(token_T), -1)
            x = rounding.result(x + rounding.product(mixed, matrix["self_attn.o_proj"]))
            h = norm(x, "post_attention_layernorm")
            gate, up = (rounding.product(h, matrix[f"mlp.{name}_proj"]) for name in ("gate", "up"))
            x = rounding.result(x + rounding.product(rounding.result(gate / (1 + np.exp(-gate)) * up), matrix["mlp.down_proj"]))
        x = _norm(x, self._parameters["model.norm.weight"], spec.rms_eps, rounding)
        return rounding.product(x, self._parameters[f"{head}.weight"].T)


MATRICES = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float, rounding: Exact) -> np.ndarray:
    return rounding.result(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def _rotations(spec: ModelSpec, num_positions: int) -> np.ndarray:
    """e^{i angle} (T, D / 2). The angles are float32's: with those was every Qwen3 trained, so they are part of the model."""
    inverse = (1 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2) / spec.head_dim)).astype(np.float32)
    return np.exp(1j * (np.arange(num_positions, dtype=np.float32)[:, None] * inverse).astype(np.float64))


def _rotate(x: np.ndarray, rotation: np.ndarray, rounding: Exact) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * rotation
    return rounding.result(np.concatenate([turned.real, turned.imag], -1))


class Errors:
    """Errors of float32 log-probs, with those of the noise for the same tokens."""

    def __init__(self):
        self._found, self._noise = [], []

    def add(self, model: Qwen3, row: Row, logprobs: np.ndarray) -> None:
        """`logprobs` of the drawn tokens; nan for one that another model drew."""
        exact, is_own = model.logprobs(row, Exact()), ~np.isnan(logprobs)
        noise = model.logprobs(row, Float32Noise(len(self._noise))) - exact
        self._found.append((logprobs - exact)[is_own])
        self._noise.append(noise[is_own])

    def assert_no_more_than_rounding(self) -> None:
        found, noise = np.concatenate(self._found), np.concatenate(self._noise)
        assert rms(found) <= RMS_FACTOR * rms(noise)
        assert np.abs(found).max() <= MAX_FACTOR * np.abs(noise).max()


def relative_rounding(spec: ModelSpec) -> float:
    """By how much two float32 forwards may differ, in root mean square and relative to it, where there is no float64 one.

    u times the root of all terms of the sums that a number has come through: what `Float32Noise` gives when nothing grows or
    shrinks on the way. A quarter of it was seen.
    """
    per_layer = 2 * spec.hidden + (spec.heads + 1) * spec.head_dim + spec.intermediate
    return U * float(np.sqrt(spec.num_layers * per_layer))


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))
