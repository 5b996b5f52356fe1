"""One HTTP download attempt: bytes from an offset, with a watch on the flow.

Only http and https are spoken, also after redirects. A server that sends nothing for `stall_seconds`, or less than
`MINIMUM_BYTES` in such a period, counts as stalled.
"""

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import Any

from artifacts.errors import DownloadError, quoted

READ_BYTES = 1 << 20
MINIMUM_BYTES = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})$")


class TransientError(Exception):
    """The attempt failed in a way that another attempt may not; `retry_after` seconds when the server names them."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, and keeps credentials on their host."""

    def redirect_request(
        self, request: urllib.request.Request, response: Any, code: int, reason: str, headers: Any, url: str
    ) -> urllib.request.Request | None:
        if not url.lower().startswith(("http://", "https://")):
            raise DownloadError(f"the server redirects to a scheme other than http: {quoted(url)}")
        moved = super().redirect_request(request, response, code, reason, headers, url)
        if moved is not None and moved.host != request.host:
            moved.remove_header("Authorization")
        return moved


def stream(
    url: str, offset: int, size: int | None, headers: Mapping[str, str], stall_seconds: float
) -> Iterator[bytes]:
    """Chunks of the file from `offset` to its end at `size` bytes (None: unknown).

    Raises TransientError when the connection breaks, stalls or ends early, DownloadError when the server refuses or
    sends something else than the bytes that were asked for.
    """
    request = urllib.request.Request(url, headers=dict(headers) | {"Accept-Encoding": "identity"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    try:
        with _opener().open(request, timeout=stall_seconds) as response:
            _check_response(response, offset, size)
            skip = offset if response.status == 200 else 0  # a server without ranges starts over
            yield from _watched(response, skip, None if size is None else size - (offset - skip), stall_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (408, 425, 429) or error.code >= 500:
            raise TransientError(f"HTTP {error.code}", _retry_after(error.headers)) from None
        raise DownloadError(f"the server answers HTTP {error.code} {quoted(error.reason)}") from None
    except urllib.error.URLError as error:
        raise TransientError(f"no connection: {quoted(error.reason)}") from None
    except TimeoutError:
        raise TransientError(f"no data for {stall_seconds:g} s") from None
    except (http.client.HTTPException, OSError) as error:
        raise TransientError(f"{type(error).__name__}: {quoted(str(error))}") from None


def _retry_after(headers: Message) -> float:
    value = headers.get("Retry-After", "")
    return min(float(value), 60.0) if value.isdigit() and len(value) < 6 else 0.0


def _check_response(response: http.client.HTTPResponse, offset: int, size: int | None) -> None:
    if response.status not in (200, 206):
        raise DownloadError(f"the server answers HTTP {response.status} where the file was expected")
    length = response.headers.get("Content-Length", "")
    declared = int(length) if length.isdigit() and len(length) < 20 else None
    if response.status == 206:
        match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != offset or (size is not None and int(match[3]) != size):
            raise DownloadError("the server sends another byte range than the one that was asked for")
        size = None if size is None else size - offset
    if size is not None and declared is not None and declared != size:
        raise DownloadError(f"the server announces {declared} bytes where {size} remain")


def _watched(
    response: http.client.HTTPResponse, skip: int, remaining: int | None, stall_seconds: float
) -> Iterator[bytes]:
    window_start, window_bytes = time.monotonic(), 0
    while remaining is None or remaining > 0:
        chunk = response.read1(READ_BYTES)
        if not chunk:
            if remaining:
                raise TransientError(f"the connection closed {remaining} bytes early")
            return
        window_bytes += len(chunk)
        now = time.monotonic()
        if window_bytes >= MINIMUM_BYTES:
            window_start, window_bytes = now, 0
        elif now - window_start > stall_seconds and remaining != len(chunk):
            raise TransientError(f"only {window_bytes} bytes in {stall_seconds:g} s")
        if remaining is not None:
            if len(chunk) > remaining:
                raise DownloadError("the server sends more bytes than it announced")
            remaining -= len(chunk)
        dropped = min(skip, len(chunk))
        skip -= dropped
        if len(chunk) > dropped:
            yield chunk[dropped:]
