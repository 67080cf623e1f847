"""A tool loop with each Python client, for the environments of `make test-clients`: nothing of QwenGyre is installed there.

    python tool_loops.py CLIENT

reads a line of JSON for every loop, `{"dialect", "mode", "base", "key", "prompt"}`; `mode` is whole or stream, `base` ends in /v1. Answers
each with a line that says what came out: the final text, or the classes of the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
DESCRIPTION = "Look at a file."
FUNCTION = {"name": "look", "description": DESCRIPTION, "parameters": SCHEMA}
MODEL = "policy"


def look(path: str) -> str:
    """Look at a file.

    Args:
        path: Where it is.
    """
    return f"contents of {path}"


class Asked:
    """What a client is started with."""

    def __init__(self, dialect: str, stream: bool, base: str, key: str, prompt: str):
        self.dialect, self.stream, self.base, self.key, self.prompt = dialect, stream, base, key, prompt
        self.root = base.removesuffix("/v1")


def chat_loop(asked: Asked, ask: Callable[[list], Any]) -> str:
    """`ask` gives the message that answers messages, as the client has it."""
    messages: list = [{"role": "user", "content": asked.prompt}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_chat(asked: Asked) -> str:
    import openai

    client = openai.OpenAI(api_key=asked.key, base_url=asked.base)
    more: Any = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}

    def ask(messages: list) -> Any:
        if not asked.stream:
            return client.chat.completions.create(messages=messages, **more).choices[0].message
        with client.chat.completions.stream(messages=messages, **more) as stream:
            return stream.get_final_completion().choices[0].message

    return chat_loop(asked, ask)


def responses_loop(asked: Asked, ask: Callable[[list], Any]) -> str:
    items: list = [{"role": "user", "content": asked.prompt}]
    while True:
        response = ask(items)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return "".join(part.text for item in response.output if item.type == "message" for part in item.content)
        for call in calls:
            result = look(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def openai_responses(asked: Asked) -> str:
    import openai

    client = openai.OpenAI(api_key=asked.key, base_url=asked.base)
    more: Any = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}]}

    def ask(items: list) -> Any:
        if not asked.stream:
            return client.responses.create(input=items, **more)
        with client.responses.stream(input=items, **more) as stream:
            return stream.get_final_response()

    return responses_loop(asked, ask)


def anthropic_messages(asked: Asked) -> str:
    import anthropic

    client = anthropic.Anthropic(api_key=asked.key, base_url=asked.root)
    tool = {"name": "look", "description": DESCRIPTION, "input_schema": SCHEMA}
    messages: list = [{"role": "user", "content": asked.prompt}]
    while True:
        more: Any = {"model": MODEL, "max_tokens": 4000, "tools": [tool], "messages": messages}
        if asked.stream:
            with client.messages.stream(**more) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**more)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def litellm_any(asked: Asked) -> str:
    import litellm

    tools = [{"type": "function", "function": FUNCTION}]
    place: Any = {"api_key": asked.key, "api_base": asked.root if asked.dialect == "messages" else asked.base}
    if asked.dialect == "responses":
        tools = [{"type": "function", **FUNCTION}]

        def ask_items(items: list) -> Any:
            items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
            answer = litellm.responses(model=f"openai/{MODEL}", input=items, tools=tools, stream=asked.stream, **place)
            if not asked.stream:
                return answer
            return next(event.response for event in answer if event.type == "response.completed")

        return responses_loop(asked, ask_items)
    provider = {"chat": "openai", "messages": "anthropic"}[asked.dialect]

    def ask(messages: list) -> Any:
        answer = litellm.completion(
            model=f"{provider}/{MODEL}", messages=messages, tools=tools, stream=asked.stream, max_tokens=4000, **place
        )
        if asked.stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0].message

    return chat_loop(asked, ask)


def openai_agents(asked: Asked) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(api_key=asked.key, base_url=asked.base)
    kind = agents.OpenAIChatCompletionsModel if asked.dialect == "chat" else agents.OpenAIResponsesModel
    agent = agents.Agent(name="a", model=kind(model=MODEL, openai_client=client), tools=[agents.function_tool(look)])

    async def run() -> str:
        if not asked.stream:
            return (await agents.Runner.run(agent, asked.prompt)).final_output
        result = agents.Runner.run_streamed(agent, asked.prompt)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def pydantic_ai(asked: Asked) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.google import GoogleProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    match asked.dialect:
        case "chat":
            model: Any = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=asked.base, api_key=asked.key))
        case "responses":
            model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=asked.base, api_key=asked.key))
        case "messages":
            model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=asked.root, api_key=asked.key))
        case _:
            model = GoogleModel(MODEL, provider=GoogleProvider(base_url=asked.root, api_key=asked.key))
    agent = Agent(model, tools=[look])

    async def listen(_: object, events: Any) -> None:
        async for _event in events:
            pass

    return agent.run_sync(asked.prompt, event_stream_handler=listen if asked.stream else None).output


def langchain(asked: Asked) -> str:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    if asked.dialect == "messages":
        model: Any = ChatAnthropic(model=MODEL, base_url=asked.root, api_key=asked.key, max_tokens=4000)
    else:
        model = ChatOpenAI(model=MODEL, base_url=asked.base, api_key=asked.key, use_responses_api=asked.dialect == "responses")
    model = model.bind_tools([look])
    messages: list = [HumanMessage(asked.prompt)]
    while True:
        answer = joined(model.stream(messages)) if asked.stream else model.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return answer.text if isinstance(answer.text, str) else answer.text()
        messages += [ToolMessage(look(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]


def joined(chunks: Iterable[Any]) -> Any:
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def smolagents(asked: Asked) -> str:
    from smolagents import LiteLLMModel, OpenAIModel, Tool, ToolCallingAgent

    class Look(Tool):
        name, description, output_type = "look", DESCRIPTION, "string"
        inputs = {"path": {"type": "string", "description": "Where it is."}}  # noqa: RUF012

        def forward(self, path: str) -> str:
            return look(path)

    if asked.dialect == "chat":
        model: Any = OpenAIModel(MODEL, api_base=asked.base, api_key=asked.key)
    else:
        model = LiteLLMModel(f"anthropic/{MODEL}", api_base=asked.root, api_key=asked.key)
    agent = ToolCallingAgent(tools=[Look()], model=model, stream_outputs=asked.stream, max_steps=5, verbosity_level=0)
    return str(agent.run(asked.prompt))


def google_genai(asked: Asked) -> str:
    from google import genai
    from google.genai import types

    client = genai.Client(api_key=asked.key, http_options=types.HttpOptions(base_url=asked.root))
    config = types.GenerateContentConfig(
        tools=[
            types.Tool(
                function_declarations=[
                    types.FunctionDeclaration(**{**FUNCTION, "parameters": None}, parameters_json_schema=SCHEMA)
                ]
            )
        ],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents: list = [types.Content(role="user", parts=[types.Part(text=asked.prompt)])]
    while True:
        if asked.stream:
            parts: list = []
            for chunk in client.models.generate_content_stream(model=MODEL, contents=contents, config=config):
                parts += (chunk.candidates[0].content.parts or []) if chunk.candidates[0].content else []
        else:
            parts = client.models.generate_content(model=MODEL, contents=contents, config=config).candidates[0].content.parts
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text for part in parts if part.text and not part.thought)
        results = [
            types.Part(
                function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": look(**call.args)})
            )
            for call in calls
        ]
        contents.append(types.Content(role="user", parts=results))


CLIENTS: dict[str, Callable[[Asked], str]] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "litellm": litellm_any,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "smolagents": smolagents,
    "google-genai": google_genai,
}


def loop(run: Callable[[Asked], str], asked: Asked) -> dict:
    try:
        return {"text": run(asked)}
    except Exception as error:
        errors = [error, *([error.__cause__] if error.__cause__ else [])]
        classes = [kind.__name__ for one in errors for kind in type(one).__mro__]
        return {"classes": classes, "message": str(error), "code": getattr(error, "code", None)}


def main() -> None:
    run = CLIENTS[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a client prints goes where errors go
    for line in sys.stdin:
        job = json.loads(line)
        asked = Asked(job["dialect"], job["mode"] == "stream", job["base"], job["key"], job["prompt"])
        print(json.dumps(loop(run, asked)), file=answers, flush=True)


main()
