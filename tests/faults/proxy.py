"""An HTTP proxy in front of an object store that injects the faults of networks and stores.

A fault strikes up to `n` requests that a rule matches, or each request with a seeded probability. The proxy counts
faults. Each connection has its own thread; requests and answers are forwarded whole, and a connection stays open unless
the fault breaks it.
"""

import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}, says the proxy</Message>'
    "<RequestId>0</RequestId></Error>"
)
# fault -> (status, code): answered without the store; a HEAD gets the status alone
ANSWERS = {
    "server_error": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "error_body": (200, "InternalError"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "bad_digest": (400, "BadDigest"),
}
# methods that a fault applies to
METHODS = {
    "lost_put": "PUT",  # done, and the connection breaks before the answer
    "conflict": "PUT",
    "bad_digest": "PUT",
    "error_body": "GET|PUT",
    "truncated": "GET",  # half of the body, then the connection breaks
    "slow": "GET",  # the body in ten pieces
    "ignore_conditions": "PUT",  # forwarded without If-Match and If-None-Match
}
# for any method: "reset" breaks the connection, "swallowed" never answers; neither reaches the store


@dataclass
class Rule:
    """The next `left` requests whose method and path (with the query) match."""

    fault: str
    path: str
    method: str
    left: int


class FaultProxy:
    """Proxy between clients and the store at 127.0.0.1:`upstream`; a context manager."""

    def __init__(self, upstream: int, seed: int = 0, chances: Mapping[str, float] | None = None) -> None:
        self.upstream = upstream
        self.stall_s = 5.0  # how long a swallowed request is held
        self.done: Counter[str] = Counter()
        self.requests: list[str] = []  # "PUT /bucket/key?query"
        self._chances = dict(chances or {})
        self._random = random.Random(seed)
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        # moto checks that a key is free and then writes it; unlike real stores, it does not do so atomically
        self._keys = [threading.Lock() for _ in range(64)]
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, fault: str, path: str = "", method: str = "", times: int = 1) -> None:
        """Inject `fault` into the next `times` requests that match `path` and `method` (default: the fault's own)."""
        with self._lock:
            self._rules.append(Rule(fault, path, method or METHODS.get(fault, ".*"), times))

    def calm(self) -> None:
        """Stop all faults."""
        with self._lock:
            self._rules.clear()
            self._chances.clear()

    def choose(self, method: str, path: str) -> str | None:
        """Choose and count the fault of this request."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            chosen = None
            for rule in self._rules:
                if rule.left and re.fullmatch(rule.method, method) and re.search(rule.path, path):
                    rule.left -= 1
                    chosen = rule.fault
                    break
            else:
                for fault, chance in self._chances.items():
                    if re.fullmatch(METHODS.get(fault, ".*"), method) and self._random.random() < chance:
                        chosen = fault
                        break
            if chosen:
                self.done[chosen] += 1
            return chosen

    def key_lock(self, path: str) -> threading.Lock:
        return self._keys[hash(path.partition("?")[0]) % len(self._keys)]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: a client or the store disconnected, at the end of a test even in the middle of a request."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        proxy: FaultProxy = self.server.proxy  # type: ignore[attr-defined]
        assert "chunked" not in self.headers.get("Transfer-Encoding", ""), "a body of unknown length"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.choose(self.command, self.path)
        if fault in ANSWERS:
            status, code = ANSWERS[fault]
            text = b"" if self.command == "HEAD" else _ERROR.format(code=code).encode()
            self._answer(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))], text)
            return
        if fault in ("reset", "swallowed"):
            if fault == "swallowed":
                time.sleep(proxy.stall_s)
            self._break()
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "expect")}
        if fault == "ignore_conditions":
            headers = {k: v for k, v in headers.items() if k.lower() not in ("if-match", "if-none-match")}
        status, answered, data = self._forward(proxy, headers, body)
        if fault == "lost_put":
            self._break()
            return
        whole = len(data)
        if fault == "truncated":
            data = data[: whole // 2]
        length = [(k, v) for k, v in answered if k.lower() == "content-length"] or [("Content-Length", str(whole))]
        kept = [(k, v) for k, v in answered if k.lower() not in ("content-length", "connection", "transfer-encoding")]
        self._answer(status, [*kept, *length], data, pieces=10 if fault == "slow" else 1)
        if fault == "truncated":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # the names that http.server looks for

    def _forward(
        self, proxy: FaultProxy, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        with proxy.key_lock(self.path) if self.command == "PUT" else threading.Lock():
            connection = HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
            try:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            finally:
                connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, pieces: int = 1) -> None:
        try:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            step = max(1, -(-len(data) // pieces))
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                if pieces > 1:
                    time.sleep(0.02)
        except OSError:
            self.close_connection = True  # the client disconnected

    def _break(self) -> None:
        """Close with a reset instead of a proper end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # broken on purpose
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: `done` and `requests` are the record."""
