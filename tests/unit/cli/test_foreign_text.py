"""Names, outputs and messages of others, on their way to a terminal, a log and a page."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qwengyre.cli import output
from qwengyre.cli.inspect import ExecutionLine, _facts, _listing
from qwengyre.core.errors import ConfigError
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.core.text import html_text
from qwengyre.dashboard.live import LiveScreen
from qwengyre.dashboard.page import page
from qwengyre.dashboard.terminal import SafeConsole
from qwengyre.runtime.give_up import Patience
from qwengyre.telemetry.log_lines import FieldsFormatter

EVIL = "\x1b]0;owned\x07\x1b]52;c;cm0=\x1b\\\x1b[2K\r\x9b31m\u202e\nerror: a line that is not ours"
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
OWN_STYLES = re.compile(r"\x1b\[[0-9;?]*[mhlKA]")
"""What a terminal is told by rich itself: colours, the cursor shown, hidden or moved up, a line erased."""


def terminal() -> SafeConsole:
    return SafeConsole(file=io.StringIO(), force_terminal=True, width=100, color_system="truecolor")


def shown(console: SafeConsole) -> str:
    return OWN_STYLES.sub("", console.file.getvalue())


def test_a_command_says_it_in_escapes(capsys, monkeypatch):
    output.say(f"task {EVIL}")
    output.say(f"error: {EVIL}", err=True, color="red", bold=True)
    found = capsys.readouterr()
    assert not ACTING.search(found.out) and not ACTING.search(OWN_STYLES.sub("", found.err))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.say_data(EVIL)
    assert not ACTING.search(capsys.readouterr().out)


def test_data_for_a_program_is_as_it_is(capsys):
    output.say_data(EVIL)
    assert capsys.readouterr().out == EVIL


@pytest.mark.parametrize("wrap", [Text, lambda text: Panel(Text("x"), title=Text(text)), str], ids=["text", "title", "string"])
def test_a_console_passes_on_no_control_but_its_own(wrap):
    console = terminal()
    table = Table()
    table.add_column("a", style="bold red")
    table.add_row(wrap(EVIL))
    for drawn in (wrap(EVIL), table):
        console.print(drawn)
    assert "\\x1b]0;owned" in shown(console) and not ACTING.search(shown(console))


def test_a_live_screen_says_one_line(capsys):
    console = terminal()
    with LiveScreen(console) as screen:
        screen.say(f"e000001-0: crashed {EVIL}")
        screen.progress(f"warming up {EVIL}")
    lines = [line for line in shown(console).splitlines() if "crashed" in line or line.startswith("error")]
    assert len(lines) == 1 and not ACTING.search(shown(console).replace("\r", ""))


def test_a_listing_has_a_row_for_each_execution_whatever_its_task_is_called():
    line = ExecutionLine("e000001-0", 0, "train", 1, f"[red]{EVIL}", 0.5, "valid", "exited", 1.0, 3, 100, {}, "")
    console = terminal()
    console.print(_listing([line, line], console))
    assert len(shown(console).strip().splitlines()) == 3 and "[red]" in shown(console)
    assert "\n" not in _facts(line)


def test_what_a_harness_said_stands_apart_in_the_error_that_ends_a_run():
    outcome = Outcome(End.NEVER_CALLED, Validity.DROPPED, 0.0, "", 1.0, detail=f"it failed\n{EVIL}")
    with pytest.raises(Exception, match="could not be used") as raised:
        Patience(1).see(outcome)
    assert "\n  | error: a line that is not ours" in str(raised.value) and not ACTING.search(str(raised.value))


def test_a_record_of_a_log_is_one_line_and_a_traceback_has_no_escapes():
    formatter = FieldsFormatter("%(levelname)s %(message)s")
    record = logging.makeLogRecord({"msg": f"lost {EVIL}", "levelname": "INFO", "reason": EVIL})
    assert "\n" not in formatter.format(record) and not ACTING.search(formatter.format(record))
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "exc_info": sys.exc_info()})
    assert "Traceback" in formatter.format(record) and not ACTING.search(formatter.format(record))


def test_a_page_has_no_escapes_in_it():
    assert not ACTING.search(page(EVIL, [f"<p>{html_text(EVIL)}</p>"]).replace("\n", ""))


def test_a_file_in_an_error_is_one_line():
    assert "\n" not in str(ConfigError("is wrong", file=f"tasks/{EVIL}", line=3))


@pytest.mark.parametrize("name", [EVIL.replace("/", ""), os.fsdecode(b"\xff\x1b[2J")])
def test_the_program_itself_shows_hostile_names_and_tracebacks_safely(tmp_path, name):
    (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / name / "x/instruction.md").write_text("")
    missing = tmp_path / name / "nowhere"
    for arguments in (["tasks", "check", str(tmp_path)], ["report", str(missing)], ["--debug", "report", str(missing)]):
        command = [sys.executable, "-c", "from qwengyre.cli.main import main; main()", *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode != 0
        for stream in (done.stdout, done.stderr):
            assert not ACTING.search(stream.decode()), stream
        assert not any(line.startswith(b"error: a line that is not ours") for line in done.stdout.splitlines())
