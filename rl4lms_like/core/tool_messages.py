"""Tools, calls and results as plain messages, for chat templates that do not write them.

    tools            at the end of the system message: their JSON schemas, and how a call is written
    `tool_calls`     at the end of the assistant's content: <tool_call>{"name": ..., "arguments": ...}</tool_call>
    role `tool`      one message of the user with all results: <tool_response>result</tool_response>

The formats are those of Hermes and Qwen2.5: models that were trained on them have seen these texts, and `envs.tools`
reads calls that are written so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rl4lms_like.core.sample import Message, Sample

_INSTRUCTION = """\
You may call functions. Their signatures, as JSON schemas:
<tools>
{schemas}
</tools>
To call a function, write a JSON object with its name and its arguments within tool_call tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def as_plain_messages(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
    r"""Return messages with the roles system, user and assistant alone, and with texts in place of tools and calls.

    Examples:
        >>> as_plain_messages([{"role": "tool", "name": "add", "content": "7"}], tools=None)
        [{'role': 'user', 'content': '<tool_response>\n7\n</tool_response>'}]
    """
    plain: list[Message] = []
    follows_result = False
    for message in messages:
        # Templates without tools know neither the role `tool` nor the key `tool_calls`.
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif message.get("tool_calls"):
            message = _with_written_calls(message)

        # Many templates want messages of user and assistant in turn: results of one turn are one message.
        if is_result and follows_result:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{message['content']}"}
        else:
            plain.append(message)
        follows_result = is_result

    # At the end of the system message that is there: many templates accept one only.
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        instruction = _INSTRUCTION.format(schemas=schemas)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}
        else:
            plain.insert(0, {"role": "system", "content": instruction})
    return plain


def with_plain_responses(sample: Sample) -> Sample:
    """Return a sample whose responses that are whole messages are plain messages."""
    responses: dict[str, Message | list[Message]] = {}
    for text, response in sample.response_messages.items():
        plain = as_plain_messages(sample.response_turns(text), tools=None)
        responses[text] = plain if isinstance(response, list) else plain[0]
    return replace(sample, response_messages=responses)


def _with_written_calls(message: Message) -> Message:
    """Return a message of the assistant with its calls as text."""
    texts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        # OpenAI's format has the function under a key of its own, and its arguments as a JSON text, which would be
        # encoded twice.
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # a text of another kind is written as a text
                arguments = json.loads(arguments)
        written = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{written}\n</tool_call>")
    other_keys = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**other_keys, "content": "\n".join(texts)}
