"""A model by its name on the hub: fetched once with the real client from a server that speaks as the hub does, and refused with what to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration
REVISION = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny"


class Hub:
    """The two requests of the hub's API that a download makes, of one repository; `asked` counts what was sent of it."""

    def __init__(self, folder: Path):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"pytorch_model.bin": b"a pickle"}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        name = path.rpartition("/")[2]
        body, headers, status = b"", {}, 404
        if path.startswith(f"/api/models/{NAME}/revision/") and name in ("main", REVISION):
            siblings = [{"rfilename": file} for file in self.files]
            body, status = json.dumps({"id": NAME, "sha": REVISION, "siblings": siblings}).encode(), 200
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in self.files.items()]
            body, status = json.dumps(listed).encode(), 200
        elif path == f"/{NAME}/resolve/{REVISION}/{name}" and name in self.files:
            body, status = self.files[name], 200
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
            if request.command == "GET":
                self.asked.append(name)
        elif path.startswith(f"/api/models/{NAME}/"):
            headers = {"X-Error-Code": "RevisionNotFound"}
        else:
            headers = {"X-Error-Code": "RepoNotFound"}
        request.send_response(status)
        for key, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = write_byte_tokenizer(tmp_path / "source")
    write_tiny_qwen3(model, vocab_size=byte_tokenizer().get_vocab_size())
    hub = Hub(model)
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


FETCH = "import sys\nfrom qwengyre.runtime.run_config import load_run\nprint(load_run(*sys.argv[1:2], sys.argv[2:], print).policy.model)"


def load(folder: Path, endpoint: str, name: str, *, code: str = FETCH, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its variables once."""
    variables = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, **more}
    words = [sys.executable, "-c", code, str(folder / "run.toml"), f"policy.model={json.dumps(name)}"]
    return subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True)


def test_a_model_is_fetched_once_and_recorded_by_its_revision(tmp_path: Path, hub: Hub):
    RunKit(tmp_path)
    for name in (NAME, f"{NAME}@{REVISION}"):
        done = load(tmp_path, hub.url, name)
        assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.is_absolute() and folder.name == REVISION and (folder / "model.safetensors").is_file()
    assert sorted(hub.asked) == sorted(file for file in hub.files if file != "pytorch_model.bin"), "once, and no pickle"
    offline = load(tmp_path, "http://127.0.0.1:1", NAME, HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines()[-1] == str(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/other", "no such folder here, and no such model on the hub"),
        (f"{NAME}@elsewhere", "no revision 'elsewhere'"),
    ],
)
def test_what_the_hub_does_not_have_is_said(tmp_path: Path, hub: Hub, name: str, message: str):
    RunKit(tmp_path)
    done = load(tmp_path, hub.url, name)
    assert done.returncode != 0 and message in done.stderr and "policy.model" in done.stderr


def test_without_a_network_the_folder_and_the_hub_are_both_named(tmp_path: Path):
    RunKit(tmp_path)
    done = load(tmp_path, "http://127.0.0.1:1", "models/mine", HF_HUB_OFFLINE="1")
    assert "models/mine: there is no such folder here, and the hub cannot be reached" in done.stderr


def test_config_check_fetches_nothing_and_says_so(tmp_path: Path, hub: Hub):
    RunKit(tmp_path)
    code = "from qwengyre.cli.main import main; import sys; sys.argv[1:] = ['config', 'check', sys.argv[1], '--set', sys.argv[2]]; main()"
    done = load(tmp_path, hub.url, NAME, code=code)
    assert done.returncode == 0, done.stderr
    assert f"there is no folder {NAME} here, so it is fetched from the hub when the run starts" in " ".join(done.stdout.split())
    assert not hub.asked
