"""What the gateway needs to know. The run file has these as `[gateway]`; the runtime writes the process its own file."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from qwengyre.core.ids import LocalPath
from qwengyre.rpc.tls import TlsConfig

MAX_PROCESSES: Final = 64
"""More than a machine has cores for is a slip of the pen."""
MAX_PORT: Final = 65535
PLACES: Final = re.compile(r"\{(?:gateway|port)\}")
ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})
"""What listens everywhere is reached on this machine by its loopback address."""


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[gateway]` table of a run file."""

    renderer: dict[str, str | bool | int] = msgspec.field(default_factory=lambda: {"name": "auto"})
    """`name` of a renderer of the `renderers` package, and its settings (`enable_thinking`, `thinking_retention`). `auto` finds it in
    the model's folder; `default` is the folder's own chat template."""
    max_context_tokens: int = 32768
    """Longest prompt and answer together; an execution may be opened with less."""
    max_tokens_per_call: int = 4096
    """Most tokens of one answer."""
    max_body_bytes: int = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    max_calls_per_execution: int = 64
    """Calls of one execution at once, and requests that are read or counted at once; more are refused with 429."""
    max_unread_bytes_per_execution: int = 128 * 1024 * 1024
    """Bodies of one execution that arrive or wait to be read, together; more are refused with 429."""
    max_journal_bytes_per_execution: int = 1024 * 1024 * 1024
    """What is recorded of one execution: 4 bytes for each prompt token that is new in its call, 8 for each sampled one, and some hundred for
    each call. Further calls are refused with 403."""
    keep_alive_s: float = 10.0
    """How often a client that waits for its stream hears something in its own dialect."""
    max_hold_s: float = 3600.0
    """Longest wait of a call for a server; then the client gets a 503."""
    headers_after_s: float = 1.0
    """A stream's headers leave with its first token or after this long, whichever comes first."""
    body_timeout_s: float = 60.0
    """Longest wait for the next part of a request body."""
    sync: Literal["os", "disk"] = "os"
    """What a journalled token survives: any kill of our processes, or a power cut, too."""
    processes: int = 1
    """Gateways of a run, each a process with a journal of its own. Executions are shared out among them by their name; one process
    carries what one processor core can."""
    host: str = "127.0.0.1"
    """Address that gateways listen on for harnesses without a sandbox, or outside of this machine. A run with `isolation = "bwrap"`
    needs none."""
    port: int = 0
    """TCP port of the first gateway, the next has the next one; 0 takes free ones."""
    public_url: str = ""
    """What harnesses without a sandbox are told instead of `http://HOST:PORT`, such as `https://gateway.example.org/{gateway}` behind a
    reverse proxy: `{gateway}` is the number of the gateway from 0 on, `{port}` its port."""
    tls_certificate: LocalPath = LocalPath("")
    """PEM file with the certificate, and those between it and its root: then the TCP port speaks HTTPS."""
    tls_key: LocalPath = LocalPath("")
    """PEM file with the certificate's key; only its owner may read it. Harnesses trust the certificate by the authorities they have, or by
    variables such as SSL_CERT_FILE in `harness.env`."""

    def __post_init__(self) -> None:
        for key in (
            "max_context_tokens",
            "max_tokens_per_call",
            "max_body_bytes",
            "max_calls_per_execution",
            "max_journal_bytes_per_execution",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if self.max_unread_bytes_per_execution < self.max_body_bytes:
            raise ValueError(
                "max_unread_bytes_per_execution must be at least max_body_bytes, or no execution could send that much"
            )
        for key in ("keep_alive_s", "max_hold_s", "body_timeout_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be above 0")
        if not self.headers_after_s >= 0:
            raise ValueError("headers_after_s must not be negative")
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise ValueError(f"processes must be from 1 to {MAX_PROCESSES}")
        if not 0 <= self.port <= MAX_PORT - self.processes + 1:
            raise ValueError("port must leave room for one port of each of the gateways: they go from 0 to 65535")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key go together")
        self._check_public_url()

    def _check_public_url(self) -> None:
        if not self.public_url:
            return
        said = PLACES.sub("", self.public_url)
        if not re.fullmatch(r"https?://[^\s{}?#]+", said):
            raise ValueError("public_url must be http://... or https://..., with no other places than {gateway} and {port}")
        if self.processes > 1 and said == self.public_url:
            raise ValueError("public_url must name {gateway} or {port}: an execution has its own of several gateways")

    def url(self, gateway: int, port: int | None) -> str:
        """Where harnesses outside of a sandbox reach gateway number `gateway`, which listens on `port`; empty without a port.

        >>> GatewayConfig(processes=2, public_url="https://g.example.org/{gateway}").url(1, 8400)
        'https://g.example.org/1'
        >>> GatewayConfig().url(0, 8400)
        'http://127.0.0.1:8400'
        """
        if port is None:
            return ""
        if self.public_url:
            return self.public_url.replace("{gateway}", str(gateway)).replace("{port}", str(port)).rstrip("/")
        host = "127.0.0.1" if self.host in ANY_ADDRESS else self.host
        return f"http{'s' if self.tls_certificate else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class GatewayProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file that `python -m qwengyre.gateway --config FILE` reads (TOML, or JSON when it ends in .json)."""

    model: str
    """Folder with tokenizer.json."""
    journal: str
    """The gateway's own journal; replayed at start."""
    secret_file: str
    """Keys are derived from it; made with mode 0600 if missing. Lose it and running harnesses lose access."""
    control_socket: str
    """Unix socket for the owner's requests (gateway/control_api.py). Only its owner can open it."""
    port: int | None = None
    """TCP port for harnesses, at `gateway.host`; 0 takes a free one, absent opens none."""
    harness_socket: str | None = None
    """Unix socket for harnesses, mounted into the sandbox."""
    ready_file: str | None = None
    """Written once both listeners answer: {"pid", "port", "harness_socket", "control_socket"}."""
    number: int = 0
    """Of `gateway.processes`, from 0 on: it numbers its sessions `number`, `number + processes`, ... so that the journals of a run join."""
    harness_rules: str = ""
    """TOML file with `[[harness]]` tables for harnesses of your own (docs/harnesses.md)."""
    tls: TlsConfig = TlsConfig()
    """Of the run, for the way to engines."""
    gateway: GatewayConfig = GatewayConfig()

    def __post_init__(self) -> None:
        if self.port is None and self.harness_socket is None:
            raise ValueError("port or harness_socket must be set: harnesses need a way in")
        if not 0 <= self.number < self.gateway.processes:
            raise ValueError("number must be below gateway.processes")
