"""Results go where --json says, words for people never do."""

import importlib
import inspect
import json

import msgspec
import pytest
from typer.testing import CliRunner

from qwengyre.bench import COMMANDS
from qwengyre.bench.output import say
from qwengyre.cli.json_output import write_json
from qwengyre.cli.main import application
from qwengyre.core.errors import ConfigError


class Figures(msgspec.Struct):
    ratio: float


def test_results_go_to_standard_output_and_words_to_stderr(capsys):
    say("half as long")
    write_json("-", [Figures(0.5)])
    out, err = capsys.readouterr()
    assert json.loads(out) == [{"ratio": 0.5}]
    assert err == "half as long\n"


def test_results_go_into_a_file(tmp_path, capsys):
    write_json(str(tmp_path / "x.json"), Figures(0.5))
    assert json.loads((tmp_path / "x.json").read_text()) == {"ratio": 0.5}
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be written: Is a directory$"):
        write_json(str(tmp_path), Figures(0.5))


def test_a_file_without_a_folder_is_refused_before_anything_is_measured(tmp_path):
    words = ["bench", "memory", "--json", str(tmp_path / "none" / "x.json")]
    result = CliRunner().invoke(application(words), words, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "none is not a folder" in result.stderr and "'--json'" in result.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_bench_that_gives_json_takes_a_file_or_a_dash(name):
    module, _, function = COMMANDS[name][0].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert "as_json" not in parameters and "json_path" not in parameters
