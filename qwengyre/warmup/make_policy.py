"""From nothing to a policy: play demonstrations, learn a tokenizer, fit the model, measure whether it copies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from qwengyre.core.errors import PolicyCannotCopy
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.demonstrations import Demonstration, demonstrate
from qwengyre.warmup.rows import RowBuilder
from qwengyre.warmup.tokenizer import is_copied, is_decided, learn_tokenizer
from qwengyre.warmup.training import batches, copy_accuracy, fit, new_model

NUM_FOR_TOKENIZER = 200
NUM_HELD_BACK = 40
_SAY_EVERY = 20


def make_policy(config: WarmupConfig, seed: int, folder: Path, progress: Callable[[str], None]) -> None:
    """Train a policy and save it in `folder`. Raises PolicyCannotCopy if it would be no use to start from."""
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
    updates = batches(learned, config.tokens_per_batch, np.random.default_rng([seed, 4]))
    weight_V = torch.from_numpy(np.where(is_decided(tokenizer), config.emphasis, 1.0).astype(np.float32))
    fit(model, updates, weight_V, config, _reporter(progress))
    accuracy = copy_accuracy(model, held_back, is_copied(tokenizer))
    progress(f"warm-up: copies {accuracy:.1%} of names and numbers right")
    if accuracy < config.min_copy_accuracy:
        raise PolicyCannotCopy(accuracy, config.min_copy_accuracy)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _reporter(progress: Callable[[str], None]) -> Callable[[int, int, float], None]:
    start = time.monotonic()

    def report(done: int, total: int, loss: float) -> None:
        if done % _SAY_EVERY == 0 or done == total:
            progress(f"warm-up: update {done} of {total}, loss {loss:.3f}, {time.monotonic() - start:.0f} s")

    return report
