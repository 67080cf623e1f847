"""What `qwengyre config check` says of a run that can start."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from qwengyre.runtime.notes import size_of, worth_knowing
from qwengyre.runtime.run_config import RunConfig, load_run
from tests.integration.run_kit import RunKit

QUIET = ("trainer.learning_rate=1e-3", "harness.isolation=bwrap")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit(tmp_path_factory.mktemp("kit"))


def config_of(kit: RunKit, *overrides: str) -> RunConfig:
    return load_run(kit.run_file, [*QUIET, *overrides])


def test_the_size_of_a_run_is_told(kit: RunKit):
    size = "3 tasks to train on, 2 held out; 4 steps x 2 groups x 4 executions = 32 executions, and 6 for each evaluation"
    assert size_of(config_of(kit)) == size
    family = config_of(kit, "tasks.train=", "tasks.held_out=", "tasks.family=mini-repositories", "evaluation.at_end=false")
    assert size_of(family) == "96 tasks to train on, 24 held out; 4 steps x 2 groups x 4 executions = 32 executions"


def test_nothing_is_worth_knowing_of_a_plain_run(kit: RunKit):
    assert worth_knowing(config_of(kit)) == []


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("policy.max_context_tokens=32768", "contexts have at most 1,024 tokens: engine.max_context_tokens = 1024 caps policy"),
        (
            "gateway.max_tokens_per_call=8",
            "answers have at most 8 tokens: gateway.max_tokens_per_call = 8 caps policy.max_tokens",
        ),
        ('harness.command=["true"]', "the harness is not told its task"),
        ('harness.command=["true", "{instruction}", "{zzz}"]', "harness.command: {zzz} is not a placeholder"),
        ("harness.isolation=none", 'harness.isolation is "none"'),
        ("trainer.learning_rate=1e-6", "trainer.learning_rate = 1e-06 is for models of a billion parameters"),
        ("scheduler.steps=60", "each of the 3 tasks is trained on about 40 times"),
        ("evaluation.at_end=false", "no held-out task is ever run"),
        ("gateway.port=8400", "gateway.port: only harnesses without a sandbox use it"),
        ("scheduler.num_cells=400", "400 cells of 1 threads share"),
    ],
)
def test_a_setting_that_suits_another_case_is_noted(kit: RunKit, override: str, note: str):
    found = worth_knowing(config_of(kit, override))
    assert len(found) == 1 and note in found[0]


@pytest.mark.parametrize("objective", ["grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp"])
def test_an_objective_that_clips_tokens_with_the_range_of_sequences_is_noted(kit: RunKit, objective: str):
    narrow = ("trainer.clip_low=0.005", "trainer.clip_high=0.005", f"trainer.objective={objective}")
    [found] = worth_knowing(config_of(kit, *narrow))
    assert f"outside 0.995 to 1.005; {objective} was published with" in found
    assert worth_knowing(config_of(kit, *narrow, "trainer.clip_low=0.2", "trainer.clip_high=1.2")) == []


@pytest.mark.parametrize("objective", ["gspo-capped", "gspo"])
def test_the_published_range_of_long_sequences_is_noted_for_short_answers(kit: RunKit, objective: str):
    own = load_run(kit.run_file, [*QUIET, f"trainer.objective={objective}"])
    trainer = msgspec.structs.replace(own.trainer, clip_low=None, clip_high=None)
    [found] = worth_knowing(msgspec.structs.replace(own, trainer=trainer))
    assert "answers have at most 24 here" in found
    long = msgspec.structs.replace(own.policy, max_tokens_per_call=1000)
    assert worth_knowing(msgspec.structs.replace(own, trainer=trainer, policy=long)) == []


@pytest.mark.parametrize(
    ("told", "is_noted"),
    [
        ({"max_position_embeddings": 512}, True),
        ({"max_position_embeddings": 1024}, False),
        ({"text_config": {"max_position_embeddings": 512}}, True),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, True),
        ({}, False),
    ],
)
def test_contexts_beyond_what_the_model_was_made_for_are_noted(kit: RunKit, tmp_path: Path, told: dict, is_noted: bool):
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "model.safetensors").touch()
    found = worth_knowing(config_of(kit, f"policy.model={tmp_path}"))
    assert any("longer than the 512 that the model was made for" in note for note in found) == is_noted


QUICKSTART = ("tasks.train=", "tasks.held_out=", "tasks.family=mini-repositories", "policy.model=")
REFERENCE = 'harness.command=["python3", "-m", "qwengyre_harness", "--task-file", "{instruction_file}"]'
OWN = 'harness.command=["my-agent", "{instruction}"]'


@pytest.mark.parametrize(
    ("overrides", "others"),
    [
        ((*QUICKSTART, REFERENCE), None),
        ((*QUICKSTART, OWN), "harness.command"),
        (("policy.model=", REFERENCE), "tasks"),
        (("policy.model=", OWN), "harness.command and tasks"),
        (("policy.model=somewhere", OWN), None),
    ],
)
def test_the_policy_of_the_warm_up_is_for_the_reference_harness_only(kit: RunKit, overrides: tuple[str, ...], others: str | None):
    found = [note for note in worth_knowing(config_of(kit, *overrides)) if "policy.model is empty" in note]
    assert len(found) == (others is not None)
    if others:
        assert f"with other {others} it will do nothing of use" in found[0]
