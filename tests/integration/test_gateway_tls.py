"""The TCP listener of a gateway with a certificate of its own; the socket of sandboxes stays as it was."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.gateway.listener import tls_context
from qwengyre.gateway.serve import GatewayServer
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.testing.tokenizers import write_byte_tokenizer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl"),
]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself, and its key."""
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    key.chmod(0o600)
    return made, key


async def test_harnesses_reach_it_by_https_and_sandboxes_by_its_socket_as_before(tmp_path: Path, certificate: tuple[Path, Path]):
    made, key = certificate
    config = GatewayProcessConfig(
        model=str(write_byte_tokenizer(tmp_path / "model")),
        journal=str(tmp_path / "journal"),
        secret_file=str(tmp_path / "secret"),
        control_socket=str(tmp_path / "c.sock"),
        harness_socket=str(tmp_path / "h" / "h.sock"),
        port=0,
        gateway=GatewayConfig(renderer={"name": "qwen3"}, tls_certificate=str(made), tls_key=str(key)),
    )
    async with GatewayServer(config) as server:
        owner = GatewayClient([tmp_path / "c.sock"], 60.0)
        opened = await owner.open(OpenExecution("e000001-0"))
        owner.close()
        url = config.gateway.url(0, server.listening.port)
        assert url == f"https://127.0.0.1:{server.listening.port}"
        headers = {"authorization": f"Bearer {opened.key}"}
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=made), headers=headers) as http:
            assert (await http.get(f"{url}/v1/models")).json()["data"][0]["id"] == "policy"
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"{url}/v1/models")
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{server.listening.port}/v1/models")
        over_unix = httpx.AsyncHTTPTransport(uds=str(tmp_path / "h" / "h.sock"))
        async with httpx.AsyncClient(transport=over_unix, headers=headers) as http:
            assert (await http.get("http://gateway/v1/models")).status_code == 200


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, certificate: tuple[Path, Path]):
    made, key = (str(path) for path in certificate)
    (tmp_path / "locked.pem").touch(mode=0o600)
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", key, "-out", tmp_path / "locked.pem"],
        check=True,
        capture_output=True,
    )
    (tmp_path / "other.pem").touch(mode=0o600)
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "other.pem"], check=True, capture_output=True
    )
    for wrong, expected in [
        (("none.pem", key), "gateway.tls_certificate: cannot be read: No such file"),
        ((made, "none.pem"), "gateway.tls_key: cannot be read: No such file"),
        ((key, key), "no PEM certificate with its key"),
        ((made, str(tmp_path / "locked.pem")), "no PEM certificate with its key, without a password"),
        ((made, str(tmp_path / "other.pem")), "no PEM certificate with its key"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            tls_context(GatewayConfig(tls_certificate=wrong[0], tls_key=wrong[1]))
    Path(key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"gateway\.tls_key: others can read this key: chmod 600 it"):
        tls_context(GatewayConfig(tls_certificate=made, tls_key=key))
