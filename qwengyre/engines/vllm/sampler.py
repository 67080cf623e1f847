"""vLLM's sampler with draws that are a function of (seed, token index), and log-probs of what was drawn from.

vLLM draws from a generator per request, whose state would have to travel with a call that moves. This one draws as the
embedded engine does, so that a call gives the same tokens wherever it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from qwengyre.engines.sampler import DRAWS, draw, uniforms

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

EXTRA = "qwengyre"
"""Key of `SamplingParams.extra_args` that holds (seed, index of the first token, temperature)."""
MAX_KNOWN_DRAWS = 4096  # a cache: the oldest block goes first


class KeyedSampler(Sampler):
    """Takes the place of `model_runner.sampler`. Penalties, top-p and grammars do not exist here, as everywhere in QwenGyre."""

    def __init__(self, runner: GPUModelRunner):
        super().__init__(logprobs_mode=runner.sampler.logprobs_mode)
        self._runner = runner
        self._draws: OrderedDict[tuple[int, int], list[float]] = OrderedDict()

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        temperatures, draws = [], []
        for request_id in self._runner.input_batch.req_ids[: logits.shape[0]]:
            request = self._runner.requests[request_id]
            seed, first_index, temperature = (request.sampling_params.extra_args or {}).get(EXTRA, (0, 0, 0.0))
            temperatures.append(temperature)
            draws.append(self._draw(seed, first_index + len(request.output_token_ids)))
        token_R1, logprob_R1 = draw(logits.to(torch.float32), temperatures, draws)
        ranks = torch.zeros(len(draws), dtype=torch.int32, device=logits.device)
        wanted = sampling_metadata.max_num_logprobs is not None
        return SamplerOutput(
            sampled_token_ids=token_R1.to(torch.int32),
            logprobs_tensors=LogprobsTensors(token_R1.to(torch.int32), logprob_R1, ranks) if wanted else None,
        )

    def _draw(self, seed: int, index: int) -> float:
        block, at = divmod(index, DRAWS)
        known = self._draws.get((seed, block))
        if known is None:
            known = self._draws[seed, block] = uniforms(seed, block)
            if len(self._draws) > MAX_KNOWN_DRAWS:
                self._draws.popitem(last=False)
        return known[at]
