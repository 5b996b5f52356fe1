"""Prompts of the command line: text, conversations or ids; and the frontend that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import artifacts
from runtime.cli.errors import InputError, UsageError
from runtime.cli.files import read_bytes
from runtime.frontend.frontend import Frontend, Prompt, PromptOptions
from runtime.frontend.messages import MAX_FILE_BYTES, read_messages
from runtime.frontend.tokenizer import TOKENIZER_JSON

MAX_IDS_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20


def read_ids(path: Path, option: str = "--ids") -> list[int]:
    """Token ids of a JSON file, one array of integers. Raises InputError naming file and entry."""
    data = read_bytes(path, MAX_IDS_BYTES, option)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{option} {path}: not a JSON array of token ids ({str(error).splitlines()[0]})") from None
    return check_ids(value, f"{option} {path}")


def check_ids(value: object, where: str) -> list[int]:
    """A non-empty list of non-negative integers. Raises InputError."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: a non-empty JSON array of token ids is needed")
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            raise InputError(f"{where}: entry {position} is {json.dumps(token)[:40]}; token ids are integers from 0")
    return value


def open_frontend(artifact: artifacts.Artifact, vocab_rows: int, template: Path | None) -> Frontend | None:
    """The artifact's frontend, None where it has no tokenizer. Raises FrontendError, InputError."""
    if artifact.model.frontend(TOKENIZER_JSON) is None:
        if template is not None:
            raise UsageError("--chat-template: the artifact has no tokenizer, a template is of no use")
        return None
    local = None if template is None else read_bytes(template, MAX_TEMPLATE_BYTES, "--chat-template")
    return Frontend.from_artifact(artifact, vocab_rows=vocab_rows, chat_template=local)


def make_prompt(frontend: Frontend | None, text: str | None, messages: Path | None, ids: Path | None,
                options: PromptOptions) -> Prompt:  # fmt: skip
    """The prompt of exactly one of three options. Raises UsageError, InputError, FrontendError."""
    given = [name for name, value in (("--prompt", text), ("--messages", messages), ("--ids", ids)) if value is not None]
    if len(given) != 1:
        raise UsageError(f"exactly one of --prompt, --messages, --ids is needed; {', '.join(given) or 'none'} given")
    if ids is not None:
        if options != PromptOptions():
            raise UsageError("--no-thinking and --reasoning-effort choose how a template renders; --ids needs none")
        tokens = read_ids(ids)
        return Prompt(tokens, "", False) if frontend is None else frontend.from_ids(tokens)
    if frontend is None:
        raise InputError(f"{given[0]}: the artifact has no {TOKENIZER_JSON}; only token ids can be used (--ids)")
    if messages is not None:
        return frontend.prompt(read_messages(read_bytes(messages, MAX_FILE_BYTES, "--messages"), f"--messages {messages}"),
                               options)  # fmt: skip
    return frontend.prompt(text or "", options)
