"""Values of one `task.toml` with the line that each stands on. Every finding is kept, not only the first."""

from __future__ import annotations

import difflib
import math
import re
from typing import Final, Literal

Finding = tuple[int, Literal["error", "warning"], str]
"""Line, severity, message."""

KNOWN: Final[dict[str, frozenset[str]]] = {
    "": frozenset(
        [
            "schema_version",
            "version",
            "task",
            "metadata",
            "agent",
            "verifier",
            "environment",
            "solution",
            "oracle",
            "artifacts",
            "steps",
            "source",
            "multi_step_reward_strategy",
            "multi_step_reward_mode",
            "extra",
        ]
    ),
    "agent": frozenset(
        ["timeout_sec", "user", "network_mode", "allowed_hosts", "env", "mcp_servers", "skills", "setup_timeout_sec"]
    ),
    "verifier": frozenset(
        ["timeout_sec", "env", "user", "environment_mode", "environment", "collect", "network_mode", "allowed_hosts", "inputs"]
    ),
    "environment": frozenset(
        [
            "build_timeout_sec",
            "docker_image",
            "cpus",
            "memory_mb",
            "memory",
            "storage_mb",
            "storage",
            "gpus",
            "gpu_types",
            "allow_internet",
            "mcp_servers",
            "env",
            "skills_dir",
            "healthcheck",
            "workdir",
            "network_mode",
            "allowed_hosts",
            "os",
            "tpu",
            "definition",
        ]
    ),
}
"""The keys of Harbor's schema, 1.0 to 1.4. `metadata`, `task` and the rest may hold anything."""

KEY: Final = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\.(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
"""The key, dotted or quoted, at the start of a line of TOML."""

COMMANDING: Final = re.compile(
    r"(LD|DYLD|GLIBC|MALLOC|BASH|GCONV|RES|NIS)_.*|PYTHON.*|PERL.*|RUBY(OPT|LIB)|NODE_(OPTIONS|PATH)|_?JAVA_(TOOL_)?OPTIONS"
    r"|PATH|HOME|TMPDIR|ENV|IFS|PS4|CDPATH|GLOBIGNORE|PROMPT_COMMAND|(BASH|SHELL)OPTS|LOCPATH|NLSPATH|HOSTALIASES|LOCALDOMAIN"
    r"|RESOLV_HOST_CONF|GETCONF_DIR"
)
"""Variables that loaders, shells and interpreters take orders from: what code they load, which program a name means."""

LONG_KEY: Final = re.compile(r"""(?:(?:[A-Za-z0-9_-]{1,64}+|"[^"\n]{0,64}+"|'[^'\n]{0,64}+')[ \t]*+\.[ \t]*+){50}""")
"""A dotted key that tomllib would take minutes for: it copies what came before each part."""

UNSUPPORTED: Final[dict[tuple[str, str], str]] = {
    ("", "steps"): "tasks of several steps cannot run here: make each step a task",
    ("agent", "mcp_servers"): "MCP servers need a network, which this sandbox does not give",
    ("environment", "mcp_servers"): "MCP servers need a network, which this sandbox does not give",
    ("verifier", "collect"): "collect hooks belong to tasks of several containers, which cannot run here",
}


HEADER: Final = re.compile(r"\s*\[\[?([^\]]+)\]")
MAX_PARTS: Final = 4
"""Of a dotted key: what is deeper is in [metadata], where nothing is looked for."""
MAX_VARIABLE_CHARS: Final = 30_000
"""128 KiB of UTF-8 are what Linux takes as one variable, its name included."""
MAX_UNKNOWN: Final = 50
"""Unknown keys that are named, of each table."""


class TomlReader:
    """Read typed values of a parsed `task.toml`; `findings` grows with what is wrong."""

    def __init__(self, text: str, document: dict[str, object]):
        self._lines = _lines_of(text)
        self.document = document
        self.findings: list[Finding] = []

    def seconds(self, table: str, key: str, default: float) -> float:
        """A positive finite number of seconds."""
        value = self._table(table).get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._error(table, key, f"must be a number of seconds, not {_shown(value)}")
        elif not (_is_finite(value) and value > 0):
            self._error(table, key, f"must be above 0 and finite, not {_shown(value)}")
        else:
            return float(value)
        return default

    def variables(self, table: str, key: str) -> dict[str, str]:
        """A table of environment variables. Values that quote the host's environment (`${X}`) are refused."""
        value = self._table(table).get(key, {})
        if not isinstance(value, dict):
            self._error(table, key, f"must be a table of variables, not {_shown(value)}")
            return {}
        for name, text in value.items():
            if not isinstance(text, str) or "\0" in text:
                self._error(f"{table}.{key}", name, f"must be text, not {_shown(text)}")
            elif len(text) > MAX_VARIABLE_CHARS:
                self._error(
                    f"{table}.{key}", name, f"{len(text):,} characters; at most {MAX_VARIABLE_CHARS:,} fit into a variable"
                )
            elif "${" in text:
                self._error(f"{table}.{key}", name, f"quotes the host's environment ({text}), which no sandbox is given")
            elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                self._error(f"{table}.{key}", name, "not a name for an environment variable")
            elif COMMANDING.fullmatch(name):
                message = "tells loaders, shells or interpreters what to run, which a task may not: set it in tests/test.sh, or in env of [harness]"
                self._error(f"{table}.{key}", name, message)
        return {name: text for name, text in value.items() if isinstance(text, str)}

    def interval(self, table: str, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two finite numbers, the lower one first."""
        value = self._table(table).get(key, default)
        given = value if isinstance(value, list | tuple) else ()
        numbers = [x for x in given if _is_finite(x)]
        if len(numbers) != 2 or len(given) != 2 or numbers[0] >= numbers[1]:
            self._error(table, key, f"must be [lowest, highest], not {_shown(value)}")
            return default
        return float(numbers[0]), float(numbers[1])

    def check_known_keys(self) -> None:
        """A key that looks like a misspelt known one is an error; any other unknown key a warning (Harbor ignores it)."""
        for table, known in KNOWN.items():
            unknown = [key for key in self._table(table) if key not in known]
            if len(unknown) > MAX_UNKNOWN:
                self._error(table, unknown[MAX_UNKNOWN], f"and {len(unknown) - MAX_UNKNOWN - 1} more keys that are unknown")
            for key in unknown[:MAX_UNKNOWN]:
                nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
                if nearest:
                    self._error(table, key, f"unknown; did you mean {nearest[0]}?")
                else:
                    self.findings.append((self._line_of(table, key), "warning", f"{_path(table, key)}: unknown, and ignored"))

    def check_supported(self) -> None:
        """What Harbor allows and this sandbox cannot give is an error; what it only approximates is a warning."""
        for (table, key), reason in UNSUPPORTED.items():
            if self._table(table).get(key):
                self._error(table, key, reason)
        environment = self._table("environment")
        if environment.get("gpus"):
            self._error("environment", "gpus", "this sandbox gives no GPU")
        if (verifier := self._table("verifier").get("user")) not in (None, self._table("agent").get("user")):
            message = f"{_path('verifier', 'user')}: {_shown(verifier)}; the evaluator runs as the user of the harness"
            self.findings.append((self._line_of("verifier", "user"), "warning", message))

    def has_separate_verifier(self) -> bool:
        """As Harbor decides it for a task of one step."""
        verifier = self._table("verifier")
        mode = verifier.get("environment_mode")
        if mode is None:
            return verifier.get("environment") is not None
        if mode not in ("separate", "shared"):
            self._error("verifier", "environment_mode", f'must be "separate" or "shared", not {_shown(mode)}')
        return mode == "separate"

    def image_settings(self) -> dict[str, object]:
        """What of `task.toml` says which image the task runs on, and how: only values of the right kind."""
        found: dict[str, object] = {}
        for table, key in (("environment", "docker_image"), ("environment", "workdir"), ("agent", "user")):
            value = self._table(table).get(key)
            is_number = key == "user" and isinstance(value, int) and not isinstance(value, bool)
            if isinstance(value, str) or is_number:
                found[key] = value
            elif value is not None:
                self._error(table, key, f"must be text, not {_shown(value)}")
        if "build_timeout_sec" in self._table("environment"):
            found["build_timeout_sec"] = self.seconds("environment", "build_timeout_sec", 1.0)
        return found

    def _table(self, name: str) -> dict[str, object]:
        if not name:
            return self.document
        value = self.document.get(name, {})
        if isinstance(value, dict):
            return value
        finding: Finding = (self._line_of("", name), "error", f"{name}: must be a table, not {_shown(value)}")
        if finding not in self.findings:
            self.findings.append(finding)
        return {}

    def _error(self, table: str, key: str, message: str) -> None:
        self.findings.append((self._line_of(table, key), "error", f"{_path(table, key)}: {message}"))

    def _line_of(self, table: str, key: str) -> int:
        """The line where `key` of `table` is set, else the line of the table, else of its parent (inline table), else 0."""
        return self._lines.get(_path(table, key)) or self._lines.get(table, 0)


def _lines_of(text: str) -> dict[str, int]:
    """Dotted path of each table and key, and of what they are in -> the first line where it stands."""
    found: dict[str, int] = {}
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            current = header[1].strip().replace('"', "")
            found.setdefault(current, number)
        elif assignment := KEY.match(line):
            path = _path(current, assignment[1].replace('"', "").replace("'", ""))
            found.setdefault(path, number)
            parts = path.split(".", MAX_PARTS)
            for length in range(1, min(len(parts), MAX_PARTS)):
                found.setdefault(".".join(parts[:length]), number)
    return found


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _path(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _shown(value: object) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer with more digits than Python writes
        return "a number of thousands of digits"
