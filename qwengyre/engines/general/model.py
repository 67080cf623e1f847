"""A model of transformers as the embedded engine serves it: weights in place, memory by its own shapes, a pass by its own forward.

`N` tokens of a pass, `W` wanted ones, `V` vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from qwengyre.core.errors import ConfigError, ModelRefused, UnsupportedModel
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.general.memory import GeneralMemory, StateMemory
from qwengyre.engines.general.plan import PassPlan
from qwengyre.engines.general.shapes import Shapes, shapes_of
from qwengyre.engines.model import Read
from qwengyre.engines.passes import LoadedModel, Pass
from qwengyre.engines.sampler import sample
from qwengyre.models.follow import sentence, take_over
from qwengyre.models.load import load
from qwengyre.models.placement import HOST, host_array, place, put
from qwengyre.models.plan import following

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = "general float32, token by token, 1"


class GeneralModel:
    """Loaded once for each engine; its weights have memory while it serves."""

    def __init__(self, model: PreTrainedModel):
        """Take over `model`, a causal LM of transformers in float32. Raises ModelRefused."""
        self.model, name = model, type(model).__name__
        try:
            self.form, self.body, layers, self.limit, _, _ = take_over(model)
            self.shapes = shapes_of(self.body)
        except UnsupportedModel as error:
            raise ModelRefused(f"{name} cannot be served: {error.reason}") from error
        except Exception as error:  # whatever a model's own code raises is a reason to refuse it
            raise ModelRefused(f"{name} cannot be served: {sentence(error)}") from error
        self.num_layers = len(layers)
        self._parameter_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.output = model.get_output_embeddings()
        self.vocabulary = self.form.num_words or self.output.weight.shape[0]

    @staticmethod
    def read(model_dir: Path) -> GeneralModel:
        """Raises ConfigError for a folder that is not whole, ModelRefused."""
        from qwengyre.engines.general.trial import try_model

        model = GeneralModel(load(model_dir, torch.float32))
        try_model(model)
        return model

    def fingerprint(self, block_size: int) -> str:
        """Equal for two engines exactly when one can read the KV blocks and states of the other."""
        config = {key: value for key, value in self.model.config.to_dict().items() if not key.startswith(("_", "transformers"))}
        parts = (FORMAT, type(self.model).__name__, str(block_size), repr(self.shapes), repr(sorted(config.items(), key=str)))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def open(self, config: EngineConfig, device: torch.device) -> LoadedModel:
        """Memory on `device` to serve with. Raises ConfigError, ModelRefused for a config that does not suit the model."""
        if config.kernels == "native":
            raise ConfigError("the compiled kernels are Qwen3's: use 'auto' or 'torch'", key="engine.kernels")
        if self.limit and config.max_context_tokens > self.limit.num_tokens:
            raise ConfigError(
                f"texts of this model end at {self.limit.num_tokens} tokens: {self.limit.reason}", key="engine.max_context_tokens"
            )
        place(self.model, device)
        weights = GeneralWeights(self.model, self._parameter_shapes, device)
        memory = GeneralMemory(self.shapes, num_blocks=config.kv_blocks, block_size=config.block_size, device=device)
        num_slots = config.max_running + config.state_snapshots
        states = StateMemory(self.shapes, num_slots, device) if self.shapes.has_states else None
        return LoadedModel(weights, memory, GeneralForward(self, memory, states), states)


class GeneralWeights:
    """All parameters of the model, where its own forward reads them."""

    def __init__(self, model: nn.Module, shapes: dict[str, tuple[int, ...]], device: torch.device):
        """Take memory where it was given back: what is in it is unknown until something is loaded."""
        self._parameters, self._shapes, self._device = dict(model.named_parameters()), shapes, device
        for name, parameter in self._parameters.items():
            if tuple(parameter.shape) != shapes[name]:
                is_host = device == HOST
                parameter.data = (
                    torch.from_numpy(np.empty(shapes[name], np.float32)) if is_host else torch.empty(*shapes[name], device=device)
                )

    def load_folder(self, model_dir: Path) -> None:
        """They came with the model."""

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Copy parameters in, by name. Raises ModelRefused when a name or shape is wrong."""

        def read(into: dict[str, np.ndarray]) -> None:
            for name, array in into.items():
                np.copyto(array, parameters[name])

        self.load_by(read, parameters)

    def load_by(self, read: Read, like: Mapping[str, np.ndarray]) -> None:
        """As `load`, of parameters of the shapes of `like`, which `read(into)` fetches to where they stay, if that is on the host."""
        for name, shape in self._shapes.items():
            if name not in like:
                raise ModelRefused(f"the snapshot has no parameter {name!r}")
            if tuple(like[name].shape) != shape:
                raise ModelRefused(f"parameter {name!r} is {tuple(like[name].shape)}, the model needs {shape}")
        landed = {
            name: parameter.detach().numpy()
            if self._device == HOST and like[name].dtype == np.float32 and parameter.is_contiguous()
            else host_array(like[name].shape, like[name].dtype, self._device)
            for name, parameter in self._parameters.items()
        }
        read(landed)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._device != HOST or landed[name].__array_interface__["data"][0] != parameter.data_ptr():
                    parameter.copy_(torch.from_numpy(landed[name]))

    def release(self) -> None:
        """Give the memory back; buffers stay with the model."""
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, device=self._device)


class GeneralForward:
    """Implements `passes.Forward`."""

    def __init__(self, model: GeneralModel, memory: GeneralMemory, states: StateMemory | None):
        self._model, self._memory, self._device = model, memory, memory.device
        self._states = states or StateMemory(Shapes((), (), ()), 0, self._device)
        self.form = model.form
        self.routes: np.ndarray | None = None

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    @torch.inference_mode()
    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        return sample(self.logits(batch), batch.temperatures, batch.draws)

    @torch.inference_mode()
    def logits(self, batch: Pass) -> torch.Tensor:
        """(W, V) of the wanted tokens."""
        positions = put(batch.positions, self._device)[None]
        plan = PassPlan(batch, self._memory, self._states)
        with following(plan):
            hidden = self._model.body(
                input_ids=put(batch.token_ids, self._device)[None],
                position_ids=positions,
                attention_mask=positions >= 0,
                use_cache=False,
            ).last_hidden_state[0]
        self.routes = np.concatenate(plan.chosen, 1) if plan.chosen else None
        output, words = self._model.output, self._model.vocabulary
        bias = None if output.bias is None else output.bias[:words]
        return self.form.bend(hidden.index_select(0, put(batch.wanted, self._device)) @ output.weight[:words].T, bias)
