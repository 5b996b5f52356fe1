"""Message files: what is accepted, what it becomes, and the one line that names what is wrong."""

import json
from typing import Any

import pytest

from runtime.frontend.errors import MessagesError
from runtime.frontend.messages import conversation, read_messages, user_prompt

USER = {"role": "user", "content": "hi"}


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def call(name: Any = "f", arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {} if arguments is None else arguments}} | more


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant"} | fields


def test_array_and_object_forms() -> None:
    assert read_messages(json.dumps([USER]).encode()).messages == [USER]
    both = read_messages(json.dumps({"messages": [USER], "tools": [tool(parameters={"z": 1, "a": 2})]}).encode())
    assert both.messages == [USER]
    assert json.dumps(both.tools) == '[{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]'
    assert conversation({"messages": [USER], "tools": None}).tools == []
    assert user_prompt("x").messages == [{"role": "user", "content": "x"}]


def test_parts_join_without_a_separator() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert conversation([{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "a b"}]


def test_assistant_history() -> None:
    turn = assistant(content=None, reasoning_content="r", tool_calls=[
        call("f", '{"b": 1, "a": [true, null]}', id="c1", type="function"), call("g", ""), call("h", {"x": "y"})])
    made = conversation([USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "ok"}]).messages
    assert made[1] == {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [True, None]}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
        {"type": "function", "function": {"name": "h", "arguments": {"x": "y"}}}]}
    assert list(made[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert made[2] == {"role": "tool", "content": "ok", "tool_call_id": "c1"}


def test_http_requests_may_carry_unknown_members() -> None:
    value = {"messages": [USER | {"weight": 1}], "model": "m"}
    assert conversation(value, strict=False).messages == [USER]
    with pytest.raises(MessagesError, match="unknown member 'model'"):
        conversation(value)
    assert conversation([assistant(content="a", refusal=None, audio=None)]).messages == [assistant(content="a")]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(("value", "message"), [
    ([], "^messages: must be a non-empty array"), ({}, "must be a non-empty array"), ("x", "must be a non-empty array"),
    ({"messages": []}, "non-empty"), ({"messages": [USER], "tool": []}, "unknown member 'tool'"),
    ([USER] * 16_385, "16385 messages; at most 16384"), ([USER, 5], "message 1: must be an object"),
    ([{"content": "x"}], "message 0: role 'None'; allowed are system, developer, user, assistant, tool"),
    ([{"role": "root", "content": "x"}], "role 'root'"), ([{"role": ["user"], "content": "x"}], "role"),
    ([USER, {"role": "user"}], "message 1: content is missing"), ([assistant()], "content is missing"),
    ([{"role": "user", "content": 5}], "content must be a string or an array"), ([USER | {"foo": 1}], "unknown member 'foo'"),
    ([USER | {"tool_calls": []}], "unknown member 'tool_calls' in a message of role user"),
    ([{"role": "user", "content": [5]}], "message 0, part 0: must be an object"),
    ([{"role": "user", "content": [{"type": "text"}]}], "part 0: text: must be a string"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]}],
     "message 0, part 1: image_url input is not supported; only text"),
    ([{"role": "user", "content": [{"type": "video"}]}], "video input is not supported"),
    ([{"role": "user", "content": [{"type": "x"}]}], "part 0: type 'x'; only text"),
    ([{"role": "user", "content": [{}] * 1025}], "1025 parts"), ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
    ([{"role": "tool", "content": "x"}], "message 0: a tool message needs a tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": ""}], "needs a tool_call_id"),
    ([assistant(content=5)], "content must be"), ([assistant(content="", reasoning_content=5)], "reasoning_content: must be"),
    ([assistant(content="", tool_calls={})], "tool_calls must be an array"),
    ([assistant(content="", tool_calls=[call()] * 257)], "at most 256 calls"),
    ([assistant(content="", tool_calls=[5])], "message 0, tool call 0: must be an object of type"),
    ([assistant(content="", tool_calls=[call(type="code")])], "of type 'function'"),
    ([assistant(content="", tool_calls=[call("a b")])], "tool call 0: name 'a b'; allowed are 1 to 128"),
    ([assistant(content="", tool_calls=[call("f\n")])], "name"),
    ([assistant(content="", tool_calls=[call("f", 5)])], "arguments must be"),
    ([assistant(content="", tool_calls=[call("f", "{")])], "tool call 0: arguments: not JSON at line 1"),
    ([assistant(content="", tool_calls=[call("f", "[1]")])], "arguments must be an object"),
    ([assistant(content="", tool_calls=[call("f", '{"a": NaN}')])], "NaN is not JSON"),
    ([assistant(content="", tool_calls=[call("f", '{"a": 1, "a": 2}')])], "'a' appears twice"),
    ([assistant(content="", tool_calls=[call("f", {"a": nested(99)})])], "arguments: nests deeper than 64"),
    ([assistant(content="", tool_calls=[call("f", {"a": 2**65})])], "does not fit 64 bits"),
    ([assistant(content="", tool_calls=[call("f", {"\ud800": 1})])], "lone surrogate"),
    ({"messages": [USER], "tools": {}}, "messages: tools: must be an array"),
    ({"messages": [USER], "tools": [5]}, "tools, tool 0: must be an object"),
    ({"messages": [USER], "tools": [tool(), {"type": "x"}]}, "tool 1: must be an object of type"),
    ({"messages": [USER], "tools": [tool(), tool()]}, "tool 1: the name 'f' is taken"),
    ({"messages": [USER], "tools": [tool("")]}, "tool 0: name ''"), ({"messages": [USER], "tools": [tool("x" * 129)]}, "128"),
    ({"messages": [USER], "tools": [tool(parameters=[])]}, "parameters must be"),
    ({"messages": [USER], "tools": [tool(parameters={"x": nested(70)})]}, "nests deeper"),
    ({"messages": [USER], "tools": [tool()] * 1025}, "at most 1024"),
])
def test_malformed_conversations(value: Any, message: str) -> None:
    with pytest.raises(MessagesError, match=message) as caught:
        conversation(value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("data", "message"), [
    (b"", "--messages: not JSON"), (b"\xfe", "not UTF-8"), (b"[" * 99_999, "nests too deeply"), (b"[1e999]", "exceeds"),
    (b'[{"role":"user","role":"user"}]', "appears twice"), (b" " * (64 * 1024 * 1024 + 1), "at most"),
    (b"[" + b"9" * 5000 + b"]", "too many digits"),
])
def test_bytes_that_are_no_conversation(data: bytes, message: str) -> None:
    with pytest.raises(MessagesError, match=message):
        read_messages(data)
