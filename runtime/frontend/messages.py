"""Reads a conversation: a non-empty array of messages, or an object `{"messages": […], "tools": […]}`.

The format is that of OpenAI's chat completions, restricted to text: roles system, developer, user, assistant and
tool; content as a string or as an array of text parts, which are joined without a separator; assistant turns may
carry `reasoning_content` and `tool_calls`. What comes out is plain JSON data for the chat template.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from artifacts.errors import quoted
from runtime.frontend.errors import MessagesError
from runtime.frontend.json_data import parse_json

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_MESSAGES = 16_384
MAX_PARTS = 1024
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 256
MAX_NESTING = 64
"""Deepest nesting inside tool definitions and arguments."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "input_audio", "audio", "file")
_COMMON = {"role", "content", "name"}
_MEMBERS = {role: _COMMON for role in ROLES} | {
    "assistant": _COMMON | {"reasoning_content", "tool_calls"}, "tool": _COMMON | {"tool_call_id"}}
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""Names of tools."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Checked messages and tool definitions, ready for a chat template."""

    messages: list[Json]
    tools: list[Json] = field(default_factory=list)


def read_messages(data: bytes, source: str = "--messages") -> Conversation:
    """Parses the bytes of a message file. `source` names it in errors. Raises MessagesError."""
    return conversation(parse_json(data, source, MAX_FILE_BYTES, MessagesError), source)


def user_prompt(text: str) -> Conversation:
    """A conversation of one user turn."""
    return Conversation([{"role": "user", "content": _text(text, "--prompt")}])


def conversation(value: Any, source: str = "messages", *, strict: bool = True) -> Conversation:
    """Checks a parsed message array or object. Raises MessagesError: one line with the index of the message.

    strict: members that are not part of the format are errors (in files); otherwise they are dropped (over HTTP).
    """
    tools: Any = None
    if isinstance(value, dict):
        extra = next((key for key in value if key not in ("messages", "tools")), None)
        if extra is not None and strict:
            raise MessagesError(f"{source}: unknown member {quoted(extra)}; allowed are 'messages' and 'tools'")
        tools = value.get("tools")
        value = value.get("messages")
    if not isinstance(value, list) or not value:
        raise MessagesError(f"{source}: must be a non-empty array of messages, or an object with 'messages'")
    if len(value) > MAX_MESSAGES:
        raise MessagesError(f"{source}: {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    messages = [_message(item, f"{source}: message {index}", strict) for index, item in enumerate(value)]
    return Conversation(messages, check_tools(tools, f"{source}: tools"))


def _message(value: Any, where: str, strict: bool) -> Json:
    if not isinstance(value, dict):
        raise MessagesError(f"{where}: must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MessagesError(f"{where}: role {quoted(role)}; allowed are {', '.join(ROLES)}")
    extra = next((key for key, item in value.items() if key not in _MEMBERS[role] and item is not None), None)
    if extra is not None and strict:
        raise MessagesError(f"{where}: unknown member {quoted(extra)} in a message of role {role}")
    made: Json = {"role": role}
    calls = value.get("tool_calls") if role == "assistant" else None
    reasoning = value.get("reasoning_content") if role == "assistant" else None
    content = value.get("content")
    if content is None:
        if calls is None and reasoning is None:
            raise MessagesError(f"{where}: content is missing")
        content = ""
    made["content"] = _content(content, where)
    if value.get("name") is not None:
        made["name"] = _text(value["name"], f"{where}: name")
    if reasoning is not None:
        made["reasoning_content"] = _text(reasoning, f"{where}: reasoning_content")
    if calls is not None:
        made["tool_calls"] = _tool_calls(calls, where)
    if role == "tool":
        call_id = value.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise MessagesError(f"{where}: a tool message needs a tool_call_id")
        made["tool_call_id"] = _text(call_id, f"{where}: tool_call_id")
    return made


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise MessagesError(f"{where}: must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MessagesError(f"{where}: character {error.start} is a lone surrogate") from None
    return value


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return _text(value, f"{where}: content")
    if not isinstance(value, list):
        raise MessagesError(f"{where}: content must be a string or an array of parts")
    if len(value) > MAX_PARTS:
        raise MessagesError(f"{where}: {len(value)} parts; at most {MAX_PARTS} are allowed")
    texts = []
    for index, part in enumerate(value):
        here = f"{where}, part {index}"
        if not isinstance(part, dict):
            raise MessagesError(f"{here}: must be an object")
        kind = part.get("type")
        if kind in MEDIA_PARTS:
            raise MessagesError(f"{here}: {kind} input is not supported; only text parts are allowed")
        if kind != "text":
            raise MessagesError(f"{here}: type {quoted(kind)}; only text parts are allowed")
        texts.append(_text(part.get("text"), f"{here}: text"))
    return "".join(texts)


def _tool_calls(value: Any, where: str) -> list[Json]:
    if not isinstance(value, list) or len(value) > MAX_TOOL_CALLS:
        raise MessagesError(f"{where}: tool_calls must be an array of at most {MAX_TOOL_CALLS} calls")
    calls = []
    for index, item in enumerate(value):
        here = f"{where}, tool call {index}"
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or item.get("type", "function") != "function":
            raise MessagesError(f"{here}: must be an object of type 'function' with a 'function'")
        name = _name(function.get("name"), here)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = parse_json(arguments, f"{here}: arguments", MAX_FILE_BYTES, MessagesError) if (
                arguments.strip()) else {}
        if not isinstance(arguments, dict):
            raise MessagesError(f"{here}: arguments must be an object or the JSON text of one")
        _check_data(arguments, f"{here}: arguments")
        call: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if item.get("id") is not None:
            call = {"id": _text(item["id"], f"{here}: id")} | call
        calls.append(call)
    return calls


def check_tools(value: Any, where: str = "tools") -> list[Json]:
    """Checked tool definitions in OpenAI's form; members keep their order. Raises MessagesError."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise MessagesError(f"{where}: must be an array of at most {MAX_TOOLS} tools")
    names: set[str] = set()
    for index, tool in enumerate(value):
        here = f"{where}, tool {index}"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise MessagesError(f"{here}: must be an object of type 'function' with a 'function'")
        name = _name(function.get("name"), here)
        if name in names:
            raise MessagesError(f"{here}: the name {quoted(name)} is taken by an earlier tool")
        names.add(name)
        if not isinstance(function.get("parameters", {}), dict):
            raise MessagesError(f"{here}: parameters must be a JSON schema object")
        _check_data(tool, here)
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise MessagesError(f"{where}: name {quoted(value)}; allowed are 1 to 128 letters, digits, '_' and '-'")
    return value


def _check_data(value: Any, where: str) -> None:
    """Nesting, integers and surrogates of JSON data."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_NESTING:
            raise MessagesError(f"{where}: nests deeper than {MAX_NESTING}")
        if isinstance(item, str):
            _text(item, where)
        elif isinstance(item, int) and item.bit_length() > 64:
            raise MessagesError(f"{where}: an integer does not fit 64 bits")
        elif isinstance(item, dict):
            pending += [(child, depth + 1) for pair in item.items() for child in pair]
        elif isinstance(item, list):
            pending += [(child, depth + 1) for child in item]
