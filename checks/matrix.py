"""The tests under all that machines differ in: `make test-matrix`, or `python -m checks.matrix [DIRECTION ...] [-- PYTEST ARGUMENTS]`.

Each direction runs the whole suite, or the paths after `--`, and says whether it was green. Without names all of them run.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE = {"x86_64": "x86-64-v2", "aarch64": "armv8-a"}
"""The oldest processors of each kind that torch runs on."""
SEEDS = (1, 2, 3)
USER = 54321
"""A number that no user has; what needs an entry in /etc/passwd fails, as it does in a container."""
TIMEOUT_S = 3600
"""Of one test: several suites share the machine."""

Run = Callable[[Path, Sequence[str]], bool]
"""Runs pytest with some arguments, with a scratch folder of its own; whether all was green."""


def pytest(arguments: Sequence[str], *, plugins: Sequence[str] = ("-p", "no:randomly")) -> list[str]:
    fixed = ("-m", "pytest", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S), *plugins)
    return [sys.executable, *fixed, *arguments]


def environment(scratch: Path, **more: str) -> dict[str, str]:
    scratch.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "TMPDIR": str(scratch), "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"), **more}


def under(**variables: str) -> Run:
    def run(scratch: Path, arguments: Sequence[str]) -> bool:
        return subprocess.run(pytest(arguments), cwd=ROOT, env=environment(scratch, **variables)).returncode == 0

    return run


def in_random_order(seed: int) -> Run:
    def run(scratch: Path, arguments: Sequence[str]) -> bool:
        command = pytest(arguments, plugins=(f"--randomly-seed={seed}",))
        return subprocess.run(command, cwd=ROOT, env=environment(scratch)).returncode == 0

    return run


def twice_at_once(scratch: Path, arguments: Sequence[str]) -> bool:
    both = [subprocess.Popen(pytest(arguments), cwd=ROOT, env=environment(scratch / name)) for name in ("one", "other")]
    return all([process.wait() == 0 for process in both])


def beside_a_quickstart(scratch: Path, arguments: Sequence[str]) -> bool:
    """Trains as long as the tests run, again and again."""
    train = f"{shlex.quote(sys.executable)} -c 'from qwengyre.cli.main import main; main()' train recipes/quickstart.toml"
    loop = f"while {train} --runs-dir {shlex.quote(str(scratch / 'runs'))}; do :; done"
    with open(scratch / "quickstart.log", "wb") as log:
        load = subprocess.Popen(["bash", "-c", loop], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        return under()(scratch, arguments)
    finally:
        os.killpg(load.pid, 15)
        load.wait()


def as_a_normal_user(scratch: Path, arguments: Sequence[str]) -> bool:
    """With a copy of the checkout that is the user's own. Without root, this user is normal already."""
    if os.geteuid() != 0:
        return under()(scratch, arguments)
    checkout, home = scratch / "checkout", scratch / "home"
    for folder in (checkout, home, scratch / "tmp"):
        folder.mkdir()
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    for path in (scratch, *scratch.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    script = " && ".join(
        [*opened(Path(sys.base_prefix)), *opened(Path(sys.prefix)), shlex.join(["exec", *drop, *pytest(arguments)])]
    )
    variables = environment(scratch / "tmp", HOME=str(home), PYTHONPATH=str(checkout))
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]
    return subprocess.run(command, cwd=checkout, env=variables).returncode == 0


def opened(folder: Path) -> list[str]:
    """Shell commands that let everybody reach `folder`, within a mount namespace: what is closed above it shows nothing else."""
    closed = next((above for above in reversed(folder.parents) if not above.stat().st_mode & 0o001), None)
    if closed is None:
        return []
    above, path = shlex.quote(str(closed)), shlex.quote(str(folder))
    return [
        "held=$(mktemp -d)",
        f"mount --bind {path} $held",
        f"mount -t tmpfs -o mode=755 tmpfs {above}",
        f"mkdir -p {path}",
        f"mount --move $held {path}",
        "rmdir $held",
    ]


DIRECTIONS: dict[str, Run] = {
    "plain": under(),
    **{f"aten-{name}": under(ATEN_CPU_CAPABILITY=name) for name in ("default", "avx2", "avx512")},
    "kernels-baseline": under(QWENGYRE_MARCH=BASELINE.get(platform.machine(), "native")),
    "user": as_a_normal_user,
    "twice": twice_at_once,
    "quickstart": beside_a_quickstart,
    **{f"random-{seed}": in_random_order(seed) for seed in SEEDS},
}
"""`plain` is as `make test`: kernels for this processor, as whoever calls."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qg-matrix-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def main(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    names, arguments = words[:at] or list(DIRECTIONS), words[at + 1 :]
    if unknown := [name for name in names if name not in DIRECTIONS]:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(DIRECTIONS)}", file=sys.stderr)
        return 2
    green = {}
    for name in names:
        print(f"== {name}", flush=True)
        with scratch_folder() as scratch:
            green[name] = DIRECTIONS[name](scratch, arguments)
    for name, is_green in green.items():
        print(f"{name:18} {'green' if is_green else 'RED'}")
    return 0 if all(green.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
