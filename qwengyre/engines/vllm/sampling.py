"""Sampling as QwenGyre means it, in vLLM's terms."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from qwengyre.engines.api import Sampling
from qwengyre.engines.vllm.imports import NamedImport
from qwengyre.engines.vllm.sampler import EXTRA


def sampling_params(sampling: Sampling, room: int, named_import: NamedImport | None) -> SamplingParams:
    """At most `room` tokens. The draws come from `KeyedSampler`; vLLM's own temperature only says whether there are any."""
    extra: dict[str, object] = {EXTRA: [sampling.seed, sampling.first_index, sampling.temperature]}
    if named_import:
        extra["kv_transfer_params"] = named_import._asdict()
    return SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        max_tokens=min(sampling.max_tokens, room),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


def probe_params() -> SamplingParams:
    """The log-prob of every token of the prompt at T = 1."""
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, detokenize=False, ignore_eos=True)
