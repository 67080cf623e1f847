"""Results go where --json says, words for people never do."""

import importlib
import inspect
import json

import msgspec
import pytest

from qwengyre.bench import COMMANDS
from qwengyre.bench.output import say, write_json


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


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_bench_that_gives_json_takes_a_file_or_a_dash(name):
    module, _, function = COMMANDS[name][0].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert "as_json" not in parameters and "json_path" not in parameters
