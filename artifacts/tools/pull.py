"""`pull`: download a published artifact, survive bad networks, and prove that it is the published file.

The Hub's client resolves the file (size, checksum, storage location); the transfer is our own, because it must resume,
notice stalls and check what arrives. Bytes collect in `NAME.partial`; only a complete, checked file gets its name.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from artifacts.container.artifact import MAGICS, Artifact
from artifacts.errors import DownloadError, OutputError, quoted, quoted_path
from artifacts.identities.registry import REGISTRY, RegisteredIdentity
from artifacts.tools.http_stream import TransientError, stream

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
HASH_BYTES = 16 << 20
SERIOUS_PROGRESS = 1 << 20
"""Bytes that an attempt must add for the count of failed attempts to start over."""

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class RemoteFile:
    """What the Hub says about a file. `sha256` is None for files that are not in large-file storage."""

    location: str
    size: int
    etag: str
    sha256: str | None


@dataclass(frozen=True)
class PullOptions:
    """stall_seconds: silence, or less than 64 KiB, that long is a stall. attempts: failures in a row before giving up.

    backoff_seconds: wait after the first failure, doubled after each further one up to a minute.
    """

    revision: str = "main"
    endpoint: str | None = None
    stall_seconds: float = 30.0
    attempts: int = 6
    backoff_seconds: float = 1.0


def published_as(name: str, size: int, sha256: str) -> RegisteredIdentity | None:
    """The registry entry of a published file with this name, size and checksum."""
    for entry in REGISTRY.values():
        if entry.file_name == name and sha256 in (entry.sha256, entry.v1_sha256) and size == entry.file_bytes:
            return entry
    return None


def resolve(repository: str, file: str, options: PullOptions) -> tuple[RemoteFile, dict[str, str]]:
    """Ask the Hub for size, checksum and location of a file; also the headers that belong to the location.

    Errors: DownloadError for a refusal or an answer without a size; TransientError when the Hub cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    what = f"{repository}/{file}"
    try:
        url = hf_hub_url(repository, file, revision=options.revision, endpoint=options.endpoint)
        found = get_hf_file_metadata(url, timeout=options.stall_seconds)
    except HFValidationError as error:
        raise DownloadError(f"{quoted(what)}: {_line(error)}") from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (408, 425, 429) or status >= 500 or status == 0:
            raise TransientError(f"the Hub answers HTTP {status}") from None
        raise DownloadError(f"{quoted(what)}: the Hub answers HTTP {status} ({_line(error)})") from None
    except Exception as error:  # the client's own network errors: their classes changed between its releases
        raise TransientError(f"the Hub cannot be reached: {_line(error)}") from None
    etag = found.etag or ""
    if found.size is None or found.size < 1 or not etag:
        raise DownloadError(f"{quoted(what)}: the Hub names no size or no etag")
    if urlsplit(found.location).scheme not in ("http", "https"):
        raise DownloadError(f"{quoted(what)}: the Hub names no http location")
    own = urlsplit(found.location).netloc == urlsplit(url).netloc
    headers = {str(k): str(v) for k, v in build_hf_headers().items()} if own else {}
    return RemoteFile(found.location, found.size, etag, etag if _SHA256.fullmatch(etag) else None), headers


def _line(error: Exception) -> str:
    return quoted(" ".join(str(error).split()) or type(error).__name__, 160)


class _Partial:
    """The bytes so far, the checksum over them, and a note of which remote file they belong to."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".partial")
        self._note = target.with_name(target.name + ".partial.json")
        self.digest = hashlib.sha256()
        self.size = 0

    def resume(self, remote: RemoteFile, progress: Progress | None) -> None:
        """Keep earlier bytes when they belong to the same remote file, else start over."""
        note = {"etag": remote.etag, "size": remote.size}
        try:
            known = json.loads(self._note.read_bytes()[:4096])
            kept = self.path.stat().st_size
        except (OSError, ValueError):
            known, kept = None, 0
        self.digest, self.size = hashlib.sha256(), 0
        if known != note or kept > remote.size:
            self.path.unlink(missing_ok=True)
            self._note.write_text(json.dumps(note))
            return
        with open(self.path, "rb") as file:
            while chunk := file.read(HASH_BYTES):
                self.digest.update(chunk)
                self.size += len(chunk)
                if progress is not None:
                    progress(self.size, remote.size)

    def append(self, chunk: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)

    def head(self) -> bytes:
        """The first eight bytes, once they are there."""
        with open(self.path, "rb") as file:
            return file.read(8)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def finish(self, target: Path) -> None:
        os.replace(self.path, target)
        self._note.unlink(missing_ok=True)


def pull(
    repository: str,
    file: str,
    directory: Path,
    *,
    sha256: str | None = None,
    options: PullOptions | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Path:
    """Download `file` of a Hub repository into `directory`, with the parts of a version 3 artifact; returns its path.

    An earlier interrupted download continues. The content must have the size and checksum that the Hub names, the
    checksum `sha256` when given, and, for version 1 and 2 files under a published name, that of the registry.
    Errors: DownloadError, OutputError (the target exists with other content, disk), those of `artifacts.open`.
    """
    chosen = PullOptions() if options is None else options
    tell = notice if notice is not None else lambda line: None
    if not _REPOSITORY.fullmatch(repository):
        raise DownloadError(f"repository {quoted(repository)} must be OWNER/NAME")
    parts = file.split("/")
    if not file or "\\" in file or any(part in ("", ".", "..") for part in parts):
        raise DownloadError(f"file {quoted(file)} must be a relative path inside the repository")
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise DownloadError(f"checksum {quoted(sha256)} must be 64 lower-case hex digits")
    target = directory / parts[-1]
    _fetch(repository, file, target, sha256, chosen, progress, tell)
    with Artifact(target) as artifact:
        siblings = [part.path for part in artifact.files[1:] if part.path is not None]
    for name in siblings:
        remote_name = "/".join([*parts[:-1], name])
        _fetch(repository, remote_name, directory / name, None, chosen, progress, tell)
    if siblings:
        with Artifact(target) as artifact:
            artifact.open_parts()
    return target


def _fetch(
    repository: str,
    file: str,
    target: Path,
    sha256: str | None,
    options: PullOptions,
    progress: Progress | None,
    tell: Notice,
) -> None:
    """One file: attempts until it is complete, then the checks, then its name."""
    partial = _Partial(target)
    first: RemoteFile | None = None
    failures, since = 0, 0
    while True:
        try:
            remote, headers = resolve(repository, file, options)
            if first is None:
                if _already_there(target, remote, sha256):
                    tell(f"{target.name} is here already and has the right checksum")
                    return
                try:
                    partial.resume(remote, progress)
                except OSError as error:
                    raise OutputError(f"{quoted_path(partial.path)}: {error.strerror or error}") from None
                first, since = remote, partial.size
            elif (remote.etag, remote.size) != (first.etag, first.size):
                raise DownloadError(f"{quoted(file)} changed on the Hub during the download; start again")
            _transfer(partial, remote, headers, options, sha256, target.name, progress)
            break
        except TransientError as error:
            if partial.size - since >= SERIOUS_PROGRESS:
                failures, since = 0, partial.size
            failures += 1
            if failures >= options.attempts:
                raise DownloadError(f"{quoted(file)}: {failures} attempts failed in a row, the last: {error}") from None
            wait = max(error.retry_after, min(60.0, options.backoff_seconds * 2 ** (failures - 1)))
            tell(f"{error}; trying again in {wait:g} s at byte {partial.size}")
            time.sleep(wait)
    digest = partial.digest.hexdigest()
    for expected, owner in ((remote.sha256, "the Hub"), (sha256, "the caller")):
        if expected is not None and digest != expected:
            partial.remove()
            raise DownloadError(f"{quoted(file)}: SHA-256 {digest} is not the one that {owner} names, {expected}")
    _check_registry(partial, remote.size, digest, target.name, tell)
    partial.finish(target)


def _already_there(target: Path, remote: RemoteFile, sha256: str | None) -> bool:
    """Errors: OutputError when another file has the name."""
    if not os.path.lexists(target):
        return False
    wanted = sha256 or remote.sha256
    if wanted is not None and target.is_file() and target.stat().st_size == remote.size:
        with open(target, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == wanted:
                return True
    raise OutputError(f"{quoted_path(target)} exists and is not the file on the Hub; move it away")


def _transfer(
    partial: _Partial,
    remote: RemoteFile,
    headers: Mapping[str, str],
    options: PullOptions,
    sha256: str | None,
    name: str,
    progress: Progress | None,
) -> None:
    """One attempt from where the partial file ends."""
    checked = False
    if partial.size == remote.size:  # an earlier run ended after the last byte
        return
    try:
        for chunk in stream(remote.location, partial.size, remote.size, headers, options.stall_seconds):
            partial.append(chunk)
            if not checked and partial.size >= 8:
                checked = True
                _check_early(partial, remote, sha256, name)
            if progress is not None:
                progress(partial.size, remote.size)
    except OSError as error:
        raise OutputError(f"{quoted_path(partial.path)}: {error.strerror or error}") from None


def _check_early(partial: _Partial, remote: RemoteFile, sha256: str | None, name: str) -> None:
    """What the first bytes and the announced checksum already exclude is not worth 20 GB."""
    try:
        if sha256 is not None and remote.sha256 is not None and sha256 != remote.sha256:
            raise DownloadError(f"{quoted(name)}: the Hub names SHA-256 {remote.sha256}, {sha256} is required")
        if remote.sha256 is not None:
            _check_registry(partial, remote.size, remote.sha256, name, lambda line: None)
    except DownloadError:
        partial.remove()
        raise


def _check_registry(partial: _Partial, size: int, digest: str, name: str, tell: Notice) -> None:
    """Version 1 and 2 files under a published name must be published files; version 3 files have no registry yet."""
    version = MAGICS.get(partial.head())
    names = {entry.file_name for entry in REGISTRY.values()}
    if name not in names:
        tell(f"{name} is not in the registry of published files; SHA-256 {digest}")
    elif version == 3:
        tell(f"{name} is version 3; the registry knows version 1 and 2 files only; SHA-256 {digest}")
    elif published_as(name, size, digest) is None:
        partial.remove()
        raise DownloadError(f"{quoted(name)}: SHA-256 {digest} with {size} bytes is no published version of this file")
