"""A Hugging Face Hub of datasets on localhost: commits, branches, pages of listings, tokens, redirects and faults."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

PAGE = 3  # entries in a page of a listing


@dataclass
class Dataset:
    """One dataset. commits: sha -> its files. token: needed to read it. gated: the token that accepted its terms."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    gated: str | None = None

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(repr((files, len(self.commits))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


class Hub:
    def __init__(self) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.sends_ranges = True
        self.faults: list[tuple[str, int]] = []  # part of a path, status: for the next such request

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        url = urlsplit(path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.requests.append((method, unquote(url.path), headers.get("Range")))
        for fault in self.faults:
            if fault[0] in url.path:
                self.faults.remove(fault)
                return fault[1], {}, b""
        if parts[0] == "cdn":
            assert "Authorization" not in headers or url.hostname is None
            return self._ranged(self._files_by_digest[parts[1]], headers)
        parts = parts[1:] if parts[0] == "api" else parts
        name, kind, rest = "/".join(parts[1:3]), (parts[3:4] or [""])[0], parts[4:]
        dataset = self.datasets.get(name)
        given = headers.get("Authorization", "").removeprefix("Bearer ") or None
        if dataset is None or (dataset.token and given != dataset.token):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        revision = rest[0] if rest else "main"
        sha = dataset.branches.get(revision, revision)
        if sha not in dataset.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = dataset.commits[sha]
        if kind in ("", "revision"):
            assert "expand" in url.query
            return self._json({"id": name, "sha": sha, "cardData": dataset.card})
        if kind == "tree":
            return self._tree(files, "/".join(rest[1:]), parse_qs(url.query), path)
        if kind == "paths-info":
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            return self._json([self._entry(each, files) for each in wanted if self._entry(each, files)])
        assert kind == "resolve", path
        if dataset.gated and given != dataset.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        content = files.get("/".join(rest[1:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 302, {"Location": f"/cdn/{hashlib.sha1(content).hexdigest()}?signature=secret"}, b""

    @property
    def _files_by_digest(self) -> dict[str, bytes]:
        every = [files for dataset in self.datasets.values() for files in dataset.commits.values()]
        return {hashlib.sha1(content).hexdigest(): content for files in every for content in files.values()}

    def _ranged(self, content: bytes, headers: Any) -> tuple[int, dict[str, str], bytes]:
        wanted = headers.get("Range")
        if wanted is None or not self.sends_ranges:
            return 200, {}, content
        start, stop = wanted.removeprefix("bytes=").split("-")
        return 206, {}, content[int(start) : int(stop) + 1 if stop else None]

    def _entry(self, path: str, files: dict[str, bytes]) -> dict[str, Any] | None:
        if path in files:
            oid = hashlib.sha1(files[path]).hexdigest()
            return {"type": "file", "path": path, "size": len(files[path]), "oid": oid}
        if any(name.startswith(f"{path}/") for name in files):
            return {"type": "directory", "path": path, "oid": "0" * 40}
        return None

    def _tree(
        self, files: dict[str, bytes], folder: str, query: dict[str, list[str]], path: str
    ) -> tuple[int, dict[str, str], bytes]:
        prefix = f"{folder}/" if folder else ""
        below = {name[len(prefix) :] for name in files if name.startswith(prefix)}
        if not below:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        names = {"/".join(name.split("/")[:n]) for name in below for n in range(1, name.count("/") + 2)}
        if query.get("recursive") != ["true"]:
            names = {name for name in names if "/" not in name}
        entries = [self._entry(prefix + name, files) for name in sorted(names)]
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + PAGE < len(entries):
            base = path.partition("&cursor=")[0]
            headers["Link"] = f'<{self.url}{base}&cursor={quote(str(first + PAGE))}>; rel="next"'
        return self._json(entries[first : first + PAGE], headers)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode()

    url = ""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _respond

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
