"""An agent to begin with: it runs in bash what the model asks for, until the model asks for nothing more. Change it as you like.

QwenGyre starts it once for every execution, in a workspace of its own: `python3 agent.py INSTRUCTION`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from openai import OpenAI

MOST_TURNS = 30
MOST_OUTPUT = 8000
"""Characters of a command's output that the model sees."""
BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command with bash in the workspace and return what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def run(arguments: str) -> str:
    """What the command of a tool call prints, or what is wrong with the call."""
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
        )
    except (ValueError, KeyError, TypeError) as error:
        return f"the arguments must be an object with a command: {error!r}"
    except subprocess.TimeoutExpired:
        return "the command was ended after 60 seconds"
    return f"{done.stdout.decode(errors='replace')[-MOST_OUTPUT:]}\n(exit code {done.returncode})"


def main() -> None:
    client = OpenAI()  # finds the gateway under OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [
        {"role": "system", "content": "You work in a folder, with bash. Do what you are asked; say so when it is done."},
        {"role": "user", "content": sys.argv[1]},
    ]
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[BASH]).choices[0].message
        print(answer.content or "", flush=True)
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return
        for call in answer.tool_calls:
            assert call.type == "function"
            print(f"$ {call.function.arguments}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})


if __name__ == "__main__":
    main()
