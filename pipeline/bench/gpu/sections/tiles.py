"""Which tiles of the Triton kernels would be faster than the shipped ones."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch

from pipeline.bench.gpu.kernels.kernel_times import DECODING, KernelTimes
from pipeline.bench.gpu.kernels.linear_times import INT4_PATH, LinearTimes
from pipeline.bench.gpu.kernels.tile_times import TileTimes, tile_measurements
from pipeline.bench.gpu.result import Found, Result, read_results
from pipeline.bench.gpu.subject import Subject

ROWS = 64  # of the step by which the worst kernel is found
WORST = "worst"


def run(result: Result, model: str, kernels: Sequence[str], budget_s: float) -> None:
    """kernels: of `tile_cases.KERNELS`; or WORST alone, for the one that costs a decoding step most beyond its floor by
    what the session measured. budget_s: of all that is tried."""
    subject, found = Subject.of(result.setting, model), TileTimes()

    def keep() -> None:
        result.keep(f"{subject.name}, {subject.dtype_name}\n{found.to_text()}", model=model, tiles=found.to_json())

    if why := left_out(subject.device):
        found = TileTimes(left_out=why)
        return keep()
    from pipeline.bench.gpu.kernels.tile_cases import tile_cases

    if list(kernels) == [WORST]:
        kernels = [worst_kernel(read_results(result.setting.results), model, subject.size.layers)]
    cases = tile_cases(subject.size, subject.weights, subject.dtype, subject.device, subject.scale.tiles, kernels)
    for case in tile_measurements(cases, subject.stopwatch(), budget_s):
        with result.part("tiles"):
            found = TileTimes((*found.times, *case()))
            keep()


def worst_kernel(results: Mapping[str, Found], model: str, layers: int) -> str:
    """Of those of a decoding step with ROWS rows; int4 where nothing was measured."""
    lost_s = {"int4": 0.0}
    for found in results.values():
        if found.figures.get("model") != model:
            continue
        if "kernels" in found.figures:
            for time in KernelTimes.from_json(found.figures["kernels"]).times:
                if time.kind == DECODING and f"{ROWS:,} at " in time.case:
                    lost_s["decode"] = max(lost_s.get("decode", 0.0), layers * (time.seconds - time.floor_s))
                if time.kernel == "sample" and time.case.startswith(f"{ROWS:,} rows"):
                    lost_s["sample"] = max(lost_s.get("sample", 0.0), time.seconds - time.floor_s)
        if "linears" in found.figures:
            linears = LinearTimes.from_json(found.figures["linears"])
            if INT4_PATH in linears.paths and ROWS in linears.layer_s(INT4_PATH):
                floor_s = min(floor[ROWS] for floor in linears.floors_s.values())
                lost_s["int4"] = layers * (linears.layer_s(INT4_PATH)[ROWS] - floor_s)
    return max(lost_s, key=lambda kernel: lost_s[kernel])


def left_out(device: torch.device) -> str:
    """Why there is nothing to try them on; else empty."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from pipeline.kernels.triton.kernel_set import is_interpreted

    if device.type == "cpu" and not is_interpreted():
        return "Triton has no device here; TRITON_INTERPRET=1 runs its kernels on a processor, very slowly"
    return ""
