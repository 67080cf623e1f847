"""An environment whose programs run on this machine, as an import path names it: `here:Here`."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any


class SandboxBuildFailedError(Exception):
    pass


class Here:
    """A folder, and a process namespace for each program. `fails` says which of its environments cannot be started."""

    def __init__(self, session: str, trial: Path, *, marks: str = "", fails: str = "") -> None:
        self.session, self.fails = session, fails
        self.folder = trial / session
        self.workspace = self.folder / "workspace"
        self.mark = Path(marks, session) if marks else None
        """A file that stands for what a container engine has of this environment."""

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None) -> None:
        if unknown := (kwargs or {}).keys() - {"marks", "fails"}:
            raise ValueError(f"Invalid kwargs for environment: Unknown option {sorted(unknown)[0]!r}.")

    async def start(self, content: Path) -> None:
        if self.fails and self.fails in self.session:
            raise SandboxBuildFailedError("as the test wants it")
        shutil.copytree(content, self.workspace, symlinks=True)
        if self.mark is not None:
            self.mark.touch()

    async def exec(self, command: str, env: dict[str, str]) -> int:
        """Exit code. Every process of the command ends with it."""
        bwrap = [
            "bwrap",
            "--dev-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "--unshare-pid",
            "--die-with-parent",
            "--chdir",
            str(self.workspace),
        ]
        variables = {"PATH": os.environ["PATH"], "PWD": str(self.workspace), **env}
        process = await asyncio.create_subprocess_exec(*bwrap, "/bin/bash", "-c", command, env=variables)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)
