from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from qwengyre.core.errors import NonFiniteLoss, PathTooLong, TrainerError, UnsupportedModel
from qwengyre.testing.training import micro_step, random_execution, tiny_qwen3
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.flat import NUM_COUNTERS
from qwengyre.trainer.trainer import Trainer
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.transfer.shm import ShmTransport

WIDE = {"clip_low": 0.999, "clip_high": 1e6, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(path)
    return path


@pytest.fixture
def make(model_dir):
    return lambda **changes: Trainer(model_dir, TrainerConfig(**{**WIDE, **changes}), transport=None)


def executions(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return [random_execution(rng, i, advantage=(-1.0) ** i * (1 + i)) for i in range(count)]


def run_step(trainer, *steps, num_executions=4):
    trainer.begin_step(0)
    stats = [trainer.compute(step) for step in steps]
    gradient = trainer.flat_gradient().clone()
    before = trainer.flat.weights.clone()
    return gradient, trainer.apply(num_executions), trainer.flat.weights - before, stats


def test_same_micro_steps_give_bitwise_the_same_weights(make):
    steps = [micro_step(f"m{i}", 0, e) for i, e in enumerate(executions())]
    first, second = make(), make()
    run_step(first, *steps)
    run_step(second, *steps)
    assert torch.equal(first.flat.weights, second.flat.weights)


def test_gradient_does_not_depend_on_the_cut_into_micro_steps_nor_on_order(make):
    parts = executions()
    whole, _, update, _ = run_step(make(dtype="float64"), micro_step("all", 0, *parts))
    single, _, other, _ = run_step(make(dtype="float64"), *(micro_step(f"m{i}", 0, e) for i, e in enumerate(reversed(parts))))
    assert torch.linalg.norm(whole - single) <= 1e-6 * torch.linalg.norm(whole)
    assert torch.linalg.norm(update - other) <= 1e-4 * torch.linalg.norm(update)


def test_loss_gradient_is_the_derivative_of_the_stated_loss(make):
    """1/E sum 1/T_e sum -A min(e^r, 5) logp by central differences along a random direction."""
    trainer, parts = make(dtype="float64"), executions(2)
    gradient, *_ = run_step(make(dtype="float64"), micro_step("m", 0, *parts), num_executions=2)
    direction = torch.randn(trainer.flat.num_parameters, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()

    def trained():
        for execution in parts:
            for trajectory in execution.trajectories:
                logp_T = trainer.logprobs(trajectory, execution.temperature).astype(np.float64)
                at = np.frombuffer(trajectory.trainable_T, "?")
                yield execution, logp_T[at], np.frombuffer(trajectory.logprob_T, "<f4")[at]

    weights = [np.minimum(np.exp(logp - old), 5) * -e.advantage / e.num_trainable for e, logp, old in trained()]

    def loss():
        return sum(float(w @ logp) for w, (_, logp, _) in zip(weights, trained(), strict=True))

    start, step = trainer.flat.weights.clone(), 1e-3
    trainer.flat.weights.copy_(start + step * direction)
    above = loss()
    trainer.flat.weights.copy_(start - step * direction)
    slope = (above - loss()) / (2 * step)
    assert slope == pytest.approx(float(gradient[:-NUM_COUNTERS] @ direction), rel=2e-3)


def test_shared_prompt_of_several_executions_is_computed_once_with_the_same_gradient(make):
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 61, 40).astype(np.int32)
    parts = [random_execution(rng, i, advantage=1.0 + i, prompt=prompt) for i in range(3)]
    merged, _, _, (stats,) = run_step(make(), micro_step("m", 0, *parts))
    apart, _, _, (other,) = run_step(make(merge_prompt_tokens=0), micro_step("m", 0, *parts))
    assert stats.tokens_distinct == other.tokens_distinct - 80
    assert torch.linalg.norm(merged - apart) <= 1e-5 * torch.linalg.norm(apart)


def test_advantages_divided_by_their_deviation_over_the_step_give_the_same_update(make):
    """However the step is cut into micro-steps; executions without advantage count."""
    parts = [*executions(), random_execution(np.random.default_rng(9), 4, advantage=0.0)]
    deviation = float(np.std([e.advantage for e in parts] + [-sum(e.advantage for e in parts)]))
    centred = [*parts, msgspec.structs.replace(parts[-1], execution="e000005-0", advantage=-sum(e.advantage for e in parts))]
    divided = [msgspec.structs.replace(e, advantage=e.advantage / deviation) for e in centred]
    _, stats, update, _ = run_step(
        make(objective="reinforce-pp", dtype="float64"),
        *(micro_step(f"m{i}", 0, e) for i, e in enumerate(centred)),
        num_executions=6,
    )
    _, expected, other, _ = run_step(
        make(objective="reinforce-pp", normalize_advantages=False, dtype="float64"),
        micro_step("m", 0, *divided),
        num_executions=6,
    )
    assert stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-9)
    assert torch.linalg.norm(update - other) <= 1e-9 * torch.linalg.norm(other)
    with pytest.raises(ValueError, match="kl_coefficient = 0"):
        TrainerConfig(normalize_advantages=True, kl_coefficient=0.1)


def test_executions_without_advantage_count_and_skip_the_forward(make):
    parts = executions()
    still = [msgspec.structs.replace(e, advantage=0.0) for e in parts[2:]]
    trainer = make()
    gradient, step, _, (stats,) = run_step(trainer, micro_step("m", 0, *parts[:2], *still))
    alone, _, _, (fewer,) = run_step(make(), micro_step("m", 0, *parts[:2]))
    assert torch.equal(gradient, alone)
    assert (stats.tokens_distinct, step.num_executions) == (fewer.tokens_distinct, 4)


def test_division_by_executions_happens_once_and_before_clipping(make):
    parts = micro_step("m", 0, *executions())
    gradient, two, *_ = run_step(make(), parts, num_executions=2)
    _, four, *_ = run_step(make(), parts, num_executions=4)
    assert two.gradient_norm == pytest.approx(float(gradient[:-NUM_COUNTERS].norm()) / 2, rel=1e-5)
    assert four.gradient_norm == pytest.approx(two.gradient_norm / 2, rel=1e-5)
    _, clipped, *_ = run_step(make(max_gradient_norm=two.gradient_norm / 3), parts, num_executions=2)
    assert clipped.clip_scale == pytest.approx(1 / 3, rel=1e-3)


def test_step_without_executions_changes_nothing_and_says_so(make):
    trainer = make()
    _, stats, update, _ = run_step(trainer, num_executions=0)
    assert (stats.applied, stats.reason) == (False, "no executions")
    assert math.isnan(stats.gradient_norm) and not update.any()
    assert trainer.optimizer is None


def test_non_finite_loss_names_execution_and_path_and_the_step_is_not_applied(make):
    good, bad = executions(2)
    logprob_T = np.frombuffer(bad.trajectories[1].logprob_T, "<f4").copy()
    logprob_T[np.frombuffer(bad.trajectories[1].trainable_T, "?")] = np.nan
    broken = msgspec.structs.replace(bad.trajectories[1], logprob_T=logprob_T.tobytes())
    bad = msgspec.structs.replace(bad, trajectories=(bad.trajectories[0], broken, bad.trajectories[2]))
    trainer = make()
    trainer.begin_step(0)
    trainer.compute(micro_step("good", 0, good))
    sums = trainer.flat_gradient().clone()
    with pytest.raises(NonFiniteLoss, match=r"Qwen3ForCausalLM, execution e000001-0, path 1"):
        trainer.compute(micro_step("bad", 0, bad))
    assert torch.equal(trainer.flat_gradient(), sums)
    before = trainer.flat.weights.clone()
    stats = trainer.apply(2)
    assert not stats.applied and "bad" in stats.reason
    assert torch.equal(trainer.flat.weights, before)
    assert [m.micro_step for m in trainer.rejected] == ["bad"] and trainer.computed == ["good"]
    trainer.begin_step(1)
    assert trainer.rejected == []


def test_row_over_the_budget_is_refused_with_its_execution(make):
    with pytest.raises(
        PathTooLong,
        match=r"Qwen3ForCausalLM, execution e000000-0, path \d: its micro-step has \d+ distinct tokens, .*max_row_tokens = 10",
    ):
        run_step(make(max_row_tokens=10), micro_step("m", 0, *executions(1)))


def test_micro_step_of_another_step_is_refused(make):
    with pytest.raises(TrainerError, match="belongs to step 7, this trainer is in step 0"):
        run_step(make(), micro_step("m", 7, *executions(1)))


def test_chunks_do_not_change_the_gradient(make):
    parts = micro_step("m", 0, *executions())
    whole, *_ = run_step(make(), parts)
    chunked, *_ = run_step(make(chunk_tokens=16, head_logits=8 * 61), parts)
    assert torch.linalg.norm(whole - chunked) <= 1e-5 * torch.linalg.norm(whole)


def test_kl_trains_executions_without_advantage_towards_the_reference(make):
    parts = [msgspec.structs.replace(e, advantage=0.0) for e in executions(2)]
    trainer = make(kl_coefficient=0.1)
    gradient, *_ = run_step(trainer, micro_step("m", 0, *parts), num_executions=2)
    assert float(gradient[:-NUM_COUNTERS].abs().max()) < 1e-5  # at the reference the estimate is flat
    trainer.flat.weights.add_(0.05 * torch.randn(trainer.flat.num_parameters, generator=torch.Generator().manual_seed(0)))
    gradient, _, _, (stats,) = run_step(trainer, micro_step("m", 0, *parts), num_executions=2)
    assert float(gradient[:-NUM_COUNTERS].norm()) > 1e-3 and stats.loss > 0


def test_checkpoint_resumes_bitwise_and_carries_what_was_added(make, model_dir, tmp_path):
    parts = micro_step("m", 0, *executions())
    trainer = make()
    run_step(trainer, parts)
    trainer.save_checkpoint(tmp_path / "c", 1, model_dir, {"journal_position": 99})
    trainer.save_checkpoint(tmp_path / "c", 1, model_dir, {"journal_position": 100})
    run_step(trainer, parts)
    resumed = make()
    meta = resumed.load_checkpoint(tmp_path / "c")
    assert (meta["step"], meta["num_updates"], meta["extra"]) == (1, 1, {"journal_position": 100})
    run_step(resumed, parts)
    assert torch.equal(resumed.flat.weights, trainer.flat.weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "optimizer"]
    reopened = Trainer(tmp_path / "c", TrainerConfig(), None)
    assert reopened.flat.spans == trainer.flat.spans


@pytest.mark.parametrize("optimizer_device", ["device", "host"])
def test_in_bfloat16_the_core_updates_weights_of_its_own_and_a_checkpoint_keeps_those(
    make, model_dir, tmp_path, optimizer_device
):
    """An update far below the rounding of a weight is not lost, however many of them there are."""
    changes = {"dtype": "bfloat16", "learning_rate": 1e-5, "optimizer_device": optimizer_device}
    trainer = make(**changes)
    first = micro_step("m0", 0, *executions())
    run_step(trainer, first)
    master_N, weights_N = trainer.optimizer.master_N, trainer.flat.weights
    assert (master_N.dtype, weights_N.dtype, trainer.flat_gradient().dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert torch.equal(weights_N, master_N.bfloat16()) and not torch.equal(weights_N.float(), master_N)
    trainer.save_checkpoint(tmp_path / "c", 1, model_dir)
    resumed = make(**changes)
    resumed.load_checkpoint(tmp_path / "c")
    for each in (trainer, resumed):
        run_step(each, first)
    assert torch.equal(resumed.optimizer.master_N, trainer.optimizer.master_N)
    assert torch.equal(resumed.flat.weights, trainer.flat.weights)


@pytest.mark.parametrize("chunk_tokens", [8192, 16])
def test_gradients_in_bfloat16_are_those_of_float32_but_for_the_roundings_on_the_way(make, chunk_tokens):
    """A rounding is 2**-9 of a number; some 30 follow one another in each of two layers and add up like their root; three times that."""
    steps = [micro_step(f"m{i}", 0, e) for i, e in enumerate(executions())]
    narrow, wide = (run_step(make(dtype=dtype, chunk_tokens=chunk_tokens), *steps)[0] for dtype in ("bfloat16", "float32"))
    assert torch.linalg.norm(narrow - wide) <= 3 * 2**-9 * 60**0.5 * torch.linalg.norm(wide)


def test_many_small_gradients_in_bfloat16_add_up(make):
    """512 equal ones: sums of 8 bits would stop growing at 256."""
    trainer = make(dtype="bfloat16", chunk_tokens=16)
    trainer.begin_step(0)
    trainer.compute(micro_step("m0", 0, *executions(1)))
    once = trainer.flat_gradient().clone()
    name = next(iter(trainer.flat.parameters))
    parameter, view = trainer.flat.parameters[name], trainer.flat.sum_of(name)
    for _ in range(511):
        (parameter * once[: view.numel()].view(view.shape).bfloat16()).sum().backward()
    torch.testing.assert_close(view, 512 * once[: view.numel()].view(view.shape), rtol=2**-8, atol=1e-6)


def test_a_folder_that_trees_would_train_wrongly_is_refused_in_bfloat16_too(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        Trainer(tmp_path, TrainerConfig(dtype="bfloat16"), transport=None)


def test_folder_that_is_no_checkpoint_is_refused(make, tmp_path):
    with pytest.raises(TrainerError, match="is not a checkpoint"):
        make().load_checkpoint(tmp_path)


def test_offloaded_core_comes_back_with_its_weights(make):
    trainer, parts = make(), micro_step("m", 0, *executions())
    before = trainer.flat.weights.clone()
    run_step(trainer, parts)
    after = trainer.flat.weights.clone()
    trainer.offload()
    assert not trainer.flat.has_memory
    trainer.restore()
    assert torch.equal(trainer.flat.weights, after) and not torch.equal(after, before)
    gradient, *_ = run_step(trainer, parts)
    assert gradient.any()


def test_satellite_gives_its_weights_back_and_pulls_them_again(make, model_dir, prefix):
    transport = ShmTransport(prefix)
    try:
        core, satellite = (Trainer(model_dir, TrainerConfig(**WIDE), transport) for _ in range(2))
        (execution,) = executions(1)
        trajectory = execution.trajectories[0]
        for version in range(2):
            run_step(core, micro_step("m", 0, *executions()))
            snapshot = core.expose(version)
            satellite.restore()
            satellite.pull(snapshot)
            np.testing.assert_array_equal(satellite.logprobs(trajectory, 1.0), core.logprobs(trajectory, 1.0))
            satellite.offload()
            assert satellite.flat.weights.untyped_storage().size() == 0
    finally:
        transport.close()


def test_unsupported_models_are_refused():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM cannot be trained over trees: .*AttentionInterface"):
        TreeModel(bloom, TrainerConfig())
    model = tiny_qwen3()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        TreeModel(model, TrainerConfig())


def test_audit_finds_the_gap_under_each_token_s_version(make, tmp_path):
    trainer, parts = make(), executions(3)
    trainer.save_weights(tmp_path / "v000000.safetensors")
    recorded = [_recorded(trainer, e, 0) for e in parts[:2]]
    run_step(trainer, micro_step("m", 0, *parts))
    trainer.save_weights(tmp_path / "v000001.safetensors")
    recorded.append(_recorded(trainer, parts[2], 1))
    weights = trainer.flat.weights.clone()
    report = trainer.audit([micro_step("a", 0, *recorded[:1]), micro_step("b", 0, *recorded[1:])], tmp_path)
    assert report.num_tokens == sum(e.num_trainable for e in recorded)
    assert report.max_logprob_gap < 1e-5
    assert torch.equal(trainer.flat.weights, weights)
    wrong = _recorded(trainer, parts[1], 0)
    report = trainer.audit([micro_step("a", 0, recorded[0], wrong)], tmp_path)
    assert report.max_logprob_gap > 1e-3 and report.worst_execution == wrong.execution
    with pytest.raises(TrainerError, match=r"v000000\.safetensors cannot be read"):
        trainer.audit([micro_step("a", 0, *recorded)], tmp_path / "elsewhere")


def test_a_cell_that_serves_can_audit(model_dir, tmp_path, prefix):
    transport = ShmTransport(prefix)
    core, satellite = (Trainer(model_dir, TrainerConfig(**WIDE), transport) for _ in range(2))
    core.save_weights(tmp_path / "v000000.safetensors")
    steps = [micro_step("a", 0, _recorded(core, executions(1)[0], 0))]
    try:
        satellite.pull(core.expose(0))
        satellite.offload()
        assert satellite.audit(steps, tmp_path) == core.audit(steps, tmp_path)
    finally:
        transport.close()


def _recorded(trainer, execution, version):
    """The same execution as if the present weights had sampled it as `version`."""
    trajectories = []
    for t in execution.trajectories:
        sampled_T = np.frombuffer(t.version_T, "<i4") >= 0
        logprob_T = np.where(sampled_T, trainer.logprobs(t, execution.temperature), 0).astype("<f4")
        version_T = np.where(sampled_T, version, -1).astype("<i4")
        trajectories.append(msgspec.structs.replace(t, logprob_T=logprob_T.tobytes(), version_T=version_T.tobytes()))
    return msgspec.structs.replace(execution, trajectories=tuple(trajectories))
