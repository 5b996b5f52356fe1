"""Reads JSON that comes from an artifact or a user: size, depth, duplicate members and numbers are checked."""

import json
from collections import Counter
from typing import Any

from artifacts.errors import quoted
from runtime.frontend.errors import FrontendError


def parse_json(data: bytes | str, what: str, max_bytes: int, error: type[FrontendError]) -> Any:
    """The value of one JSON text of at most `max_bytes` bytes of UTF-8.

    Duplicate members, NaN and infinities are errors. Raises `error` with one line that starts with `what`.
    """
    size = len(data) if isinstance(data, bytes) else len(data.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise error(f"{what}: {size} bytes; at most {max_bytes} are allowed")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{what}: the member {quoted(twice)} appears twice in one object")
        return made

    def constant(name: str) -> Any:
        raise error(f"{what}: {name} is not JSON")

    def real(text: str) -> float:
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise error(f"{what}: the number {quoted(text, 32)} exceeds a double")
        return number

    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=members, parse_constant=constant, parse_float=real)
    except UnicodeDecodeError as problem:
        raise error(f"{what}: not UTF-8 at byte {problem.start}") from None
    except json.JSONDecodeError as problem:
        raise error(f"{what}: not JSON at line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except RecursionError:
        raise error(f"{what}: nests too deeply") from None
    except ValueError:
        raise error(f"{what}: a number has too many digits") from None
