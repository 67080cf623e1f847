"""`qwengyre init`: a run file with comments, tasks and, if wanted, an agent to begin with."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Final

import typer

from qwengyre.cli.output import say
from qwengyre.cli.starter_harnesses import HARNESSES, OWN, Installed, StarterHarness, command_of, find
from qwengyre.config.installation import checkout, shipped
from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest

OWN_CONTEXT: Final = 8192
"""Tokens that thirty turns of the agent in starter/ fit into."""
RUN_FILE: Final = "run.toml"
TEXT: Final = """# {title}
# `qwengyre config check run.toml` says what is wrong, `qwengyre config explain` lists every key, `qwengyre train run.toml` starts.
# Relative paths are those of the folder that you start in.

[runtime]
name = {name}

[tasks]
# Folders in the Harbor / Terminal-Bench format. `qwengyre tasks check tasks/train --solve` tries them without a model.
# These three are there to be replaced: for a policy to learn, have dozens, of which it solves some and not all.
train = "tasks/train"
held_out = "tasks/held-out"      # never trained on, scored before and after

[policy]
{model}
max_context_tokens = {context}   # prompt and answer of one call
max_tokens_per_call = {answer}

[harness]
{harness}

[scheduler]
num_cells = 2                    # each serves and trains in turn
slots_per_cell = 8               # executions at once
steps = 20
groups_per_step = {groups}
executions_per_group = 8         # of one task: each is compared with the others

[engine]
# The embedded engine computes on the processor, for small models. On GPUs: engine = "vllm".
max_context_tokens = {context}
kv_blocks = {kv_blocks}

[trainer]
# A start for a model of a few billion parameters. One of some millions, as in the quickstart, takes 5e-4.
learning_rate = 1e-6

[evaluation]
samples = 4                      # executions of each held-out task, before and after
"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write; made if it is not there.")] = Path("."),
    harness: Annotated[str, typer.Option(metavar="NAME", help=f"{OWN}, {', '.join(HARNESSES)}.")] = OWN,
    model: Annotated[str, typer.Option(metavar="MODEL", help="The folder of the model to train, or its name on the hub.")] = "",
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="Write a recipe of QwenGyre's own instead, such as quickstart; `list` names them.")
    ] = "",
) -> None:
    """Write a run file with comments and three small tasks, for a harness of your choice or an agent of your own.

    Nothing that exists is written over.
    """
    if recipe:
        _write_recipe(recipe, folder)
        return
    if harness != OWN and harness not in HARNESSES:
        near = nearest(harness, (OWN, *HARNESSES))
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{harness!r} is not known.{hint} There are {OWN}, {', '.join(HARNESSES)}", key="--harness")
    folder = folder.expanduser().absolute()
    starter = importlib.resources.files("qwengyre.cli") / "starter"
    wanted = {RUN_FILE: None, "tasks": starter / "tasks", **({"agent.py": starter / "agent.py"} if harness == OWN else {})}
    for name in wanted:
        if (folder / name).exists():
            raise ConfigError("this already exists: name another folder, or move it away", file=str(folder / name))
    text, notes = _own(folder, model) if harness == OWN else _of_others(folder, harness, model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(text, encoding="utf-8")
    for name, source in wanted.items():
        if source is not None:
            _copy(source, folder / name)
    say(f"wrote {', '.join(str(folder / name) for name in wanted)}")
    for note in (*notes, *([] if model else ["Name your model: policy.model in run.toml."])):
        say(f"note: {note}")
    start = "" if folder == Path.cwd() else f"cd {folder}; "
    say(f"next: {start}qwengyre tasks check tasks/train --solve; qwengyre config check run.toml; qwengyre train run.toml")


def _write_recipe(name: str, folder: Path) -> None:
    """The run file, as it is."""
    found = sorted(shipped("recipes").glob("*.toml"))
    recipes = {path.stem: path for path in found if checkout() or "recipes/" not in path.read_text(encoding="utf-8")}
    if name == "list":
        for path in recipes.values():
            with open(path, encoding="utf-8") as file:
                say(f"{path.stem:22} {file.readline().removeprefix('#').strip()}")
        return
    if name not in recipes:
        near = nearest(name, tuple(recipes))
        raise ConfigError(
            f"{name!r} is not a recipe.{f' Did you mean {near!r}?' if near else ''} There are {', '.join(recipes)}",
            key="--recipe",
        )
    target = folder / recipes[name].name
    if target.exists():
        raise ConfigError("this already exists: name another folder, or move it away", file=str(target))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(recipes[name], target)
    say(f"wrote {target}\nnext: qwengyre train {target}")


def _copy(source: Traversable, to: Path) -> None:
    with importlib.resources.as_file(source) as found:
        if found.is_dir():
            shutil.copytree(found, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(found, to)


def _own(folder: Path, model: str) -> tuple[str, list[str]]:
    agent = str(folder / "agent.py")
    lines = [
        "# agent.py is yours to change. It finds the gateway in OPENAI_BASE_URL and OPENAI_API_KEY.",
        f"command = {_list(['python3', agent, '{instruction}'])}",
        f"readable = {_list([agent])}   # a harness sees its workspace, /usr, Python and this",
    ]
    return _text("An agent of your own", folder, model, lines, OWN_CONTEXT), []


def _of_others(folder: Path, name: str, model: str) -> tuple[str, list[str]]:
    harness = HARNESSES[name]
    installed = find(harness.program)
    notes = (
        []
        if installed
        else [f"{harness.program} is not on this machine. Its makers say: {harness.install}. Then set command and readable."]
    )
    lines = list(_lines(harness, installed or Installed(f"/opt/{name}/{harness.program}", (f"/opt/{name}",))))
    if not installed:
        lines.insert(0, f"# {harness.program} was not found: install it, and name its path and its folder here.")
    return _text(f"{name} in QwenGyre", folder, model, lines, harness.context_tokens), notes


def _lines(harness: StarterHarness, installed: Installed) -> Sequence[str]:
    lines = [f"command = {_list(command_of(harness, installed.path))}"]
    if installed.readable:
        lines.append(f"readable = {_list(installed.readable)}   # a harness sees its workspace, /usr, Python and this")
    if harness.env:
        lines.append(f"env = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in harness.env.items())} }}")
    return (*lines, f"limits = {{ memory_mb = {harness.memory_mb} }}")


def _text(title: str, folder: Path, model: str, harness: Sequence[str], context: int) -> str:
    return TEXT.format(
        title=title,
        name=json.dumps(folder.name or "run"),
        model=f"model = {json.dumps(model)}   # the folder of a Hugging Face model that can call tools, or its name on the hub",
        harness="\n".join(harness),
        context=context,
        answer=context // 8,
        groups=2,
        kv_blocks=context // 16 * 8,
    )


def _list(words: Sequence[str]) -> str:
    return f"[{', '.join(json.dumps(word, ensure_ascii=False) for word in words)}]"
