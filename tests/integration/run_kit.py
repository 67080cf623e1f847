"""A whole run in seconds: a random tiny policy, a harness of the standard library, tasks that score what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, ExecutionDone
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import read_metrics
from qwengyre.telemetry.records import MetricRecord
from qwengyre.telemetry.summary import Summary, read_summary
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer

HARNESS = '''
import http.client, json, os, sys, time, urllib.request

def ask(messages):
    """One call; a gateway that is being started again is asked again."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    for attempt in range(60):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["message"]["content"] or ""
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
    sys.exit("the gateway does not come back")

messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": sys.argv[1]}]
for turn in range(int(os.environ["TURNS"])):
    said = ask(messages)
    with open("answer", "a") as file:
        file.write(said)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
'''

TEST_SH = """python3 -I -S -c '
import os
answer = open("answer", errors="replace").read() if os.path.exists("answer") else ""
score = sum(letter.isalpha() for letter in answer) / max(1, len(answer))
open(os.environ["VERIFIER_DIR"] + "/reward.txt", "w").write(str(score))
'
"""

RUN = """
[runtime]
name = "tiny"
seed = 3
heartbeat_s = 0.5

[tasks]
train = {train}
held_out = {held_out}

[policy]
model = {model}
max_tokens_per_call = {max_tokens}
max_context_tokens = 1024

[gateway]
renderer = {{ enable_thinking = false }}

[evaluation]
samples = 2
at_start = false

[harness]
command = [{python}, {harness}, "{{instruction}}"]
isolation = "none"
env = {{ TURNS = "{turns}" }}

[scheduler]
num_cells = 3
slots_per_cell = 4
steps = {steps}
groups_per_step = 2
executions_per_group = 4
steps_per_burst = 2
dispatch_depth = 0.5

[engine]
max_context_tokens = 1024
kv_blocks = 512

[trainer]
learning_rate = 1e-3
clip_low = 0.5
clip_high = 0.5
"""


class RunKit:
    """Everything a tiny run needs, in one folder."""

    def __init__(self, folder: Path, *, steps: int = 4, turns: int = 3, max_tokens: int = 24):
        self.folder = folder
        model = write_byte_tokenizer(folder / "model")
        write_tiny_qwen3(model, vocab_size=byte_tokenizer().get_vocab_size())
        for name, count in (("train", 3), ("held-out", 2)):
            for index in range(count):
                self.task(folder / name / f"{name}-{index}")
        harness = folder / "harness.py"
        harness.write_text(HARNESS)
        self.run_file = folder / "run.toml"
        paths = {
            "train": folder / "train",
            "held_out": folder / "held-out",
            "model": model,
            "harness": harness,
            "python": sys.executable,
        }
        quoted = {name: json.dumps(str(path)) for name, path in paths.items()}
        self.run_file.write_text(RUN.format(**quoted, steps=steps, turns=turns, max_tokens=max_tokens))

    def task(self, folder: Path, test_sh: str = TEST_SH) -> None:
        (folder / "environment").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 300.0\n[verifier]\ntimeout_sec = 60.0\n')
        (folder / "instruction.md").write_text(f"Write letters about {folder.name}.\n")
        (folder / "tests" / "test.sh").write_text(test_sh)

    def start(self, *arguments: str) -> subprocess.Popen:
        """The program, with its output in `output.log`: the kit's run, unless `arguments` resume one."""
        program = [sys.executable, "-c", "from qwengyre.cli.main import main; main()", "train"]
        given = [] if "--resume" in arguments else [str(self.run_file), "--runs-dir", str(self.folder / "runs")]
        with open(self.folder / "output.log", "ab") as log:  # the child has it, too
            return subprocess.Popen([*program, *given, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def run(self, *arguments: str) -> RunFolder:
        """Start, wait for the end, and give the run's folder."""
        process = self.start(*arguments)
        assert process.wait() == 0, self.output()
        return self.run_folder()

    def output(self, *, whole: bool = False) -> str:
        text = (self.folder / "output.log").read_text(errors="replace")
        return text if whole else text[-6000:]

    def run_folder(self) -> RunFolder:
        [path] = (self.folder / "runs").iterdir()
        return RunFolder(path)

    def has_begun(self) -> bool:
        runs = self.folder / "runs"
        return runs.exists() and any(runs.iterdir())

    def wait_until(self, holds: Callable[[], bool], process: subprocess.Popen) -> None:
        """Poll the run's files; fails when the program ends before it holds."""
        while not holds():
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the run ended ({code}) before:\n{self.output()}")


def executions_done(folder: RunFolder) -> dict[str, ExecutionDone]:
    """Finished executions by the controller's journal. An execution that finished twice fails."""
    found: dict[str, ExecutionDone] = {}
    if folder.controller_journal.exists():
        for _, record in read(folder.controller_journal, ControllerRecord):
            if isinstance(record, ExecutionDone):
                assert record.execution not in found, f"{record.execution} finished twice"
                found[record.execution] = record
    return found


def metrics(folder: RunFolder, kind: type[MetricRecord]) -> list:
    return [record for record in read_metrics(folder.metrics) if isinstance(record, kind)]


def summary(folder: RunFolder) -> Summary:
    found = read_summary(folder.summary)
    assert found is not None
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def children(pid: int, marks: tuple[str, ...]) -> list[int]:
    """Children of `pid` whose command line holds every one of `marks`."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if all(any(mark in word for word in command) for mark in marks):
            found.append(int(child))
    return found
