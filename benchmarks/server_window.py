"""Compare the window of requests that a job finds by itself with fixed windows, against a server that sleeps.

    python -m benchmarks.server_window
    python -m benchmarks.server_window --slots 256 --turns 60 --metrics --json

The server is the tests' fake one, in a process of its own. It computes `--slots` requests at once, one token of each in
`--token-ms`, and requests have 20 to 80 tokens. Its maximum rate is known, so each rate is a share of it. Without
`--metrics` the server does not report its queue, and answers are streamed.
"""

import json
import subprocess
import sys
import time
from typing import Any

import click

from benchmarks.measure import facts_to_text, machine_facts, table
from benchmarks.script import json_flag, progress, report, script
from pipeline.endpoint.body import completion_body
from pipeline.endpoint.engine import EndpointEngine
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.endpoint.window import Window
from pipeline.engine.sampling_params import SamplingParams

LENGTHS = range(20, 81)  # tokens of a request


class FixedWindow(Window):
    """Window that keeps its first size."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0.0)
        self._limit = float(size)
        self.sizes = [size]

    def answered(self, now_s: float, tokens: int, num_open: int) -> None:
        """Change nothing."""


class RecordedWindow(Window):
    """Window that keeps its sizes."""

    def __init__(self, max_size: int, now_s: float) -> None:
        super().__init__(max_size, now_s)
        self.sizes: list[int] = []

    def answered(self, now_s: float, tokens: int, num_open: int) -> None:
        super().answered(now_s, tokens, num_open)
        self.sizes.append(int(self._limit))


def requests(num_rows: int) -> list[EndpointRequest]:
    params = SamplingParams(max_tokens=LENGTHS.stop)
    lengths = (LENGTHS[row * 37 % len(LENGTHS)] for row in range(num_rows))  # in no order of lengths
    return [
        EndpointRequest(row, completion_body(f"row{row}" + " word" * (length - 1), params), params)
        for row, length in enumerate(lengths)
    ]


def measure(url: str, window: FixedWindow | RecordedWindow, num_rows: int) -> dict[str, Any]:
    """Compute the rows. Return seconds, the median size of the window in the last half, and the processor time of this
    process in milliseconds per request."""
    engine = EndpointEngine(EndpointConfig(urls=(url,), route="completion", max_concurrency=1 << 16), progress)
    engine._clients[0].window = window
    begin_s, begin_us = time.monotonic(), time.process_time()
    num_done = sum(completion.error is None for completion in engine.stream(requests(num_rows)))
    seconds, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_us
    engine.close()
    assert num_done == num_rows, f"{num_rows - num_done} of {num_rows} rows failed"
    half = sorted(window.sizes[len(window.sizes) // 2 :])
    return {"seconds": seconds, "window": half[len(half) // 2], "client_ms": 1e3 * cpu_s / num_rows}


@script(__doc__)
@click.option("--slots", default=64, show_default=True, help="Requests that the server computes at once.")
@click.option("--token-ms", default=30.0, show_default=True, help="Time of a token.")
@click.option("--turns", default=80, show_default=True, help="Rows, in units of the slots.")
@click.option("--metrics", is_flag=True, help="The server reports its queue.")
@json_flag
def main(slots: int, token_ms: float, turns: int, metrics: bool, as_json: bool) -> None:
    behaviour = {"slots": slots, "seconds_per_token": token_ms / 1e3, "metrics": metrics}
    command = [sys.executable, "-m", "tests.endpoint.fake_server", "--port", "0", "--behaviour", json.dumps(behaviour)]
    num_rows = slots * turns
    mean = sum(len(request.body["prompt"].split()) for request in requests(num_rows)) / num_rows
    ideal_s = num_rows * mean * token_ms / 1e3 / slots
    results: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            for name, share in {"fixed, 0.5": 0.5, "fixed, 1": 1.0, "fixed, 1.1": 1.1, "fixed, 2": 2.0}.items():
                progress(f"{name}: {ideal_s / min(1, share):.0f} s")
                results[name] = measure(url, FixedWindow(round(slots * share)), num_rows)
            progress(f"found: {ideal_s:.0f} s")
            results["found"] = measure(url, RecordedWindow(1 << 16, time.monotonic()), num_rows)
        finally:
            server.kill()
    for result in results.values():
        result["rate"] = ideal_s / result["seconds"]
    rows = [(name, *(result[key] for key in ("window", "rate", "client_ms"))) for name, result in results.items()]
    facts = machine_facts()
    columns = "window <10 | requests >9.0f | share of the maximum rate >9.3f | ms of processor per request >9.2f"
    lines = [*table(columns, rows), "", facts_to_text(facts)]
    report("server_window", {"slots": slots, "rows": num_rows, "results": results, "machine": facts}, lines, as_json)


if __name__ == "__main__":
    main()
