"""The address at which a running job tells Prometheus its metrics and a load balancer its health.

GET /metrics: text in Prometheus' format. GET /healthz: JSON, with 200 while the run moves and 503 when it has not for
long. It shows what the driver last set, changes nothing, and ends with the run. Nobody is asked who they are: bind it
to an address that only those can reach who may know.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.job.telemetry.metrics import Snapshot


class MetricsServer:
    """Serves the last snapshot that was set."""

    def __init__(self, address: str) -> None:
        """`address`: host:port. Raises OSError where it cannot be had."""
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
                    told = json.dumps({"well": well} | (now.to_json() if now else {}))
                    self._answer(200 if well else 503, "application/json", told.encode())
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
        """None where none is wanted, or the address cannot be had: a run does not depend on it."""
        if address is None:
            return None
        try:
            return cls(address)
        except OSError as error:
            warn(f"--metrics {address}: {error.strerror or error}; this run shows no metrics")
            return None
