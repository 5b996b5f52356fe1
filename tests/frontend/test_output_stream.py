"""Stop strings, reasoning split and tool calls, all independent of how the text is cut into tokens."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.errors import OptionError
from runtime.frontend.output_stream import (
    Answer,
    Finish,
    FinishReason,
    OutputStream,
    StreamOptions,
    TextPiece,
    ToolCalls,
    ends_in_think_block,
)
from runtime.frontend.stops import StopMatcher
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.tool_calls import ToolCall, parse_tool_calls

END, TEXT_END = 4091, 4089


def tool(name: str = "look", **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool(city={"type": "string"}, days={"type": "integer"}), tool("other")]
CALL = "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


def run(tokenizer: Tokenizer, text: str, end: int | FinishReason = END, **options: Any) -> tuple[OutputStream, list[Any]]:
    stream = OutputStream(tokenizer, StreamOptions(stop_ids=(END, TEXT_END), **options))
    events = [event for token in tokenizer.encode(text) for event in stream.feed(token)]
    events += stream.finish(end) if isinstance(end, FinishReason) else stream.feed(end)
    return stream, events


def texts(events: list[Any], channel: str) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece) and event.channel == channel)


def test_reasoning_is_split_at_the_first_marker(tokenizer: Tokenizer) -> None:
    stream, events = run(tokenizer, "I think.\n</think>\n\n Answer </think> more", thinking=True)
    assert texts(events, "reasoning") == "I think.\n"
    assert texts(events, "content") == "Answer </think> more"
    assert events[-1] == Finish(FinishReason.STOP_TOKEN, END)
    assert stream.answer == Answer("I think.\n", "Answer </think> more", (), events[-1])
    assert stream.generated == len(tokenizer.encode("I think.\n</think>\n\n Answer </think> more")) + 1
    assert stream.reasoning_tokens == len(tokenizer.encode("I think.\n</think>"))


def test_without_thinking_everything_is_content(tokenizer: Tokenizer) -> None:
    _, events = run(tokenizer, "\n x</think>y")
    assert texts(events, "content") == "\n x</think>y" and texts(events, "reasoning") == ""


def test_a_marker_spelled_in_plain_tokens_counts(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, StreamOptions(thinking=True))
    pieces = [stream.feed(token) for token in tokenizer.encode_text("a<b</think>c")]
    assert len(pieces) > 4 and not stream.done
    stream.finish(FinishReason.OUTPUT_LIMIT)
    assert (stream.answer.reasoning, stream.answer.content) == ("a<b", "c")


def test_unfinished_reasoning(tokenizer: Tokenizer) -> None:
    stream, events = run(tokenizer, "so far </thi", FinishReason.OUTPUT_LIMIT, thinking=True)
    assert (stream.answer.reasoning, stream.answer.content) == ("so far </thi", "")
    assert events[-1] == Finish(FinishReason.OUTPUT_LIMIT)


def test_special_tokens_are_withheld_and_stop_ids_end(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, StreamOptions(stop_ids=(END,)))
    assert stream.feed(TEXT_END) == []
    assert stream.feed(tokenizer.encode_text("x")[0]) == [TextPiece("content", "x")]
    assert stream.feed(END) == [Finish(FinishReason.STOP_TOKEN, END)]
    assert stream.feed(0) == [] == stream.finish(FinishReason.CANCELLED)
    assert stream.generated == 3


def test_raw_output_shows_everything(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, StreamOptions(thinking=True, tools=TOOLS, raw=True, stop_ids=(END,)))
    text = "a</think><|endoftext|><tool_call>b"
    for token in tokenizer.encode(text):
        stream.feed(token)
    stream.finish(FinishReason.CANCELLED)
    assert stream.answer == Answer("", text, (), Finish(FinishReason.CANCELLED))


def test_an_incomplete_character_at_the_end(tokenizer: Tokenizer) -> None:
    byte_ids = {piece[0]: token for token, piece in enumerate(tokenizer.token_bytes) if len(piece) == 1}
    stream = OutputStream(tokenizer, StreamOptions())
    assert [stream.feed(byte_ids[value]) for value in "é".encode()[:1]] == [[]]
    assert stream.finish(FinishReason.OUTPUT_LIMIT) == [TextPiece("content", "\ufffd"), Finish(FinishReason.OUTPUT_LIMIT)]


def test_stop_strings_belong_to_their_channel(tokenizer: Tokenizer) -> None:
    text = "one STOP two</think>three HALT four STOP five"
    stream, _ = run(tokenizer, text, thinking=True, stops=["STOP"], reasoning_stops=["HALT"])
    assert stream.answer == Answer("one STOP two", "three HALT four ", (), Finish(FinishReason.STOP_STRING, "STOP"))
    stream, _ = run(tokenizer, text, thinking=True, reasoning_stops=["STOP"])
    assert stream.answer == Answer("one ", "", (), Finish(FinishReason.STOP_STRING, "STOP"))


def test_partial_stops_are_held_and_released(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, StreamOptions(stops=["</end>"]))
    for token in tokenizer.encode_text("a </en"):
        stream.feed(token)
    assert stream.answer.content == "a "
    stream.finish(FinishReason.OUTPUT_LIMIT)
    assert stream.answer.content == "a </en"


@pytest.mark.parametrize(("stops", "text", "shown", "stop"), [
    (["b"], "abc", "a", "b"), (["bc", "abcd"], "abcd", "a", "bc"), (["cd", "abcd"], "xabcd", "x", "abcd"),
    (["aab"], "aaab", "a", "aab"), (["abab"], "abaabab", "aba", "abab"), (["zz"], "abc", "abc", None),
    (["abcx", "c"], "abcd", "ab", "c"), (["x"], "", "", None), ([], "abc", "abc", None), (["ab", "b"], "ab", "", "ab"),
    (["\n\n"], "a\n\n\nb", "a", "\n\n"), (["🙂"], "a🙂b", "a", "🙂"),
])
def test_matcher(stops: list[str], text: str, shown: str, stop: str | None) -> None:
    for size in (1, 2, 3, 99):
        matcher = StopMatcher(stops)
        seen, found = "", None
        for start in range(0, len(text), size):
            match = matcher.feed(text[start : start + size])
            seen += match.text
            if match.stop is not None:
                found = match.stop
                break
        if found is None:
            seen += matcher.flush()
        assert (seen, found) == (shown, stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=14), st.data())
def test_matcher_against_a_search_of_every_prefix(stops: list[str], text: str, data: st.DataObject) -> None:
    shown, stop = text, None
    for end in range(len(text) + 1):
        ending = [item for item in stops if text[:end].endswith(item)]
        if ending:
            stop = max(ending, key=len)
            shown = text[: end - len(stop)]
            break
    matcher, seen, found, position = StopMatcher(stops), "", None, 0
    while position < len(text) and found is None:
        size = data.draw(st.integers(1, 4))
        match = matcher.feed(text[position : position + size])
        seen, found, position = seen + match.text, match.stop, position + size
        assert shown.startswith(seen)
        assert not matcher.held or any(item.startswith(matcher.held) for item in stops)
    assert (seen + ("" if found else matcher.flush()), found) == (shown, stop)


@pytest.mark.parametrize(("stops", "message"), [
    ([""], "--stop: a stop string must have 1 to 1024"), (["x" * 1025], "1 to 1024"),
    ([str(i) for i in range(17)], "17 stop strings"),
])
def test_bad_stop_strings(tokenizer: Tokenizer, stops: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        OutputStream(tokenizer, StreamOptions(stops=stops))
    with pytest.raises(OptionError, match=message.replace("--stop", "--reasoning-stop")):
        OutputStream(tokenizer, StreamOptions(reasoning_stops=stops))


def test_tool_calls_end_the_answer(tokenizer: Tokenizer) -> None:
    stream, events = run(tokenizer, f"hm</think>\n\nLet me see. \n\n{CALL}\n", thinking=True, tools=TOOLS)
    assert stream.answer == Answer("hm", "Let me see.", (ToolCall("look", '{"city": "Oslo"}'),),
                                   Finish(FinishReason.STOP_TOKEN, END))
    assert events[-2] == ToolCalls((ToolCall("look", '{"city": "Oslo"}'),))
    stream, _ = run(tokenizer, f"</think>{CALL}{CALL}", thinking=True, tools=TOOLS)
    assert len(stream.answer.tool_calls) == 2 and stream.answer.content == ""


def test_tool_markup_in_reasoning_or_without_tools_is_text(tokenizer: Tokenizer) -> None:
    stream, _ = run(tokenizer, f"{CALL}</think>x", thinking=True, tools=TOOLS)
    assert (stream.answer.reasoning, stream.answer.content, stream.answer.tool_calls) == (CALL, "x", ())
    stream, _ = run(tokenizer, f"a {CALL}")
    assert (stream.answer.content, stream.answer.tool_calls) == (f"a {CALL}", ())


@pytest.mark.parametrize("text", [
    f"a \n{CALL} b", f"{CALL[:-1]}", "<tool_call>", "x <tool_call", "x \n <tool", "x \n ", f"a {CALL}\n<tool_call>",
    CALL.replace("look", "nothing"), CALL.replace("look", "l o"), CALL.replace("</parameter>", ""), f"{CALL}{CALL} .",
    CALL.replace("</function>", ""), CALL.replace("<parameter=city>", "<parameter=city>\n<parameter=x>"),
    CALL.replace("</function>", "<parameter=city>\nx\n</parameter>\n</function>"), CALL.replace("city", "c" * 300),
    CALL.replace("</parameter>", "</parameter> and"), "<tool_call>{\"name\": \"look\"}</tool_call>",
])
def test_malformed_markup_comes_back_byte_for_byte(tokenizer: Tokenizer, text: str) -> None:
    stream, events = run(tokenizer, text, FinishReason.OUTPUT_LIMIT, tools=TOOLS)
    assert stream.answer == Answer("", text, (), Finish(FinishReason.OUTPUT_LIMIT))
    assert texts(events, "content") == text


def test_content_streams_before_a_tool_call(tokenizer: Tokenizer) -> None:
    stream = OutputStream(tokenizer, StreamOptions(tools=TOOLS))
    for token in tokenizer.encode(f"Let me see.\n\n{CALL}"):
        stream.feed(token)
    assert stream.answer.content == "Let me see." and not stream.done


def test_a_stop_string_inside_markup_leaves_text(tokenizer: Tokenizer) -> None:
    stream, _ = run(tokenizer, f"a {CALL}", tools=TOOLS, stops=["Oslo"])
    assert stream.answer.content == f"a {CALL}".split("Oslo")[0]
    assert stream.answer.finish == Finish(FinishReason.STOP_STRING, "Oslo")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "\n", "STOP", "ST", "</think>", "</th", "<tool_call>", "<tool", CALL,
                                 "é", "🙂", "halt"]),
                max_size=8), st.booleans(), st.booleans(), st.data())
def test_events_do_not_depend_on_the_cut_into_tokens(tokenizer: Tokenizer, parts: list[str], thinking: bool, tools: bool,
                                                     data: st.DataObject) -> None:
    text = "".join(parts)
    options = StreamOptions(thinking=thinking, tools=TOOLS if tools else (), stops=["STOP"], reasoning_stops=["halt"])
    byte_ids = {piece[0]: token for token, piece in enumerate(tokenizer.token_bytes) if len(piece) == 1}
    by_bytes = [byte_ids[value] for value in text.encode()]
    whole = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(text)))
    answers = []
    for ids in (by_bytes, whole, [*tokenizer.encode_text(text[:cut]), *tokenizer.encode(text[cut:])]):
        stream = OutputStream(tokenizer, options)
        events = [event for token in ids for event in stream.feed(token)]
        events += stream.finish(FinishReason.OUTPUT_LIMIT)
        assert isinstance(events[-1], Finish) and stream.done
        assert texts(events, "content") == stream.answer.content
        answers.append(stream.answer)
    assert answers[0] == answers[1] == answers[2]


def call_text(*parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def arguments(value: str, schema: Any, **root: Any) -> Any:
    """What one parameter text becomes under a schema."""
    parameters = {"type": "object", "properties": {"p": schema}} | root
    calls = parse_tool_calls(call_text(("p", value)), [{"function": {"name": "f", "parameters": parameters}}])
    assert calls is not None and calls[0].name == "f"
    return json.loads(calls[0].arguments)


REF = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(("value", "schema", "expected"), [
    ("\n5\n", {"type": "string"}, "5"), ("\n\n", {"type": "string"}, ""), ("\n", {"type": "string"}, ""),
    ("", {"type": "string"}, ""),
    ("\n\n a \n\n", {"type": "string"}, "\n a \n"), ("\n5\n", {"type": ["integer", "string"]}, "5"),
    ("\nnull\n", {"type": ["string", "null"]}, "null"), ("\n 5 \n", {"type": "integer"}, 5),
    ("\n5.0\n", {"type": "integer"}, 5.0),
    ("\n5.5\n", {"type": "integer"}, "5.5"), ("\n5.5\n", {"type": "number"}, 5.5), ("\nTrue\n", {"type": "boolean"}, True),
    ("\nfAlse\n", {"type": "boolean"}, False), ("\n1\n", {"type": "boolean"}, "1"), ("\ntrue\n", {"type": "integer"}, "true"),
    ("\n[1, {\"a\": null}]\n", {"type": "array"}, [1, {"a": None}]), ("\n{}\n", {"type": "array"}, "{}"),
    ("\n{\"b\": 1}\n", {"type": "object"}, {"b": 1}), ("\n{\"b\": 1, \"b\": 2}\n", {"type": "object"}, '{"b": 1, "b": 2}'),
    ("\nnull\n", {"type": "null"}, None), ("\nnull\n", {"type": "integer", "nullable": True}, None),
    ("\nabc\n", {"type": "integer"}, "abc"),
    ("\n5\n", {}, 5), ("\nabc\n", {}, "abc"), ("\n5\n", True, 5), ("\n\"q\"\n", {"type": "integer"}, '"q"'),
    ("\n1\n", {"enum": [1, 2]}, 1), ("\n1\n", {"enum": ["1", "2"]}, "1"), ("\n1\n", {"const": "x"}, "1"),
    ("\n1\n", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1"),
    ("\n1\n", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
    ("\n1\n", {"oneOf": [{"type": "integer"}, {}]}, 1),
    ("\nx\n", {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "x"),
    ("\n7\n", REF, 7), ("\n7\n", {"$ref": "#/$defs/s"}, "7"), ("\n7\n", {"$ref": "#/nowhere"}, 7), ("\n7\n", {"$ref": "x"}, 7),
    ("\n7\n", {"$ref": "#/$defs/loop"}, 7), ("\nNaN\n", {"type": "number"}, "NaN"), ("\n1e999\n", {"type": "number"}, "1e999"),
    ("\n" + "9" * 5000 + "\n", {"type": "integer"}, "9" * 5000), ("\n" + "9" * 400 + "\n", {"type": "integer"}, int("9" * 400)),
    ("\n" + "[" * 9999 + "\n", {"type": "array"}, "[" * 9999), ("\n\"\\ud800\"\n", {}, '"\\ud800"'),
    ("x", {"type": "string"}, "x"),
    ("\na <parameter=q>\nb\n</parameter> c\n", {"type": "string"}, "a <parameter=q>\nb\n</parameter> c"),
    ("\n</function></tool_call>\n", {"type": "string"}, "</function></tool_call>"), ("\né 🙂\n", {"type": "string"}, "é 🙂"),
])
def test_values_follow_the_schema(value: str, schema: Any, expected: Any) -> None:
    definitions = {"n": {"type": "integer"}, "s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert arguments(value, schema, **{"$defs": definitions}) == {"p": expected}


def test_empty_text_of_a_typed_parameter_is_omitted() -> None:
    assert arguments("\n\n", {"type": "integer"}) == {}
    assert arguments("\n  \n", {"type": ["object", "null"]}) == {}


def test_source_order_and_undeclared_parameters() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"z": {"type": "string"}}}}}]
    calls = parse_tool_calls(call_text(("b", "\n1\n"), ("z", "\n2\n"), ("a", "\nx y\n")), tools)
    assert calls == [ToolCall("f", '{"b": 1, "z": "2", "a": "x y"}')]
    assert parse_tool_calls(call_text(), [{"function": {"name": "f"}}]) == [ToolCall("f", "{}")]
    odd = [{"function": {"name": "f", "parameters": {"properties": []}}}]
    assert parse_tool_calls(call_text(("a", "\n1\n")), odd) == [ToolCall("f", '{"a": 1}')]


def test_references_that_multiply_are_cut_off() -> None:
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 60} for i in range(12)}
    assert arguments("\n1\n", {"$ref": "#/$defs/d0"}, **{"$defs": definitions}) == {"p": 1}


def test_think_block_at_the_end_of_a_prompt() -> None:
    assert ends_in_think_block("<|im_start|>assistant\n<think>\n")
    assert not ends_in_think_block("<|im_start|>assistant\n<think>\n\n</think>\n\n")
