"""A recording that cannot be replayed is named, and what is wrong with it."""

import gzip

import pytest

from qwengyre.bench.recorded import recorded_trees
from qwengyre.core.errors import ConfigError

WHOLE = gzip.compress(b'{"seq": 0, "path": "/v1/messages"}\n' * 1000)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "this recording is empty"),
        (gzip.compress(b""), "this recording is empty"),
        (WHOLE[:40], "this recording cannot be read: Compressed file ended"),
        (b"not compressed", "this recording cannot be read: Not a gzipped file"),
        (gzip.compress(b"garbage\n"), "this recording cannot be read: Expecting value"),
    ],
)
def test_a_file_that_is_no_recording_is_named(tmp_path, content: bytes, message: str):
    (tmp_path / "claude--basic.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/claude--basic.jsonl.gz: {message}"):
        recorded_trees(["claude--basic"], tmp_path)


def test_a_folder_without_the_recording_says_which_option_to_give(tmp_path):
    with pytest.raises(ConfigError, match="no such recording: run the bench from the repository, or give --captures"):
        recorded_trees(["claude--basic"], tmp_path)
