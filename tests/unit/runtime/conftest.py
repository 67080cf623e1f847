import pytest

from qwengyre.core.records import End, Outcome, Validity


@pytest.fixture
def outcome():
    return Outcome(End.EXITED, Validity.VALID, 0.5, "digest", 1.0)
