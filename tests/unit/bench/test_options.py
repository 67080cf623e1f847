"""Options that no bench can measure with are refused in a line, before anything is measured."""

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application


@pytest.mark.parametrize(
    "words, message",
    [
        ("weights --satellites 0", "'--satellites': Input should be greater than or equal to 1"),
        ("weights --gigabytes -1", "'--gigabytes': Input should be greater than or equal to 0.001"),
        ("kv-move --moves 0", "'--moves': Input should be greater than or equal to 1"),
        ("kv-move --transport smh", "the transports are shm, tcp, mooncake, not 'smh'"),
        ("role-switch --switches 0", "'--switches': Input should be greater than or equal to 1"),
        ("embedded --kernels c", "'--kernels': Value error, 'c' is not one of 'auto', 'native', 'torch'"),
        ("elastic --policies elastic,colocat", "error: --policies: 'colocat' is not one of elastic, async"),
        ("tree-training --size small --only nothing", "error: --only: no case has 'nothing' in its name"),
        ("tree-training --methods chain", "error: --methods: 'chain' is not one of flattened, dense, chains"),
        ("launch --isolation docker", "'--isolation': Value error, 'docker' is not one of 'bwrap', 'none'"),
    ],
)
def test_what_cannot_be_measured_with_is_refused(words: str, message: str):
    given = ["bench", *words.split()]
    result = CliRunner().invoke(application(given), given, env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.exception
    assert message in " ".join(result.stderr.split())
