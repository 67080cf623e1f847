"""From nothing to a policy: play demonstrations, learn a tokenizer, fit the model until it is ready."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from qwengyre.core.errors import PolicyNotReady
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.demonstrations import Demonstration, demonstrate
from qwengyre.warmup.rows import RowBuilder
from qwengyre.warmup.skill import measure
from qwengyre.warmup.tokenizer import is_decided, learn_tokenizer
from qwengyre.warmup.training import batch_stream, fit, new_model

NUM_FOR_TOKENIZER = 200
NUM_HELD_BACK = 40
MEASURE_EVERY = 20


def make_policy(config: WarmupConfig, seed: int, folder: Path, progress: Callable[[str], None]) -> None:
    """Train a policy and save it in `folder`. Raises PolicyNotReady if it is not good enough to start from."""
    torch.set_num_threads(config.num_threads)
    transformers.utils.logging.disable_progress_bar()
    progress(f"warm-up: playing {config.num_demonstrations} demonstrations")
    played = itertools.islice(demonstrate(config, seed), config.num_demonstrations + NUM_HELD_BACK)
    executions: list[list[Demonstration]] = list(played)
    tokenizer = learn_tokenizer(itertools.chain.from_iterable(executions[:NUM_FOR_TOKENIZER]))
    builder = RowBuilder(tokenizer)
    rows = [[builder.build(context) for context in contexts] for contexts in executions]
    held_back = list(itertools.chain.from_iterable(rows[:NUM_HELD_BACK]))
    learned = list(itertools.chain.from_iterable(rows[NUM_HELD_BACK:]))
    model = new_model(config, tokenizer, seed)
    stream = batch_stream(learned, config.tokens_per_batch, np.random.default_rng([seed, 4]))
    weight_V = torch.from_numpy(np.where(is_decided(tokenizer), config.emphasis, 1.0).astype(np.float32))
    start = time.monotonic()

    def is_ready(done: int, loss: float) -> bool:
        if done % MEASURE_EVERY:
            return False
        skill = measure(model, held_back, tokenizer, config)
        progress(f"warm-up: update {done}, loss {loss:.3f}, {skill}, {time.monotonic() - start:.0f} s")
        return skill.copying >= config.min_copying and skill.operators >= config.min_operators

    fit(model, stream, weight_V, config, is_ready)
    skill = measure(model, held_back, tokenizer, config)
    progress(f"warm-up: {skill}")
    if skill.copying < config.min_copying or skill.operators < config.min_operators:
        raise PolicyNotReady(str(skill), f"{config.min_copying:.0%} copying and {config.min_operators:.0%} of the operators")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
