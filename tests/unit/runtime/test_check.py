"""What `qwengyre config check` and every start find wrong, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.runtime.check import check_run, mistakes_in
from qwengyre.runtime.private_folders import private_folders
from qwengyre.runtime.run_config import load_run
from qwengyre.sandbox.readable import check_readable
from tests.integration.run_kit import RunKit


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit(tmp_path_factory.mktemp("kit"))


def mistakes(kit: RunKit, *overrides: str) -> list[str]:
    try:
        check_run(load_run(kit.run_file, overrides))
    except ConfigError as error:
        return [str(error)]
    except ExceptionGroup as group:
        return [str(error) for error in group.exceptions]
    return []


def test_nothing_is_wrong_with_a_good_run(kit: RunKit):
    assert mistakes(kit) == []


def test_all_mistakes_are_told_at_once(kit: RunKit, tmp_path: Path):
    found = mistakes(
        kit,
        f"tasks.train={tmp_path}/no-tasks",
        f"policy.model={tmp_path}/no-model",
        f"trajectory.harness_rules={tmp_path}/no-rules.toml",
        'harness.command=["no-such-agent"]',
        "scheduler.evaluation_group_sizes=[4]",
        "trainer.max_row_tokens=1000",
        "transfer.transport=mooncake",
    )
    for key in (
        "no-tasks",
        "policy.model",
        "no-rules.toml",
        "harness.command",
        "scheduler.evaluation_group_sizes",
        "max_row_tokens",
    ):
        assert sum(key in mistake for mistake in found) == 1, (key, found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.held_out=", "tasks.held_out: there are no held-out tasks"),
        ("tasks.held_out={kit}/train", "train-0 is in both"),
        ("gateway.renderer.name=nope", "gateway.renderer: this renderer cannot be used"),
        ("gateway={{tls_certificate='no.pem', tls_key='no.pem'}}", "gateway.tls_certificate: cannot be read: No such file"),
        ("policy.model={kit}/train", "has no config.json"),
        ("policy.model={kit}/no-weights", "has no model.safetensors: its weights must be there as safetensors"),
        ("policy.model={kit}/half-a-tokenizer", "tokenizer.json: this file of policy.model cannot be read"),
        ("policy.cache={kit}/run.toml", ""),
        ("harness.env.OPENAI_BASE_URL=x", "harness.env.OPENAI_BASE_URL: every execution gets this for itself"),
        ('harness.command=["python3", "/no/such/agent.py"]', "harness.command: /no/such/agent.py does not exist"),
        ("policy.max_tokens_per_call=1024", "leaves no room for a prompt in a context of 1024 (policy.max_context_tokens)"),
        ("engine.max_context_tokens=20", "policy.max_tokens_per_call: an answer may have 24 tokens, which leaves no room"),
        ("gateway.max_context_tokens=24", "in a context of 24 (gateway.max_context_tokens)"),
        ("scheduler.steps=0", "evaluation.at_start: without steps there is nothing to do"),
        ("scheduler.executions_per_group=1", "scheduler.executions_per_group: an execution is compared"),
        ("ray.ranks_per_node=1", "ray.ranks_per_node: only the launcher"),
        ("trainer.kl_coefficient=0.01", "trajectory.keep_zero_advantage: executions of advantage 0 have a KL term"),
    ],
)
def test_a_mistake_is_named(kit: RunKit, override: str, message: str):
    for name in ("no-weights", "half-a-tokenizer"):
        folder = kit.folder / name
        folder.mkdir(exist_ok=True)
        for file in (kit.folder / "model").glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    (kit.folder / "half-a-tokenizer" / "tokenizer.json").write_text('{"version"')
    found = mistakes(kit, override.format(kit=kit.folder))
    assert len(found) == bool(message) and message in "".join(found)


@pytest.mark.parametrize(
    ("engine", "why"),
    [("engine.engine=vllm", "adapters in vLLM are not built"), ("", ""), ("engine.engine=paced", "a paced cell trains nothing")],
)
def test_adapters_are_refused_with_engines_that_do_not_know_them(kit: RunKit, engine: str, why: str):
    plan = ["engine.paced_plan=plan.json"] if "paced" in engine else []
    found = mistakes(kit, "trainer.lora.rank=4", *filter(None, [engine]), *plan)
    assert any(mistake.startswith(f"trainer.lora.rank: {why}") for mistake in found) == bool(why), found


def test_every_task_that_is_wrong_is_told(kit: RunKit, tmp_path: Path):
    for name in ("one", "two", "three"):
        kit.task(tmp_path / "tasks" / name)
    (tmp_path / "tasks" / "one" / "instruction.md").write_text("")
    (tmp_path / "tasks" / "three" / "tests" / "test.sh").unlink()
    found = mistakes(kit, f"tasks.train={tmp_path}/tasks", "scheduler.executions_per_group=1")
    assert len(found) == 3 and "one/instruction.md: empty" in found[1] and "three/tests/test.sh: missing" in found[2]


def test_a_cache_that_cannot_be_written_is_found_only_where_it_is_needed(kit: RunKit):
    found = mistakes(kit, "policy.model=", f"policy.cache={kit.run_file}")
    assert len(found) == 1 and found[0].startswith("policy.cache: ")


def shown(kit: RunKit, *overrides: str, run_folder: Path | None = None) -> str:
    """Which private folder the harness of a run would see, as a sentence; empty when none."""
    config = load_run(kit.run_file, ["harness.isolation=bwrap", *overrides])
    try:
        check_readable(config.harness, private_folders(config, run_folder))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["{kit}", "{kit}/train", "{kit}/train/train-0/tests", "{kit}/train/..", "{link}/train"])
def test_a_readable_folder_that_shows_tasks_is_refused(kit: RunKit, tmp_path: Path, where: str):
    (tmp_path / "link").symlink_to(kit.folder)
    readable = where.format(kit=kit.folder, link=tmp_path / "link")
    found = shown(kit, f'harness.readable=["{readable}"]')
    assert found.startswith(f"harness.readable: {readable} would show every harness tasks.train")


def test_a_readable_folder_that_shows_runs_cache_or_the_project_is_refused(kit: RunKit, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "agent/runs/mine"
    run.mkdir(parents=True)
    (tmp_path / "elsewhere/cache").mkdir(parents=True)
    cache = f"policy.cache={tmp_path}/elsewhere/cache"
    for readable, run_folder, what in (
        ("", None, "the folder that you start in"),
        ("elsewhere", None, "policy.cache"),
        ("elsewhere/cache", None, "policy.cache"),
        ("agent", run, "runs"),
        ("agent/runs/mine/journal", run, "this run"),
    ):
        found = shown(kit, f'harness.readable=["{tmp_path / readable}"]', cache, run_folder=run_folder)
        assert found.startswith(f"harness.readable: {tmp_path / readable} would show every harness {what} (")
    assert shown(kit, f'harness.readable=["{tmp_path}/agent"]', cache) == ""
    assert shown(kit, f'harness.readable=["{tmp_path}"]', "harness.isolation=none") == "", "nothing is hidden"


def test_tasks_where_every_harness_looks_are_refused(kit: RunKit, monkeypatch):
    monkeypatch.setattr("qwengyre.sandbox.readable.SYSTEM", ("/usr", str(kit.folder)))
    assert f"lies in {kit.folder}, which every harness sees: move it elsewhere" in shown(kit)


def test_an_environment_that_no_workspace_could_hold_is_named(kit: RunKit):
    (kit.folder / "train/train-0/environment").mkdir(exist_ok=True)
    file = kit.folder / "train/train-0/environment/large"
    file.write_bytes(bytes(2 * 2**20))
    (found,) = mistakes(kit, "harness.limits.disk_mb=1")
    file.unlink()
    assert found == "harness.limits.disk_mb: train-0's environment/ takes 2, more than a workspace may (1): raise it"


def test_what_lets_anybody_write_weights_is_refused_until_the_user_answers_for_the_network(kit: RunKit):
    words = "transfer.mooncake_trusts_network: Mooncake lets whoever reaches a node's ports read and overwrite"
    assert words in "".join(mistakes(kit, "transfer.transport=mooncake"))
    assert words not in "".join(mistakes(kit, "transfer.transport=mooncake", "transfer.mooncake_trusts_network=true"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_a_target_of_adapters_is_looked_for_in_the_policy_that_is_still_to_be_made(kit: RunKit, family: str):
    base = ["policy.model=", f"policy.cache={kit.folder}/cache", f"warmup.family={family}", "trainer.lora.rank=2"]
    for targets, num_wrong in (('["q_proj"]', 0), ('["q_prj"]', 1)):
        config = load_run(kit.run_file, [*base, f"trainer.lora.targets={targets}"])
        found = [str(mistake) for mistake in mistakes_in(config, with_model=True)]
        assert len(found) == num_wrong, found
        assert all(mistake.startswith("trainer.lora.targets: no linear layer") and "q_proj" in mistake for mistake in found)
