"""`qwengyre evaluate`: the real program scores a policy, and a model that is served elsewhere."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import EvaluationFinished
from qwengyre.testing.completions_server import CompletionsServer
from qwengyre.testing.tokenizers import byte_tokenizer
from tests.integration.run_kit import RunKit, children, kill, metrics, summary

pytestmark = pytest.mark.integration
COMMAND = (sys.executable, "-c", "from qwengyre.cli.main import main; main()", "evaluate")


def call(*words: object) -> str:
    arguments = [str(word) for word in words]
    result = CliRunner().invoke(application(arguments), arguments)
    assert result.exit_code == 0, result.output
    return result.output


def arguments(kit: RunKit, *more: str) -> list[str]:
    return [*COMMAND, str(kit.run_file), "--runs-dir", str(kit.folder / "runs"), "--json", "-", *more]


def test_a_policy_is_scored_without_training(tmp_path: Path):
    kit = RunKit(tmp_path)
    done = subprocess.run(arguments(kit, "--set", "evaluation.samples=3"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, folder = json.loads(done.stdout), kit.run_folder()
    assert [task["task"] for task in found["tasks"]] == ["held-out-0", "held-out-1"]
    assert all(len(task["scores"]) == 3 and task["greedy"] is not None for task in found["tasks"])
    assert 0 < found["score"] < 1 and found["standard_error"] >= 0
    assert found["score"] == pytest.approx(summary(folder).score_before) == pytest.approx(summary(folder).score_after)
    assert [record.version for record in metrics(folder, EvaluationFinished)] == [0]
    assert not list(folder.checkpoints.iterdir()) and not list(folder.snapshots.iterdir()), "there is no trainer"
    lines = [json.loads(line) for line in call("inspect", folder.path, "--json").splitlines()]
    assert len(lines) == 8 and {line["kind"] for line in lines} == {"evaluation"}
    assert "has finished" in call("train", "--resume", folder.path)


def test_an_evaluation_outlives_its_cells(tmp_path: Path):
    kit = RunKit(tmp_path, turns=6)
    process = subprocess.Popen(
        arguments(kit, "--set", "evaluation.samples=12"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def has_calls() -> bool:
        journal = kit.run_folder().gateway_journal if kit.has_begun() else None
        return journal is not None and journal.exists() and b"e000000-0" in journal.read_bytes()

    kit.wait_until(has_calls, process)
    cells = children(process.pid, ("qwengyre.cell.cell",))
    assert len(cells) == 3
    for pid in cells[:2]:
        kill(pid)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert all(f"cell-{cell} is lost" in errors and f"cell-{cell}: " in errors for cell in (0, 1)), "each with its reason"
    assert [len(task["scores"]) for task in json.loads(output)["tasks"]] == [12, 12]


async def test_a_model_that_is_served_elsewhere_is_scored(tmp_path: Path):
    kit = RunKit(tmp_path)
    answer = byte_tokenizer().encode("abc!<|im_end|>").ids

    async with CompletionsServer(lambda prompt: answer, model="theirs") as server:
        words = arguments(kit, "--engine", server.url, "--tasks", str(kit.folder / "train"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert {body["model"] for body in server.bodies} == {"theirs"}
    found = json.loads(output)
    assert [(task["task"], task["scores"]) for task in found["tasks"]] == [(f"train-{index}", [0.75, 0.75]) for index in range(3)]
    assert (found["score"], found["greedy"], found["standard_error"]) == (0.75, 0.75, 0.0)
    assert len(server.bodies) == 3 * 3 * 3, "three turns of three executions of three tasks"


def test_a_served_model_is_not_trained_and_a_server_that_is_not_there_is_named(tmp_path: Path):
    kit = RunKit(tmp_path)
    words = ["config", "check", str(kit.run_file), "--set", "engine.engine=served", "--set", "engine.url=http://127.0.0.1:1/v1"]
    result = CliRunner().invoke(application(words), [*words, "--set", "engine.served_as=x"])
    assert result.exit_code == 2 and "engine.engine: a served model is evaluated, never trained" in result.output
    words = ["evaluate", str(kit.run_file), "--engine", "http://127.0.0.1:1/v1", "--runs-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 2 and "--engine: http://127.0.0.1:1/v1" in result.output
    assert not kit.has_begun()
    assert not RunFolder(tmp_path / "runs").path.exists()
