"""The part of the Hugging Face Hub that a publication uses, on a local port: datasets with branches of commits, uploads
by the LFS protocol, and commits that name their parent."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_TokenThatMustNotLeak"


@dataclass
class Dataset:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by commit
    branches: dict[str, str] = field(default_factory=dict)  # commit by branch
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], title: str = "by hand") -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {title}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.titles.append(title)
        return oid

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]

    def edit(self, branch: str = "main", **changes: bytes | None) -> None:
        """Commit changed files, by path with `__` for `/` and `_dot_` for a dot; None removes a file."""
        named = {name.replace("__", "/").replace("_dot_", "."): data for name, data in changes.items()}
        files = {name: data for name, data in {**self.files(branch), **named}.items() if data is not None}
        self.commit(branch, files)


class FakeHub:
    """A context manager. strike(request, is_done): called before a request is handled and after, before its answer is
    sent; if it returns True no answer is sent. statuses: answers instead of handling, by a part of the request."""

    def __init__(self) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.objects: dict[str, bytes] = {}  # uploaded, by SHA-256
        self.requests: list[str] = []
        self.statuses: dict[str, int] = {}
        self.strike: Callable[[str, bool], bool] = lambda request, is_done: False
        self._lock = threading.Lock()

    def __enter__(self) -> "FakeHub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = f"{self.command} {urlsplit(unquote(self.path)).path}"
                with hub._lock:
                    hub.requests.append(request)
                    if hub.strike(request, False):
                        self.close_connection = True
                        return
                    status, headers, content = hub._handle(request, dict(self.headers), body)
                    if hub.strike(request, True):
                        self.close_connection = True
                        return
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # connections of killed clients
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def create(self, name: str, private: bool = True) -> Dataset:
        self.datasets[name] = Dataset(private)
        self.datasets[name].commit("main", {".gitattributes": b"*.parquet filter=lfs"}, "initial commit")
        return self.datasets[name]

    def _handle(self, request: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        status = next((code for text, code in self.statuses.items() if text in request), None)
        if status is not None:
            return status, {}, b""
        if headers.get("authorization", headers.get("Authorization")) != f"Bearer {TOKEN}" and " /lfs/" not in request:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        for pattern, action in _ACTIONS.items():
            if match := re.fullmatch(pattern, request):
                found = match.groupdict()
                dataset = self.datasets.get(found.get("name", ""))
                if "name" in found and dataset is None:
                    return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
                answer = action(self, found, dataset, body)
                return answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
        return 404, {}, request.encode()


def _create(hub: FakeHub, found: Any, _: Any, body: bytes) -> Any:
    wanted = json.loads(body)
    name = f"{wanted['organization']}/{wanted['name']}"
    if name in hub.datasets:
        return 409, {}, json.dumps({"url": f"{hub.url}/datasets/{name}"}).encode()
    hub.create(name, wanted["visibility"] == "private")
    return {"url": f"{hub.url}/datasets/{name}"}


def _commit_of(dataset: Dataset, revision: str) -> str | None:
    return dataset.branches.get(revision, revision if revision in dataset.commits else None)


def _info(hub: FakeHub, found: Any, dataset: Dataset, _: bytes) -> Any:
    oid = _commit_of(dataset, found["revision"] or "main")
    if oid is None:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    return {"id": found["name"], "sha": oid, "siblings": [], "private": dataset.private, "tags": [], "disabled": False}


def _tree(hub: FakeHub, found: Any, dataset: Dataset, _: bytes) -> Any:
    files = dataset.commits[_commit_of(dataset, found["revision"]) or ""]
    return [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()]


def _branch(hub: FakeHub, found: Any, dataset: Dataset, _: bytes) -> Any:
    dataset.branches[found["branch"]] = dataset.branches["main"]
    return {}


def _resolve(hub: FakeHub, found: Any, dataset: Dataset, _: bytes) -> Any:
    oid = _commit_of(dataset, found["revision"]) or ""
    data = dataset.commits[oid][found["file"]]
    return 200, {"X-Repo-Commit": oid, "ETag": f'"{_oid(data)}"'}, data


def _preupload(hub: FakeHub, found: Any, dataset: Dataset, body: bytes) -> Any:
    files = dataset.files(found["branch"])
    each = []
    for wanted in json.loads(body)["files"]:
        mode = "lfs" if wanted["path"].endswith(".parquet") else "regular"
        data = files.get(wanted["path"])
        oid = None if data is None else hashlib.sha256(data).hexdigest() if mode == "lfs" else _oid(data)
        each.append({"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": each}


def _batch(hub: FakeHub, found: Any, dataset: Dataset, body: bytes) -> Any:
    def actions(oid: str) -> dict[str, Any]:
        return {} if oid in hub.objects else {"actions": {"upload": {"href": f"{hub.url}/lfs/{oid}"}}}

    return {"objects": [{**wanted, **actions(wanted["oid"])} for wanted in json.loads(body)["objects"]]}


def _put(hub: FakeHub, found: Any, _: Any, body: bytes) -> Any:
    if hashlib.sha256(body).hexdigest() != found["oid"]:
        return 400, {}, b"wrong digest"
    hub.objects[found["oid"]] = body
    return {}


def _commit(hub: FakeHub, found: Any, dataset: Dataset, body: bytes) -> Any:
    head, *operations = map(json.loads, body.splitlines())
    if head["value"].get("parentCommit") != dataset.branches[found["branch"]]:
        return 412, {"X-Error-Message": "A commit has happened since. Please refresh and try again."}, b"{}"
    files = dict(dataset.files(found["branch"]))
    for operation in operations:
        value = operation["value"]
        match operation["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
    oid = dataset.commit(found["branch"], files, head["value"]["summary"])
    url = f"{hub.url}/datasets/{found['name']}/commit/{oid}"
    return {"success": True, "commitUrl": url, "commitOid": oid, "hookOutput": ""}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
_ACTIONS: dict[str, Callable[..., Any]] = {
    r"POST /api/repos/create": _create,
    r"POST /api/validate-yaml": lambda *_: {"errors": [], "warnings": []},
    rf"GET /api/datasets/{_NAME}(/revision/(?P<revision>.+))?": _info,
    rf"GET /api/datasets/{_NAME}/tree/(?P<revision>[^/]+)": _tree,
    rf"POST /api/datasets/{_NAME}/branch/(?P<branch>.+)": _branch,
    rf"(GET|HEAD) /datasets/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)": _resolve,
    rf"POST /api/datasets/{_NAME}/preupload/(?P<branch>.+)": _preupload,
    rf"POST /datasets/{_NAME}.git/info/lfs/objects/batch": _batch,
    r"PUT /lfs/(?P<oid>\w+)": _put,
    rf"POST /api/datasets/{_NAME}/commit/(?P<branch>.+)": _commit,
}
