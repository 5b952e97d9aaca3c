"""Checkpoints of random weights, written before they are needed."""

import time

from pipeline.bench.gpu.result import Result
from pipeline.bench.shapes import bench_model


def run(result: Result, model: str) -> None:
    began = time.monotonic()
    found = bench_model(model, result.setting.models, lambda text: print(text, flush=True))
    seconds = time.monotonic() - began
    num_bytes = sum(path.stat().st_size for path in found.folder.iterdir())
    text = f"{found.about}: {num_bytes / 1e9:.2f} GB, there after {seconds:.1f} s"
    result.keep(text, seconds=seconds, num_bytes=num_bytes, about=found.about)
