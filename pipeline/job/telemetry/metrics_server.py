"""HTTP server of a running job for Prometheus metrics and a load balancer's health checks.

GET /metrics: text in Prometheus' format. GET /healthz: JSON, with status 200 while the run progresses and 503 after a
long time without progress. It shows the driver's last snapshot, changes nothing, and ends with the run. There is no
authentication: bind it to a private interface.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.job.telemetry.metrics import Snapshot


class MetricsServer:
    """Server of the last snapshot."""

    def __init__(self, address: str) -> None:
        """`address`: host:port. Raises OSError if it cannot be bound."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        self.snapshot: Snapshot | None = None
        server = self

        class Collector:
            def collect(self):
                return server.snapshot.families() if server.snapshot else ()

        registry = CollectorRegistry()
        registry.register(Collector())  # type: ignore[arg-type]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                now = server.snapshot
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/healthz":
                    well = now is None or now.progress.is_well
                    body_text = json.dumps({"well": well} | (now.to_json() if now else {}))
                    self._answer(200 if well else 503, "application/json", body_text.encode())
                else:
                    self._answer(404, "text/plain", b"/metrics or /healthz\n")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        host, _, port = address.rpartition(":")
        self._http = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True, name="metrics").start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @classmethod
    def at(cls, address: str | None, warn: Callable[[str], None]) -> "MetricsServer | None":
        """Start the server. Return None without an address, or with a warning if it cannot be bound: no run depends on
        it."""
        if address is None:
            return None
        try:
            return cls(address)
        except OSError as error:
            warn(f"--metrics {address}: {error.strerror or error}; this run shows no metrics")
            return None
