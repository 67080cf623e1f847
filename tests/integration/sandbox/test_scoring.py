"""What the evaluator sees, and what counts as a score."""

from __future__ import annotations

import textwrap

import pytest

from qwengyre.core.records import End, Validity
from qwengyre.testing.sandbox_kit import HELLO

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("test_sh", "reason"),
    [
        ("exit 7", "exit code 7, and the evaluator wrote neither"),
        ('echo nan > "$VERIFIER_DIR/reward.txt"', "nan, which is not a score"),
        ('echo 1.5 > "$VERIFIER_DIR/reward.txt"', "outside [0, 1]"),
        ('echo {} > "$VERIFIER_DIR/reward.json"', "must hold a number"),
        ('ln -s /etc/hostname "$VERIFIER_DIR/reward.txt"', "cannot be read"),
        ('mkfifo "$VERIFIER_DIR/reward.txt"', "not a regular file"),
        ('head -c 100000 /dev/zero > "$VERIFIER_DIR/reward.txt"', "bytes"),
        ("echo broken evaluator; kill -9 $$", "broken evaluator"),
    ],
)
def test_an_evaluator_failure_is_retried_then_dropped(kit, test_sh, reason):
    outcome = kit.run(kit.task(HELLO, test_sh), kit.config(evaluator_tries=2))
    assert (outcome.end, outcome.validity, outcome.score) == (End.EVALUATOR_FAILED, Validity.DROPPED, 0.0)
    assert outcome.evaluator_tries == 2 and reason in outcome.detail and len(outcome.scored_state) == 32


def test_an_evaluator_timeout_is_a_failure(kit):
    outcome = kit.run(kit.task(HELLO, "sleep 600"), kit.config(evaluator_tries=1, verifier_timeout_s=0.5))
    assert outcome.end is End.EVALUATOR_FAILED and "did not end within 0.5 s" in outcome.detail


def test_a_score_of_zero_is_a_score(kit):
    outcome = kit.run(kit.task("pass"), kit.config())
    assert (outcome.end, outcome.validity, outcome.score, outcome.evaluator_tries) == (End.EXITED, Validity.VALID, 0.0, 1)


def test_each_try_of_the_evaluator_sees_what_the_harness_left(kit):
    counter = kit.folder / "tasks/hello/tests/count"
    test_sh = (
        f'test -f hello && rm hello && echo 1 > "$VERIFIER_DIR/reward.txt" && [ $(cat {counter} 2>/dev/null || echo 2) = 2 ]\n'
    )
    flaky = 'if [ "$(( RANDOM ))" -ge 0 ] && [ -f hello ]; then rm hello; echo oops > "$VERIFIER_DIR/reward.txt"; else exit 1; fi'
    outcome = kit.run(kit.task(HELLO, flaky), kit.config(evaluator_tries=3))
    assert outcome.evaluator_tries == 3 and "oops" in outcome.detail
    outcome = kit.run(kit.task(HELLO, test_sh), kit.config())
    assert outcome.score == 1.0
    assert (kit.folder / "tasks/hello/tests/test.sh").read_text() == test_sh


def test_a_harness_cannot_alter_how_it_is_scored(kit, start):
    code = """
        import os, stat
        for name in ("bash", "python3", "cat", "test"):
            open(name, "w").write("#!/bin/sh\\necho 1 > ${VERIFIER_DIR:-/logs/verifier}/reward.txt; exit 0\\n")
            os.chmod(name, 0o755)
        for name in (".bashrc", ".profile", ".bash_profile", "sitecustomize.py", "os.py", "usercustomize.py"):
            open(name, "w").write("import sys; open('/logs/verifier/reward.txt', 'w').write('1')")
        os.makedirs("tests", exist_ok=True)
        open("tests/test.sh", "w").write("echo 1 > /logs/verifier/reward.txt")
        os.symlink("/logs/verifier", "logs")
        os.system("(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)")
    """
    judge = 'python3 -I -S -c \'import os; open(os.environ["VERIFIER_DIR"] + "/reward.txt", "w").write("0.25")\''
    outcome = kit.run(kit.task(textwrap.dedent(code), judge), kit.config(start))
    assert (outcome.end, outcome.score) == (End.EXITED, 0.25), outcome.detail


def test_the_evaluator_has_no_network_and_the_task_variables(kit):
    test_sh = (
        'python3 -I -S -c \'import os; print(len(os.listdir("/sys/class/net")) if os.path.exists("/sys") else 0)\'\n'
        '[ "$COLOR $SHAPE" = "red round" ] && [ -z "$OPENAI_API_KEY" ] && [ ! -e /run/qwengyre ] && [ -f /tests/test.sh ] '
        "&& ! (exec 3<>/dev/tcp/127.0.0.1/8377) 2>/dev/null && echo 1 > /logs/verifier/reward.txt\n"
    )
    toml = 'env = { COLOR = "red" }\n[environment]\nenv = { SHAPE = "round" }\n'
    outcome = kit.run(kit.task("pass", test_sh, toml=toml), kit.config())
    assert outcome.score == 1.0, outcome.detail
