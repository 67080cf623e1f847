"""Runs a module or a file as `python` would, on the Python of QwenGyre in a sandbox whose image is another system.

`own_python.py FOLDERS (-m MODULE | FILE) ARGUMENT...`: FOLDERS, with colons between them, are searched for modules first. It is of the
standard library, and has no variable to read: the image's may be for another Python.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(folders: str, what: str, *arguments: str) -> None:
    sys.path[:0] = [folder for folder in folders.split(":") if folder]
    if what == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *arguments]
        sys.path.insert(0, os.path.dirname(what))
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
