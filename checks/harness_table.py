"""How each harness of others is started, what its tools are called, and what the scripted policy does in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from checks.scripted_policy import MAIN, Passage, Script, Step, Tool

INSTALLED = Path(__file__).parents[1] / ".harnesses"
NODE = INSTALLED / "node" / "node_modules"
TASK = f"{MAIN} Create notes.txt, check it, have it reviewed, then finish."
REVIEW = "PROBE-SUB-{} Review notes.txt and report in one line."
WRITE = "printf 'h\\u00e9llo  world  \\\\n' > notes.txt; echo written"
WRITTEN = "h\u00e9llo  world  \n".encode()
NUM_TURNS = 6


class Start(msgspec.Struct, frozen=True):
    """What a harness is started with; `files` go below its home, `workspace_files` into its workspace."""

    command: list[str]
    environment: dict[str, str] = {}
    files: dict[str, str] = {}
    workspace_files: dict[str, str] = {}
    stdin: str = ""


class Harness(msgspec.Struct, frozen=True):
    name: str
    start: Callable[[str, str], Start]
    """(base URL that ends in /v1, key) -> Start"""
    script: Script
    roles: frozenset[str]
    """Roles that its session must show; side calls may come on top."""
    notes: bytes = WRITTEN


def tools(*calls: tuple[str, str]) -> Step:
    """One answer that makes these calls: (name, arguments as written)."""
    return lambda prompt: [Tool(name, arguments) for name, arguments in calls]


def work(
    shell: Callable[[str], tuple[str, str]], delegate: Callable[[str], tuple[str, str]], *, big: int, wait: Step | None = None
):
    """The main agent's steps: a file, two calls at once, many turns, a sub-agent, two at once, then `big` large results."""
    steps: list[Step] = [tools(shell(WRITE)), tools(shell("cat notes.txt"), shell("wc -c notes.txt"))]
    steps += [tools(shell(f"echo turn {number}")) for number in range(NUM_TURNS)]
    for agents in ("A", "BC"):
        steps.append(tools(*(delegate(REVIEW.format(agent)) for agent in agents)))
        steps += [wait] * len(agents) if wait else []
    steps += [tools(shell(f"seq 10000 12999; echo {number}")) for number in range(big)]
    return (*steps, tools(shell("echo after")), tools(shell("wc -l notes.txt")), tools())


def review(shell: Callable[[str], tuple[str, str]]) -> tuple[Step, ...]:
    return (tools(shell("cat notes.txt")), tools(shell("wc -c notes.txt")), tools())


ALL = frozenset({"main", "main-summary", "sub-agent"})


def claude() -> Harness:
    def shell(command: str) -> tuple[str, str]:
        return "Bash", f'{{ "description" : "Run \\u0069t",  "command":"{command}" , "timeout": 10000.0 }}'

    def delegate(prompt: str) -> tuple[str, str]:
        kind = '"subagent_type":"general-purpose","description":"Review", '
        return "Agent", f'{{{kind}"prompt":{json.dumps(prompt)}, "run_in_background": false}}'

    def start(base: str, key: str) -> Start:
        environment = {
            "ANTHROPIC_BASE_URL": base.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": key,
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "170000",
        }
        return Start([str(NODE / ".bin/claude"), "-p", TASK, "--model", "policy", "--dangerously-skip-permissions"], environment)

    summary = r"Your task is to create a detailed summary|<summary>.*</example>"
    return Harness("claude-code", start, Script(work(shell, delegate, big=4), review(shell), f"(?s){summary}"), ALL)


def codex() -> Harness:
    def shell(command: str) -> tuple[str, str]:
        return "exec_command", f'{{ "yield_time_ms" : 5000,  "cmd":"{command}" }}'

    def delegate(prompt: str) -> tuple[str, str]:
        return "spawn_agent", json.dumps({"message": prompt})

    def wait(prompt: str) -> list[Tool]:
        spawned = set(re.findall(r'"agent_id":"([0-9a-f-]{36})"', prompt))
        left = sorted(spawned - set(re.findall(r'"([0-9a-f-]{36})":\{"completed"', prompt)))
        return [
            Tool("wait_agent", json.dumps({"targets": left, "timeout_ms": 30000})) if left else Tool(*shell("echo all reported"))
        ]

    def start(base: str, key: str) -> Start:
        provider = f'[model_providers.gateway]\nname = "gateway"\nbase_url = "{base}"\nenv_key = "KEY"\nwire_api = "responses"\n'
        window = "model_context_window = 300000\nmodel_auto_compact_token_limit = 70000\n"
        config = f'model = "policy"\nmodel_provider = "gateway"\n{window}{provider}'
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return Start([str(NODE / ".bin/codex"), "exec", *flags, TASK], {"KEY": key}, files={".codex/config.toml": config})

    script = Script(work(shell, delegate, big=4, wait=wait), review(shell), r"(?i)CONTEXT CHECKPOINT COMPACTION|handoff summary")
    return Harness("codex", start, script, ALL)


def qwen() -> Harness:
    def shell(command: str) -> tuple[str, str]:
        return "run_shell_command", f'{{ "is_background" : false,  "description":"Run \\u0069t" , "command":"{command}"}}'

    def delegate(prompt: str) -> tuple[str, str]:
        return "agent", f'{{"subagent_type":"general-purpose","description":"Review", "prompt":{json.dumps(prompt)}}}'

    def start(base: str, key: str) -> Start:
        environment = {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
        cli = NODE / "@qwen-code/qwen-code/cli.js"
        command = [str(NODE / ".bin/node"), str(cli), "--yolo", "--auth-type", "openai", "-p", TASK]
        settings = {"model": {"generationConfig": {"contextWindowSize": 138_000}}}
        return Start(command, environment, files={".qwen/settings.json": json.dumps(settings)})

    summary = r"<state_snapshot>"
    script = Script(work(shell, delegate, big=4), review(shell), summary, side=r"(?i)managed (?:[\w-]+ )*memory")
    return Harness("qwen-code", start, script, ALL)


def gemini() -> Harness:
    """Its sub-agents end by a call of their own, and compaction asks twice: for the summary, and whether anything is missing in it."""

    def shell(command: str) -> tuple[str, str]:
        return "run_shell_command", f'{{ "description":"Run \\u0069t" ,  "command":"{command}"}}'

    def delegate(prompt: str) -> tuple[str, str]:
        return "invoke_agent", f'{{"agent_name":"generalist", "prompt":{json.dumps(prompt)}}}'

    def start(base: str, key: str) -> Start:
        environment = {
            "GOOGLE_GEMINI_BASE_URL": base.removesuffix("/v1"),
            "GEMINI_API_KEY": key,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        }
        settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "model": {"compressionThreshold": 0.06}}
        cli = INSTALLED / "gemini/node_modules/@google/gemini-cli/bundle/gemini.js"
        command = ["node", str(cli), "--yolo", "--model", "policy", "--prompt", TASK]
        return Start(command, environment, files={".gemini/settings.json": json.dumps(settings)})

    ended = tools(("complete_task", '{"result": {"response": "reviewed"}}'))
    script = Script(work(shell, delegate, big=4), (*review(shell)[:-1], ended), r"distilling chat history into a structured XML")
    return Harness("gemini-cli", start, script, ALL)


def opencode() -> Harness:
    def shell(command: str) -> tuple[str, str]:
        return "bash", f'{{ "timeout" : 10000.0,  "description":"Run it", "command":"{command}" }}'

    def delegate(prompt: str) -> tuple[str, str]:
        return "task", f'{{"subagent_type":"general","description":"Review", "prompt":{json.dumps(prompt)}}}'

    def start(base: str, key: str) -> Start:
        models = {"policy": {"limit": {"context": 90_000, "output": 8000}}}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": base, "apiKey": key}, "models": models}
        permission = {"bash": "allow", "edit": "allow"}
        settings = {"provider": {"gateway": provider}, "model": "gateway/policy", "permission": permission}
        command = [str(NODE / "opencode-linux-x64/bin/opencode"), "run", "--model", "gateway/policy", TASK]
        return Start(command, workspace_files={"opencode.json": json.dumps(settings)})

    summary, side = r"(?s)<template>.*</template>", r"(?i)you are a title generator"
    return Harness("opencode", start, Script(work(shell, delegate, big=4), review(shell), summary, side), ALL)


def mini_swe_agent() -> Harness:
    def shell(command: str) -> tuple[str, str]:
        return "bash", f'{{ "command" : "{command}" }}'

    def start(base: str, key: str) -> Start:
        environment = {
            "OPENAI_API_BASE": base,
            "OPENAI_API_KEY": key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        flags = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--output", "/dev/null"]
        return Start(
            [str(INSTALLED / "mini-swe-agent/bin/mini"), *flags, "--model", "openai/policy", "--task", TASK], environment
        )

    steps = [tools(shell(WRITE)), tools()]  # no tool call at all: it answers with a format error, and deletes the message
    steps += [tools(shell(f"echo turn {number}")) for number in range(NUM_TURNS)]
    steps.append(tools(shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")))
    return Harness("mini-swe-agent", start, Script(tuple(steps), (), "(?!)"), frozenset({"main"}))


def _says(text: str) -> Step:
    return lambda prompt: [Passage(text)]


def aider() -> Harness:
    """Its tools are edit blocks. After each it asks for a commit message, and once they are many it summarizes what came before."""

    def start(base: str, key: str) -> Start:
        environment = {"OPENAI_API_BASE": base, "OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        flags = ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-fancy-input"]
        flags += ["--no-pretty", "--edit-format", "diff", "--max-chat-history-tokens", "300", "--map-tokens", "0"]
        models = ["--model", "openai/policy", "--weak-model", "openai/policy"]
        identity = "[user]\nname = check\nemail = check@localhost\n"
        requests = [TASK, *(f"{MAIN} Say more, part {number}." for number in range(NUM_TURNS))]
        command = [str(INSTALLED / "aider-chat/bin/aider"), *models, *flags]
        return Start(command, environment, files={".gitconfig": identity}, stdin="\n".join(requests) + "\n")

    edit = "{0}\n```\n<<<<<<< SEARCH\n=======\n{1}>>>>>>> REPLACE\n```"
    steps = [_says(edit.format("notes.txt", WRITTEN.decode()))]
    steps += [_says(edit.format(f"part{number}.txt", "word\n" * 100)) for number in range(NUM_TURNS)]
    summary, side = r"(?i)briefly\W* summarize this partial conversation", r"(?i)one-line git commit messages"
    return Harness("aider", start, Script(tuple(steps), (), summary, side), frozenset({"main", "main-summary"}))


HARNESSES = (claude(), codex(), qwen(), gemini(), opencode(), mini_swe_agent(), aider())
