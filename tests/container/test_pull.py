"""Downloads from a local Hub that stalls, cuts and lies."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import artifacts
from artifacts.errors import DownloadError, OutputError
from artifacts.tools.http_stream import TransientError, stream
from artifacts.tools.pull import PullOptions, pull
from tests.container.samples import write_v2, write_v3

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Files and misbehaviour. `script`: one entry per GET, the last one repeats; `requests` records (method, range)."""

    files: dict[str, bytes] = field(default_factory=dict)
    script: list[str] = field(default_factory=lambda: ["good"])
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    head_status: list[int] = field(default_factory=list)
    redirect_to: str | None = None
    authorization: list[str | None] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def next(self) -> str:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        hub = self.hub
        hub.requests.append(("HEAD", None))
        status = hub.head_status.pop(0) if hub.head_status else 200
        name = self.path.split("/resolve/main/")[-1]
        if name not in hub.files:
            status = 404
        self.send_response(status)
        if status == 200:
            data = hub.files[name]
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", '"' + hub.etags.get(name, hashlib.sha256(data).hexdigest()) + '"')
            self.send_header("Content-Length", str(hub.sizes.get(name, len(data))))
        else:
            self.send_header("Content-Length", "0")
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        hub = self.hub
        asked = self.headers.get("Range")
        hub.requests.append(("GET", asked))
        hub.authorization.append(self.headers.get("Authorization"))
        name = self.path.split("/resolve/main/")[-1].removeprefix("/blob/")
        data = hub.files[name]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        mode = hub.next()
        if mode == "redirect":
            self.send_response(302)
            self.send_header("Location", hub.redirect_to or f"{hub.url}/blob/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if mode.isdigit():
            self.send_response(int(mode))
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        body = data[start:]
        if mode == "norange":
            start, body, asked = 0, data, None
        if mode == "wrongrange":
            start, body = start + 1, body[1:]
        if mode == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        announced = len(body) + (5 if mode == "longer" else 0)
        if mode == "endless":
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        try:
            if mode == "cut":
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            elif mode == "stall":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.release.wait(10)
                self.close_connection = True
            elif mode == "trickle":
                for at in range(0, len(body), 16):
                    self.wfile.write(body[at : at + 16])
                    self.wfile.flush()
                    if hub.release.wait(0.05):
                        break
                self.close_connection = True
            elif mode == "endless":
                self.wfile.write(body + b"more and more")
            else:
                self.wfile.write(body)
        except OSError:  # the client hung up
            self.close_connection = True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    state.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write_v2(tmp_path / "source.ninfer", "bf16").read_bytes()


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    target = tmp_path / "out"
    target.mkdir()

    def run(file: str = "model.ninfer", repository: str = "owner/repo", **keywords: object) -> Path:
        options = PullOptions(endpoint=hub.url, stall_seconds=0.4, attempts=3, backoff_seconds=0.01)
        notices: list[str] = keywords.pop("notices", [])  # type: ignore[assignment]
        return pull(repository, file, target, options=options, notice=notices.append, **keywords)  # type: ignore[arg-type]

    return run


def test_plain_download(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    seen: list[tuple[int, int]] = []
    path = fetch(progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == content and seen[-1] == (len(content), len(content))
    assert [p.name for p in path.parent.iterdir()] == ["model.ninfer"]
    notices: list[str] = []
    assert fetch(notices=notices) == path and "here already" in notices[0]
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(OutputError, match="exists and is not the file on the Hub"):
        fetch()


@pytest.mark.parametrize("mode", ["cut", "stall", "trickle"])
def test_broken_connections_resume(hub: Hub, fetch: Fetch, content: bytes, mode: str) -> None:
    hub.files["model.ninfer"] = content
    hub.script = [mode, "good"]
    notices: list[str] = []
    assert fetch(notices=notices).read_bytes() == content
    gets = [asked for method, asked in hub.requests if method == "GET"]
    assert len(gets) == 2 and gets[0] is None and gets[1] is not None
    if mode != "trickle":
        assert gets[1] == f"bytes={len(content) // 2}-"
    assert {"cut": "early", "stall": "no data for", "trickle": "bytes in"}[mode] in notices[0]


def test_a_server_without_ranges_starts_over(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "norange"]
    assert fetch().read_bytes() == content


def test_progress_resets_the_count_and_silence_does_not(hub: Hub, fetch: Fetch) -> None:
    big = b"NINFER\0\x02" + bytes(range(256)) * 40000  # 10 MB, each cut halves what is missing
    hub.files["model.ninfer"] = big
    hub.script = ["cut", "cut", "cut", "cut", "good"]
    with pytest.raises(artifacts.ArtifactError, match="directory of|leaves the file"):
        fetch()  # complete and checked, but no artifact
    assert sum(method == "GET" for method, _ in hub.requests) == 5
    hub.requests.clear()
    hub.script = ["503"]
    with pytest.raises(DownloadError, match="3 attempts failed in a row, the last: HTTP 503"):
        fetch("other.ninfer") if hub.files.setdefault("other.ninfer", big) else None
    assert sum(method == "GET" for method, _ in hub.requests) == 3


def test_interrupted_run_continues(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "500"]
    with pytest.raises(DownloadError, match="3 attempts"):
        fetch()
    partial = tmp_path / "out" / "model.ninfer.partial"
    assert partial.stat().st_size == len(content) // 2
    hub.script, hub.requests = ["good"], []
    assert fetch().read_bytes() == content
    assert [asked for method, asked in hub.requests if method == "GET"] == [f"bytes={len(content) // 2}-"]
    assert not partial.exists()


def test_partial_of_another_version_is_not_continued(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path) -> None:
    hub.files["model.ninfer"] = content[::-1]
    hub.script = ["cut", "500"]
    with pytest.raises(DownloadError):
        fetch()
    hub.files["model.ninfer"] = content
    hub.script, hub.requests = ["good"], []
    assert fetch().read_bytes() == content
    assert [asked for method, asked in hub.requests if method == "GET"] == [None]


def test_complete_partial_needs_no_transfer(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "500"]
    with pytest.raises(DownloadError):
        fetch()
    (tmp_path / "out" / "model.ninfer.partial").write_bytes(content)
    hub.requests.clear()
    assert fetch().read_bytes() == content and all(method == "HEAD" for method, _ in hub.requests)


def test_damaged_partial_is_noticed(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "500"]
    with pytest.raises(DownloadError):
        fetch()
    partial = tmp_path / "out" / "model.ninfer.partial"
    partial.write_bytes(b"X" + partial.read_bytes()[1:])
    hub.script = ["good"]
    with pytest.raises(DownloadError, match="SHA-256 .* is not the one that the Hub names"):
        fetch()
    assert list((tmp_path / "out").iterdir()) == []
    assert fetch().read_bytes() == content


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ("corrupt", "is not the one that the Hub names"),
        ("longer", "announces .* where .* remain"),
        ("endless", "more bytes than it announced"),
        ("403", "HTTP 403"),
    ],
)
def test_lies(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path, mode: str, match: str) -> None:
    hub.files["model.ninfer"] = content
    hub.script = [mode]
    if mode == "endless":  # the announced size ends before the data does, so the lie shows in one chunk
        hub.sizes["model.ninfer"] = len(content) - 3
    with pytest.raises(DownloadError, match=match):
        fetch()
    assert not (tmp_path / "out" / "model.ninfer").exists()


def test_wrong_range_is_refused(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "wrongrange"]
    with pytest.raises(DownloadError, match="another byte range"):
        fetch()


def test_file_that_changes_meanwhile(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["cut", "good"]
    before = hub.next

    def change() -> str:
        mode = before()
        if mode == "cut":
            hub.etags["model.ninfer"] = "0" * 64
        return mode

    hub.next = change  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match="changed on the Hub during the download"):
        fetch()


def test_checksum_of_the_caller(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    digest = hashlib.sha256(content).hexdigest()
    with pytest.raises(DownloadError, match=f"the Hub names SHA-256 {digest}, {'a' * 64} is required"):
        fetch(sha256="a" * 64)
    with pytest.raises(DownloadError, match="64 lower-case hex digits"):
        fetch(sha256="abc")
    hub.etags["model.ninfer"] = "small-file-etag"  # no checksum from the Hub: the caller's decides
    with pytest.raises(DownloadError, match="is not the one that the caller names"):
        fetch(sha256="b" * 64)
    assert fetch(sha256=digest).read_bytes() == content


def test_published_names_must_be_published_files(hub: Hub, fetch: Fetch, content: bytes, tmp_path: Path) -> None:
    hub.files["qwen3_8_27b.ninfer"] = content * 3
    with pytest.raises(DownloadError, match="is no published version of this file"):
        fetch("qwen3_8_27b.ninfer")
    assert list((tmp_path / "out").iterdir()) == []
    new = write_v3(tmp_path / "v3.ninfer").read_bytes()  # version 3 files have other checksums than the registry
    hub.files["qwen3_8_27b.ninfer"] = new
    notices: list[str] = []
    assert fetch("qwen3_8_27b.ninfer", notices=notices).read_bytes() == new
    assert "is version 3" in notices[0]


def test_parts_come_along(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    source = write_v3(tmp_path / "v3.ninfer", limit=65536)
    for path in tmp_path.glob("v3.ninfer*"):
        hub.files[f"sub/{path.name}"] = path.read_bytes()
    target = fetch("sub/v3.ninfer")
    with artifacts.open(target) as new, artifacts.open(source) as old:
        assert (new.read(0, new.payload_bytes) == old.read(0, old.payload_bytes)).all()
    assert len(list(target.parent.iterdir())) == len(hub.files) > 2


def test_redirects(hub: Hub, fetch: Fetch, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["model.ninfer"] = content
    hub.script = ["redirect", "good"]
    assert fetch().read_bytes() == content
    hub.files["b.ninfer"] = content
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/b"):
        hub.script, hub.redirect_to = ["redirect", "good"], target
        with pytest.raises(DownloadError, match="is not allowed|scheme other than http"):
            fetch("b.ninfer")
    hub.script, hub.redirect_to = ["redirect"], f"{hub.url}/blob/b.ninfer"
    with pytest.raises(DownloadError, match="HTTP 302|redirect"):
        fetch("b.ninfer")


def test_credentials_stay_on_their_host(hub: Hub, content: bytes) -> None:
    hub.files["b.ninfer"] = content
    hub.script, hub.redirect_to = ["redirect", "good"], hub.url.replace("127.0.0.1", "localhost") + "/blob/b.ninfer"
    data = b"".join(stream(f"{hub.url}/x/resolve/main/b.ninfer", 0, len(content), {"Authorization": "Bearer t"}, 2.0))
    assert data == content and hub.authorization == ["Bearer t", None]


@pytest.mark.parametrize(
    ("repository", "file", "match"),
    [
        ("owner", "f", "must be OWNER/NAME"),
        ("owner/../x", "f", "must be OWNER/NAME"),
        ("owner/repo", "../f", "relative path"),
        ("owner/repo", "/f", "relative path"),
        ("owner/repo", "a\\..\\f", "relative path"),
        ("owner/repo", "", "relative path"),
        ("owner/repo", "absent.ninfer", "HTTP 404"),
    ],
)
def test_bad_names(hub: Hub, fetch: Fetch, repository: str, file: str, match: str) -> None:
    with pytest.raises(DownloadError, match=match):
        fetch(file, repository)


def test_hub_trouble_is_retried(hub: Hub, fetch: Fetch, content: bytes) -> None:
    hub.files["model.ninfer"] = content
    hub.head_status = [503, 200]
    assert fetch().read_bytes() == content
    hub.files["c.ninfer"] = content
    hub.sizes["c.ninfer"] = 0
    with pytest.raises(DownloadError, match="names no size"):
        fetch("c.ninfer")


def test_unreachable_hub(tmp_path: Path) -> None:
    options = PullOptions(endpoint="http://127.0.0.1:9", stall_seconds=0.5, attempts=2, backoff_seconds=0.01)
    with pytest.raises(DownloadError, match="2 attempts failed in a row, the last: the Hub cannot be reached"):
        pull("owner/repo", "f", tmp_path, options=options)
    with pytest.raises(TransientError):
        next(stream("http://127.0.0.1:9/f", 0, 1, {}, 0.5))
