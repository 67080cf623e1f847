"""Keys and URL tokens of executions: derived from one secret, so that nothing secret is ever written but the secret itself."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId

_SECRET_BYTES = 32


class Keys(msgspec.Struct, frozen=True):
    """What opens one execution: either is enough, and a wrong key on a right path opens nothing."""

    key: str
    """Sent as `Authorization: Bearer` or `x-api-key`."""
    path_secret: str
    """In the path: `/e/<secret>/v1/...`."""

    @property
    def path(self) -> str:
        return f"/e/{self.path_secret}/v1"


def load_secret(file: str | Path) -> bytes:
    """Read the secret, or make it (mode 0600). Raises ConfigError when others can read it."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ConfigError("others can read this secret: chmod 600 it", file=str(path)) from None
        secret = path.read_bytes()
        if len(secret) != _SECRET_BYTES:
            raise ConfigError("not a gateway secret: delete the file to get a new one", file=str(path)) from None
        return secret
    with os.fdopen(descriptor, "wb") as out:
        secret = secrets.token_bytes(_SECRET_BYTES)
        out.write(secret)
        out.flush()
        os.fsync(out.fileno())
    return secret


def derive(secret: bytes, execution: ExecutionId, attempt: int) -> Keys:
    """The keys of one attempt of an execution. They are the same after a restart of the gateway."""

    def derived(purpose: str) -> str:
        return hmac.new(secret, f"{purpose}\0{execution}\0{attempt}".encode(), hashlib.sha256).hexdigest()

    return Keys(key=f"sk-qg-{derived('key')[:48]}", path_secret=derived("path")[:32])


def fingerprint(key: str) -> bytes:
    """What a key is looked up by: the table of keys holds no key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
