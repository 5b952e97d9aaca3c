"""Time a layer's linears by path and number of tokens, to find the fastest paths and the crossover between them.

To time another path, add a line to `linear_paths`. Times are summed over a layer's linears. Each result is compared
with the 16-bit path's.

Suffixes as in `kernels/contract.py`; N and K of a weight are its outputs and inputs, G its groups.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.gpu.kernels import difference
from benchmarks.gpu.section import Found, Setting
from benchmarks.measure import table
from pipeline.kernels.contract import Kernels
from pipeline.kernels.linears import Linear
from pipeline.kernels.reference import prepare_linear
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight
from tests.gpu.inputs import random_int4

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16_384)
SMOKE_TOKENS = (1, 32)
DENSE, FUSED, CACHED, SCRATCH, SERVED, TORCH_INT4 = "16 bit", "int4 fused", "cached", "scratch", "served", "torch int4"
MAX_TOKENS = {TORCH_INT4: 64, FUSED: 1024}  # limits of paths for few tokens; others have none
PIECES = (2048, 4096)  # rows of large products in pieces, which stay in the L2 cache
LAYER = "layer"  # all linears together
BEHIND = 1.05  # the served path is reported if it is slower than the best by this factor

Times = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Path -> linear or LAYER -> tokens -> seconds."""


@dataclass(frozen=True)
class Crossover:
    """Number of tokens up to which the fused int4 kernel is faster, or 0.

    form: of the 16-bit weights that it is compared with, cached or scratch. tokens: by linear, and of LAYER.
    next_tokens: the next larger measured number, or None.
    """

    form: str
    tokens: dict[str, int]
    next_tokens: int | None

    def to_text(self) -> str:
        by_linear = ", ".join(f"{name} {tokens:,}" for name, tokens in self.tokens.items() if name != LAYER)
        above = f"next measured: {self.next_tokens:,}" if self.next_tokens else "nothing above was measured"
        return f"crossover, {self.form}: {self.tokens[LAYER]:,} ({above}); by linear: {by_linear}"


def linear_times(setting: Setting) -> Iterator[Found]:
    found, stopwatch = Found(), setting.stopwatch()
    kernels, random = select_kernels(setting.device, setting.dtype), torch.Generator().manual_seed(1)
    inputs = torch.Generator(setting.device).manual_seed(2)
    times: dict[str, dict[str, dict[int, float]]] = {}
    off: dict[str, float] = {}
    for linear, in_features, out_features in setting.size.linears():
        weight = random_int4(out_features, in_features, setting.weights.group_size, random)
        served = weight if setting.weights.packed_bits == 4 else DenseWeight(weight.dequantize(setting.dtype))
        dense = prepare_linear(served, setting.dtype, setting.device)
        for path, prepare in linear_paths(served, kernels, setting.dtype, setting.device).items():
            call = None
            with found.case(f"{linear} by {path}"):
                call = prepare()
            for tokens in SMOKE_TOKENS if setting.is_smoke else TOKENS:
                if call is None or tokens > MAX_TOKENS.get(path, tokens):
                    continue
                with found.case(f"{linear} by {path}, {tokens} tokens"), torch.inference_mode():
                    x_TK = torch.randn(tokens, in_features, device=setting.device, generator=inputs).to(setting.dtype)
                    error = difference([call(x_TK)], [dense(x_TK)])
                    off[path] = max(off.get(path, 0.0), float("inf") if error is None else error)
                    # Some paths leave a sum of parts to the kernel that reads their outputs, as in the engine.
                    outputs = getattr(call, "outputs", call)
                    seconds = stopwatch.seconds(partial(outputs, x_TK))
                    times.setdefault(path, {}).setdefault(linear, {})[tokens] = seconds
        summed = with_layer(times, len(setting.size.linears()))
        crossovers = find_crossovers(summed)
        lines = [f"Linears of a layer of {setting.model} together, {setting.dtype}, microseconds by path"]
        lines += [*times_to_lines(summed, setting), *(crossover.to_text() for crossover in crossovers)]
        lines.append("largest difference to 16 bit: " + ", ".join(f"{path} {error:.1e}" for path, error in off.items()))
        found.text = "\n".join([*lines, *stopwatch.complaints()])
        found.figures = {"model": setting.model, "linears_s": summed, "off": off}
        found.figures["crossovers"] = [asdict(crossover) for crossover in crossovers]
        yield found


def linear_paths(
    weight: LinearWeight, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Linear | None]]:
    """Return path -> a function that packs the weight for it, or returns None if unsupported."""
    paths: dict[str, Callable[[], Linear | None]] = {DENSE: lambda: prepare_linear(weight, dtype, device)}
    paths |= {f"in {rows:,}": partial(in_pieces, weight, rows, dtype, device) for rows in PIECES}
    if device.type == "cuda":
        from pipeline.kernels.triton import batch_invariant
        from pipeline.kernels.triton.linear.dispatch import DequantBuffer, TwoPathLinear

        paths["deterministic"] = lambda: batch_invariant.prepare_linear(weight, dtype, device)
        if isinstance(weight, GroupIntWeight):
            int4 = partial(TwoPathLinear, weight, dtype, device)
            paths |= {
                FUSED: lambda: int4(crossover=max(TOKENS)),
                CACHED: lambda: int4(crossover=0),
                SCRATCH: lambda: int4(DequantBuffer(dtype, device), crossover=0),
                TORCH_INT4: lambda: torch_int4(weight, device),
            }
    if isinstance(weight, GroupIntWeight):
        paths |= {name: lambda form=form: form.prepare(weight) for name, form in kernels.rounded.items()}
    return paths | {SERVED: lambda: kernels.prepare_linear(weight)}


def in_pieces(weight: LinearWeight, rows: int, dtype: torch.dtype, device: torch.device) -> Linear:
    """Return the 16-bit linear as products of up to `rows` rows, which write into one output."""
    weight_KN = weight.dequantize(dtype).to(device).T

    def call(x_MK: torch.Tensor) -> torch.Tensor:
        out_MN = x_MK.new_empty(len(x_MK), weight_KN.shape[1])
        for first in range(0, len(x_MK), rows):
            torch.mm(x_MK[first : first + rows], weight_KN, out=out_MN[first : first + rows])
        return out_MN

    return call


def torch_int4(weight: GroupIntWeight, device: torch.device) -> Linear:
    """Return torch's own int4 linear in bfloat16, where a weight is (q - 8) * scale + zero."""
    q_NK = weight.q_NK.to(device, torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack(((q_NK[:, ::2] << 4) | q_NK[:, 1::2]).to(torch.uint8), 8)
    scales_NG = weight.scales_NG.float()
    both_GN2 = torch.stack([scales_NG, (8.0 - weight.zeros_NG.float()) * scales_NG], dim=2).transpose(0, 1)
    both_GN2 = both_GN2.to(device, torch.bfloat16).contiguous()
    return lambda x_MK: torch.ops.aten._weight_int4pack_mm(x_MK, packed, weight.group_size, both_GN2)


def find_crossovers(times: Times) -> list[Crossover]:
    """Return a crossover for each measured form of the 16-bit weights."""
    found = []
    for form in (CACHED, SCRATCH):
        if {form, FUSED} <= set(times):
            fused, dense = times[FUSED], times[form]
            tokens = {name: cheapest_crossover(fused[name], dense[name]) for name in fused if name in dense}
            above = [count for count in sorted(times[FUSED][LAYER]) if count > tokens[LAYER]]
            found.append(Crossover(form, tokens, above[0] if above else None))
    return found


def cheapest_crossover(fused_s: Mapping[int, float], dense_s: Mapping[int, float]) -> int:
    """Return the crossover with the smallest loss against the faster path of each measured number of tokens.

    A single slow measurement therefore changes it little. Ties return the smallest number.
    """
    measured = sorted(fused_s.keys() & dense_s.keys())

    def lost(crossover: int) -> float:
        chosen = ((fused_s if tokens <= crossover else dense_s)[tokens] for tokens in measured)
        return sum(s / min(fused_s[tokens], dense_s[tokens]) - 1 for tokens, s in zip(measured, chosen))

    return min((0, *measured), key=lost)


def times_to_lines(times: Times, setting: Setting) -> list[str]:
    """Return a table of a layer's times.

    floor: of the form with the fewest bytes. behind: the served path's time relative to the best path in 16 bit.
    """
    layer = {path: by_linear[LAYER] for path, by_linear in times.items()}
    size, weights = setting.size, setting.weights
    parameters = size.linear_parameters / size.layers
    min_bytes = parameters * weights.read_bytes
    same = [path for path in layer if path in (DENSE, FUSED, CACHED, SCRATCH)]
    rows, late = [], list[str]()
    for tokens in sorted(set().union(*layer.values())):
        seconds = [layer[path].get(tokens) for path in layer]
        floor_s = setting.rates.floor_s(min_bytes, 2.0 * parameters * tokens)
        best = min(s for s in seconds if s is not None)
        alike = [layer[path][tokens] for path in same if tokens in layer[path]]
        behind = layer[SERVED][tokens] / min(alike) if tokens in layer.get(SERVED, {}) and alike else None
        late += [f"{tokens:,}"] if behind is not None and behind > BEHIND else []
        in_us = [None if s is None else s * 1e6 for s in seconds]
        rows.append((tokens, *in_us, floor_s * 1e6, 2.0 * parameters * tokens / best / 1e12, behind))
    columns = "".join(f" | {path} >10,.1f" for path in layer)
    lines = table(f"tokens >6,{columns} | floor >8,.1f | TFLOP/s >8,.1f | behind >6.2f", rows)
    return [*lines, f"served is more than {BEHIND - 1:.0%} behind the best path at: {', '.join(late) or 'none'}"]


def with_layer(times: Times, num_linears: int) -> Times:
    """Add LAYER: the seconds of all linears together, at numbers of tokens at which all were measured."""
    summed: dict[str, dict[str, Mapping[int, float]]] = {}
    for path, by_linear in times.items():
        is_complete = len(by_linear) == num_linears
        tokens = set.intersection(*(set(by_tokens) for by_tokens in by_linear.values())) if is_complete else set()
        layer = {count: sum(by_tokens[count] for by_tokens in by_linear.values()) for count in sorted(tokens)}
        summed[path] = {**by_linear, LAYER: layer}
    return summed
