"""Calls on the stand-in device, in a process of their own, one line of JSON for each family:
`python -m qwengyre.testing.standin_device tests.unit.engines.device_calls FOLDER`.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from qwengyre.core.arrays import common_prefix
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.general.memory import StateMemory
from qwengyre.engines.model import EngineWeights, LayerWeights
from qwengyre.engines.served import read_served
from qwengyre.models.placement import HOST
from qwengyre.models.probe import probe_in
from qwengyre.testing.engines import tiny_parameters, write_tiny_qwen3
from qwengyre.testing.families import moved_parameters, write_family
from qwengyre.testing.standin_device import standin_device

CASES = ("qwen3", "gemma3_text", "qwen3_5_text", "qwen3_moe")
"""The engine's own Qwen3; by transformers' forward: windows, recurrent layers, experts."""
CONFIG = EngineConfig(
    max_running=3, max_context_tokens=96, kv_blocks=64, prefill_chunk=20, block_size=4, state_snapshots=8, kernels="torch"
)
NUM_CALLS, NUM_TOKENS, MOVED_AFTER = 3, 12, 5
Answer = tuple[list[int], list[float]]


def requests() -> list[GenerateRequest]:
    """Prompts of unlike lengths, two of which begin alike; greedy and sampled ones."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 60, 17)
    prompts = [rng.integers(0, 60, 30), np.append(shared, 3), np.append(shared, [4, 5])]
    made = zip(prompts, (0.0, 1.0, 0.7), strict=True)
    return [
        GenerateRequest(f"c{index}", prompt.astype(np.int32).tobytes(), Sampling(temperature, NUM_TOKENS, (), index))
        for index, (prompt, temperature) in enumerate(made)
    ]


def answers(core: EngineCore, asked: list[GenerateRequest], stop_after: int | None = None) -> dict[str, Answer]:
    """All at once, to their end; with `stop_after` every call is given up after that many tokens."""
    found: dict[str, Answer] = {one.request_id: ([], []) for one in asked}
    for one in asked:
        core.submit(one)
    while core.has_work():
        chunks = core.iterate()
        if stop_after is not None and all(call.size - call.num_prompt >= stop_after for call in core.running):
            core.abort_all()
            chunks += core.take_chunks()
        for chunk in chunks:
            found[chunk.request_id][0].extend(chunk.token_ids)
            found[chunk.request_id][1].extend(chunk.logprobs)
    return found


def rest_of(one: GenerateRequest, done: list[int]) -> GenerateRequest:
    sampling = msgspec.structs.replace(one.sampling, max_tokens=NUM_TOKENS - len(done), first_index=len(done))
    return GenerateRequest(one.request_id, one.token_ids + np.array(done, np.int32).tobytes(), sampling)


def moved(source: EngineCore, destination: EngineCore) -> tuple[dict[str, Answer], int]:
    """Answers whose calls went to `destination` in mid-generation, with their keys, values and states; how many tokens it was spared."""
    asked, spared = requests(), 0
    begun = answers(source, asked, stop_after=MOVED_AFTER)
    for one in asked:
        known = np.frombuffer(rest_of(one, begun[one.request_id][0]).token_ids, np.int32)
        num_tokens, regions = source.export_regions(known)
        spared += destination.import_blocks(known[:num_tokens], lambda into, regions=regions: copy(regions, into))
    ended = answers(destination, [rest_of(one, begun[one.request_id][0]) for one in asked])
    return {name: (begun[name][0] + ended[name][0], begun[name][1] + ended[name][1]) for name in begun}, spared


def copy(regions: dict[str, Any], into: dict[str, Any]) -> None:
    """As a transport does: every region whole, from the pieces that it was gathered from to those that it is scattered to."""
    for name, target in into.items():
        parts, places = (value if isinstance(value, list) else [value] for value in (regions[name], target))
        whole = np.concatenate([part.reshape(-1) for part in parts])
        at = 0
        for place in places:
            place[...] = whole[at : at + place.size].reshape(place.shape)
            at += place.size


def opened(folder: Path, device: torch.device, seed: int) -> EngineCore:
    """A core that was loaded from its folder and then given the weights of version 1."""
    core = EngineCore(read_served(folder), CONFIG, version=0, device=device)
    core.load_folder(folder)
    answers(core, requests()[:1])
    parameters = tiny_parameters(folder, seed) if folder.name == "qwen3" else moved_parameters(folder, seed)
    core.load_weights(parameters, 1)
    if (probe := probe_in(parameters)) is not None:
        core.prove(probe)
    return core


def tensors_of(core: EngineCore) -> Iterator[torch.Tensor]:
    """Of weights, blocks and states, however they are kept."""
    model = getattr(core.spec, "model", None)
    yield from core.memory.layers
    yield from tensors_in(core.weights)
    yield from () if model is None else (*model.parameters(), *model.buffers())
    yield from () if core.recurrent is None else tensors_in(core.recurrent.states)


def tensors_in(kept: object) -> Iterator[torch.Tensor]:
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, list):
        for one in kept:
            yield from tensors_in(one)
    elif isinstance(kept, (EngineWeights, LayerWeights, StateMemory)):
        for one in vars(kept).values():
            yield from tensors_in(one)


def compare(folder: Path, device: torch.device) -> dict[str, object]:
    here, there, other = (opened(folder, where, 7) for where in (HOST, device, device))
    expected, found = answers(here, requests()), answers(there, requests())
    out, spared_out = moved(opened(folder, HOST, 7), other)
    back, spared_back = moved(opened(folder, device, 7), opened(folder, HOST, 7))
    gaps = [np.abs(np.subtract(found[name][1], expected[name][1])).max() for name in expected]
    return {
        "same": [found[name][0] == expected[name][0] for name in expected],
        "gap": float(max(gaps)),
        "to the device": [common_prefix(np.array(out[name][0]), np.array(expected[name][0])) for name in expected],
        "to the host": [common_prefix(np.array(back[name][0]), np.array(expected[name][0])) for name in expected],
        "spared": [spared_out, spared_back],
        "devices": sorted({tensor.device.type for tensor in tensors_of(there)}),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with standin_device() as device:
        for name in CASES:
            try:
                write_tiny_qwen3(folder / name) if name == "qwen3" else write_family(folder / name, name)
                found = compare(folder / name, device)
            except Exception:  # every case is told, also when one before it fails
                found = {"error": traceback.format_exc()}
            print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
