"""What harnesses leave to hurt the run, or to be scored for what they have not done: each earns what its honest part is worth."""

from __future__ import annotations

import textwrap
import threading

import pytest

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox import tree
from qwengyre.testing.sandbox_kit import HELLO, Kit, calls, spec

pytestmark = pytest.mark.integration

MADE = {
    "1,100 folders deep": "for _ in range(1100): os.mkdir('d'); os.chdir('d')",
    "past the longest path": "for _ in range(40): os.mkdir('n' * 250); os.chdir('n' * 250)",
    "3,000 folders": "for n in range(3000): os.mkdir(f'd{n}')",
    "sparse files": "for n in range(50): f = open(f's{n}', 'wb'); f.truncate(2**28); f.close()",
    "many names of one file": "open('one', 'wb').write(bytes(2**20)); [os.link('one', f'n{n}') for n in range(500)]",
    "pipes, sockets and loops": (
        "os.mkfifo('p'); s = __import__('socket').socket(1); s.bind('s'); os.symlink('l', 'l'); os.symlink('.', 'here')"
    ),
    "names that are no text": (
        "[open(n, 'w').close() for n in (b'\\xff\\xfe', b'a\\nb', b'\\x1b[2J', b'-rf', b' ', b'\\xe2\\x80\\xae')]"
    ),
    "nothing allowed": "os.makedirs('a/b'); open('a/b/c', 'w').close(); [os.chmod(n, 0) for n in ('a/b/c', 'a/b', 'a', '.')]",
}


@pytest.mark.parametrize("made", MADE)
def test_honest_work_beside_it_is_scored_and_nothing_is_left(kit, start, made):
    outcome = kit.run(kit.task(f"import os\n{HELLO}\n{MADE[made]}"), kit.config(start))
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.75), outcome.detail
    assert not list((kit.folder / "work").glob("e0*"))


@pytest.mark.parametrize("made", MADE)
def test_what_fails_is_kept_whatever_is_in_it(kit, made):
    outcome = kit.run(kit.task(f"import os, sys\n{HELLO}\n{MADE[made]}\nsys.exit(3)"), kit.config())
    assert (outcome.end, outcome.score) == (End.CRASHED, 0.75)
    assert (kit.folder / "failed/e000001-0.0/workspace").exists() and not list((kit.folder / "work").glob("e0*"))
    tree.remove_tree(kit.folder / "failed")


def test_folders_are_walked_in_threads_alone(kit, start, monkeypatch):
    """The loop that serves all other executions waits for none of it."""
    walked: set[str] = set()

    def listing(folder: int, at_most: int | None = None) -> list[tuple[str, bool]]:
        walked.add(threading.current_thread().name)
        return original(folder, at_most)

    original = tree.listing
    for module in ("tree", "workspace"):
        monkeypatch.setattr(f"qwengyre.sandbox.{module}.listing", listing)
    monkeypatch.setattr("qwengyre.sandbox.disk_watch.PERIOD_S", 0.0)
    code = f"import os\nfor n in range(200): os.mkdir(f'd{{n}}')\n{HELLO}\nos._exit(3)"
    outcome = kit.run(kit.task(code), kit.config(start))
    assert outcome.score == 0.75 and walked and all(name.startswith("workspaces") for name in walked), walked


JUDGE = """
if [ "$(cat answer.txt 2>/dev/null)" = "$(cat "$TESTS_DIR/expected.txt")" ]; then echo 1; else echo 0; fi > "$VERIFIER_DIR/reward.txt"
"""
LINKS = {
    "to the tests": "os.symlink('/tests/expected.txt', 'answer.txt')",
    "out and back in": "os.symlink('../tests/expected.txt', 'answer.txt')",
    "by the other name of the workspace": "os.symlink('/app/../tests/expected.txt', 'answer.txt')",
    "by the root of a process": "os.symlink('/proc/self/root/tests/expected.txt', 'answer.txt')",
    "by its working folder": "os.symlink('/proc/self/cwd/../tests/expected.txt', 'answer.txt')",
    "over a folder": "os.symlink('/tests', 'd'); os.symlink('d/expected.txt', 'answer.txt')",
    "over the folder above": "os.symlink('..', 'up'); os.symlink('up/tests/expected.txt', 'answer.txt')",
    "over folders that exist": "os.makedirs('a/b'); os.symlink('../../..', 'a/b/c'); os.symlink('a/b/c/tests/expected.txt', 'answer.txt')",
    "over many links": "os.symlink('/tests', 'l0'); [os.symlink(f'l{n}', f'l{n+1}') for n in range(20)]; os.symlink('l20/expected.txt', 'answer.txt')",
    "with empty parts": "os.symlink('//tests///./expected.txt', 'answer.txt')",
    "over /usr": "os.symlink('/usr/../tests/expected.txt', 'answer.txt')",
}


def judged(kit: Kit, start: str, code: str) -> Outcome:
    task = kit.task(f"import os\n{code}", JUDGE, files={"tests/expected.txt": "42\n"})
    return kit.run(task, kit.config(start))


@pytest.mark.parametrize("link", LINKS)
def test_a_link_to_the_expected_answer_leads_nowhere(kit, start, link):
    outcome = judged(kit, start, LINKS[link])
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.0), outcome.detail


@pytest.mark.parametrize(
    "code",
    [
        "open('answer.txt', 'w').write('42')",
        "os.mkdir('d'); open('d/a', 'w').write('42'); os.symlink('/workspace/d/a', 'answer.txt')",
    ],
)
def test_links_within_the_workspace_are_scored(kit, start, code):
    assert judged(kit, start, code).score == 1.0


RUNS_IT = (
    'python3 -I -S -c \'exec(open("answer.py").read())\nopen("/logs/verifier/reward.txt", "w").write(str(float(f(2) == 4)))\'\n'
)
OR_ZERO = f"[ -f answer.py ] || {{ echo 0 > $VERIFIER_DIR/reward.txt; exit; }}\n{RUNS_IT}"
BREAKS = {
    "ends the scorer": "import os; os._exit(0)",
    "fails in it": "raise SystemExit(3)",
    "kills it": "import os; os.kill(os.getpid(), 9)",
    "hangs": "import time; time.sleep(600)",
    "closes its files": "import os; os.closerange(0, 99); os._exit(4)",
    "takes the place of the reward": "import os; os.mkdir('/logs/verifier/reward.txt')",
    "writes nonsense": "import os; open('/logs/verifier/reward.txt', 'w').write('nan'); os._exit(0)",
    "writes too much": "import os\nfor n in range(300): open(f'f{n}', 'wb').write(bytes(2**20))\nos._exit(0)",
}


@pytest.mark.parametrize("scorer", [RUNS_IT, OR_ZERO], ids=["fails untouched", "scores untouched"])
@pytest.mark.parametrize("breaks", BREAKS)
def test_a_workspace_that_lets_the_scorer_give_nothing_earns_nothing(kit, scorer, breaks):
    """It is not dropped: a policy could drop its own bad executions."""
    config = kit.config(evaluator_tries=2, verifier_timeout_s=3.0 if breaks == "hangs" else None)
    outcome = kit.run(kit.task(f"open('answer.py', 'w').write({BREAKS[breaks]!r})", scorer), config)
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.0), outcome.detail
    assert outcome.evaluator_tries == 2 and "scored 0: in this workspace tests/test.sh" in outcome.detail


def test_the_lowest_score_is_that_of_the_task(kit):
    task = kit.task(
        "open('answer.py', 'w').write('import os; os._exit(0)')", OR_ZERO, toml="[metadata]\nreward_range = [-2, 1]\n"
    )
    assert kit.run(task, kit.config(evaluator_tries=1)).score == -2.0


async def test_a_scorer_that_fails_on_what_nobody_touched_but_has_scored_others_is_not_to_blame(kit):
    """It says nothing of a workspace without an answer, in the same words each time."""
    test_sh = 'if [ -f answer ]; then echo 1 > "$VERIFIER_DIR/reward.txt"; else exit 5; fi'

    async with kit.launcher(kit.config(evaluator_tries=1)) as launcher:
        outcomes = []
        for number, code in enumerate(("pass", "open('answer', 'w').close()", "pass")):
            outcomes.append(await launcher.run_execution(spec(kit.task(code, test_sh), f"e{number:06d}-0"), calls(1)))
        found = [(outcome.validity, outcome.score) for outcome in outcomes]
    assert found == [(Validity.DROPPED, 0.0), (Validity.VALID, 1.0), (Validity.VALID, 0.0)]


async def test_time_that_runs_out_over_a_hanging_scorer_is_no_way_out(kit):
    code = "open('answer.py', 'w').write('import time; time.sleep(600)')"

    config = kit.config(evaluator_tries=1000, verifier_timeout_s=1.0, overall_timeout_s=20.0)
    async with kit.launcher(config) as launcher:
        first = await launcher.run_execution(spec(kit.task("pass", OR_ZERO)), calls(1))
        second = await launcher.run_execution(spec(kit.task(code, OR_ZERO), "e000002-0"), calls(1))
    assert first.validity is Validity.VALID
    assert (second.end, second.validity, second.score) == (End.OVERALL_TIMEOUT, Validity.VALID, 0.0), second.detail
    assert "did not end within 1 s" in second.detail


def test_a_scorer_cannot_fill_the_disk(kit):
    """Code of the workspace that it runs is held to the limits of a harness."""
    flood = "import os, time\ntry:\n  for n in range(60): open(f'f{n}', 'wb').write(os.urandom(2**20))\nexcept OSError: pass\ntime.sleep(600)"
    task = kit.task(textwrap.dedent(f"open('answer.py', 'w').write({flood!r})"), OR_ZERO)
    outcome = kit.run(task, kit.config(evaluator_tries=1, limits={"disk_mb": 20}))
    assert (outcome.validity, outcome.score) == (Validity.VALID, 0.0) and "limits.disk_mb" in outcome.detail
