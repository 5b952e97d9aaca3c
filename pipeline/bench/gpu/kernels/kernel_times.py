"""Kernels against their floor: the longer of moving their bytes and computing their products at the measured rates.

Bytes are those that have to be moved once: what is read and what is written. Where torch has a kernel for the same work
(scaled_dot_product_attention, which is FlashAttention on a card, for prompts), its time stands beside. What a kernel
plans on the host once for all layers of a step is not in its time.

Suffixes as in `kernels/contract.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.bench.gpu.kernels.checks import FP8_CODE, TOLERANCES, Check, Pairs, check
from pipeline.bench.gpu.kernels.inputs import Heads, paged_step, widened
from pipeline.bench.gpu.kernels.torch_kernels import varlen_attention
from pipeline.bench.gpu.rates import Rates, Stopwatch
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.measure import table
from pipeline.kernels import reference
from pipeline.kernels.contract import Kernels
from pipeline.roofline.cost_model import DecoderSize

EPS = 1e-5
FP8_CACHE = ", fp8"  # after the names of kernels that read or write a cache in FP8
DRAFTS = 4  # of each sequence, where drafts are checked
SAMPLED_ROWS = 128  # that are compared with the reference
SUM_ERROR = 1e-5  # of a running sum over a row's weights, in shares of the whole
DECODING, SKEWED, CHECKING, PROMPTS = "decoding", "decoding, skewed", "checking drafts", "prompts"  # see `aims.py`


@dataclass(frozen=True)
class Work:
    """One kernel on inputs of its own. call: what is timed. compare: runs it once, beside the reference. other: the
    seconds of torch's own kernel for the same work."""

    kernel: str
    case: str
    num_bytes: float
    flops: float
    call: Callable[[], Any]
    compare: Callable[[], Pairs]
    tolerance: float
    kind: str = ""
    other: Callable[[], float] | None = None


@dataclass(frozen=True)
class KernelTime:
    """One kernel on one layer's work. other_s: torch's own kernel for it, None where there is none. kind: of the work
    that an aim is for."""

    kernel: str
    case: str
    seconds: float
    floor_s: float
    num_bytes: float
    flops: float
    other_s: float | None = None
    kind: str = ""

    @property
    def share(self) -> float:
        """Of the floor; 1 is as fast as can be."""
        return self.floor_s / self.seconds


@dataclass(frozen=True)
class KernelTimes:
    times: tuple[KernelTime, ...]

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "KernelTimes":
        return cls(rows_of(KernelTime, told["times"]))

    def to_json(self) -> dict[str, Any]:
        return {"times": [asdict(time) | {"share": time.share} for time in self.times]}

    def to_text(self) -> str:
        lines = [
            "Kernels, one layer each, against their floor at the rates above; other: torch's attention on its own "
            "contiguous tensors.",
        ]
        columns = "kernel <16 | work <44 | us >9,.1f | floor us >9,.1f | share >6.0% | GB/s >7,.0f | TFLOP/s >8,.2f"
        rows = []
        for t in self.times:
            rates = t.num_bytes / t.seconds / 1e9, t.flops / t.seconds / 1e12
            other_us = None if t.other_s is None else t.other_s * 1e6
            rows.append((t.kernel, t.case, t.seconds * 1e6, t.floor_s * 1e6, t.share, *rates, other_us))
        return "\n".join(lines + table(f"{columns} | other us >9,.1f", rows))


@dataclass(frozen=True)
class KernelCases:
    """Sizes to time: tokens of elementwise kernels; (sequences, context) of decoding; (prompts, tokens) of prompts;
    (sequences, context, tokens of it that all share) of decoding."""

    tokens: tuple[int, ...]
    decoding: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int, int], ...]


FULL = KernelCases(
    (1, 64, 512, 8192),
    ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (512, 512), (64, 4096)),
    ((1, 512), (11, 735), (4, 2048), (1, 8192)),
    ((64, 2176, 2048), (835, 2176, 2048)),
)
SMOKE = KernelCases((16,), ((4, 100),), ((2, 60),), ((4, 200, 128),))


def kernel_cases(
    size: DecoderSize,
    kernels: Kernels,
    dtype: torch.dtype,
    stopwatch: Stopwatch,
    rates: Rates,
    cases: KernelCases,
    is_timed: bool,
) -> Iterator[Callable[[], tuple[Check, KernelTime | None]]]:
    """The kernels of one layer of a model of that size, the linears apart; each is checked and timed when called. One
    whose result is wrong has no time, as has every one without `is_timed`."""

    def measured(build: Callable[[], Work]) -> tuple[Check, KernelTime | None]:
        work = build()
        served_by = kernels.served_by[work.kernel.removesuffix(FP8_CACHE)]
        found = check(work.kernel, work.case, dtype, served_by, work.tolerance, work.compare)
        if not is_timed or not found.passed:
            return found, None
        floor_s = rates.floor_s(work.num_bytes, work.flops)
        other_s = None if work.other is None else work.other()
        seconds, sizes = stopwatch.seconds(work.call), (floor_s, work.num_bytes, work.flops)
        return found, KernelTime(work.kernel, work.case, seconds, *sizes, other_s, work.kind)

    for build in _Layer(size, kernels, dtype, stopwatch).works(cases):
        yield partial(measured, build)


class _Layer:
    """Makes the inputs of each kernel, and what the reference says of them."""

    def __init__(self, size: DecoderSize, kernels: Kernels, dtype: torch.dtype, stopwatch: Stopwatch) -> None:
        self.size, self.kernels, self.dtype = size, kernels, dtype
        self.stopwatch, self.device = stopwatch, stopwatch.device
        self.heads = Heads(size.heads, size.kv_heads, size.head_dim)
        self.tolerance = TOLERANCES[dtype]

    def works(self, cases: KernelCases) -> Iterator[Callable[[], Work]]:
        for tokens in cases.tokens:
            writes = self.write, partial(self.write, is_fp8=True)
            yield from (partial(make, tokens) for make in (self.norm, self.gate, *writes))
        for sequences, context in cases.decoding:
            yield partial(self.greedy, sequences)
            yield from (partial(self.sample, sequences, top_p) for top_p in (1.0, 0.9))
            about, contexts = f"decoding, {sequences:,} at {context:,}", [context] * sequences
            yield partial(self.attention, about, [1] * sequences, contexts, kind=DECODING)
            yield partial(self.attention, about, [1] * sequences, contexts, is_fp8=True)
            if sequences > 1:
                counts = [1 + DRAFTS] * sequences
                yield partial(self.attention, f"{about}, {DRAFTS} drafts each", counts, contexts, kind=CHECKING)
                contexts = _skewed(sequences, context)
                about = f"decoding, {sequences:,} at {min(contexts):,} to {max(contexts):,}, {context:,} on average"
                yield partial(self.attention, about, [1] * sequences, contexts, kind=SKEWED)
        for sequences, context, shared in cases.shared:
            about, ones = f"{shared:,} shared, decoding, {sequences:,} at {context:,}", [1] * sequences
            for is_fp8 in (False, True):
                yield partial(self.attention, about, ones, [context] * sequences, is_fp8=is_fp8, shared=shared)
        for prompts, tokens in cases.prompts:
            about, counts = f"{prompts} prompts of {tokens:,}", [tokens] * prompts
            other = partial(_torch_attention, prompts, tokens, self.heads, self.dtype, self.stopwatch)
            yield partial(self.attention, about, counts, counts, kind=PROMPTS, other=other)
            yield partial(self.attention, about, counts, counts, is_fp8=True)
        long = max(tokens for _, tokens in cases.prompts)
        yield partial(self.attention, f"last half of a prompt of {long:,}", [long // 2], [long])

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def norm(self, tokens: int) -> Work:
        x_TH, residual_TH, weight_H = (self.normal(*n, self.size.hidden) for n in ((tokens,), (tokens,), ()))
        call = partial(self.kernels.add_rms_norm, x_TH, residual_TH, weight_H, EPS)

        def compare() -> Pairs:
            expected = reference.add_rms_norm(x_TH.float(), residual_TH.float(), weight_H.float(), EPS)
            return list(zip(call(), expected))  # the kernel may write into its inputs

        return Work("add_rms_norm", f"{tokens:,} tokens", 4.0 * x_TH.nbytes, 0.0, call, compare, self.tolerance)

    def gate(self, tokens: int) -> Work:
        gate_up = self.normal(tokens, 2 * self.size.intermediate)
        call = partial(self.kernels.silu_mul, gate_up)
        num_bytes, case = 1.5 * gate_up.nbytes, f"{tokens:,} tokens"
        compare = lambda: [(call(), reference.silu_mul(gate_up.float()))]  # noqa: E731
        return Work("silu_mul", case, num_bytes, 0.0, call, compare, self.tolerance)

    def write(self, tokens: int, is_fp8: bool = False) -> Work:
        """norm_rope_write on prompts of 512 tokens at the most, without norms."""
        counts = [512] * (tokens // 512) + ([tokens % 512] if tokens % 512 else [])
        step = paged_step(counts, counts, self.heads, self.dtype, self.device, with_fp8_cache=is_fp8)
        cache, slots = step.cache, step.where.slot_mapping_T
        qkv_TMD = self.normal(tokens, self.heads.num_heads + 2 * self.heads.num_kv_heads, self.heads.head_dim)
        angles = torch.rand(tokens, self.heads.head_dim // 2, device=self.device)
        call = partial(self.kernels.norm_rope_write, qkv_TMD, angles, angles, None, EPS, cache, slots)

        def compare() -> Pairs:
            exact = widened(cache)
            expected = reference.norm_rope_write(qkv_TMD.float(), angles, angles, None, EPS, exact, slots)
            return [(call(), expected), *zip(widened(cache).tensors, exact.tensors)]

        num_bytes = qkv_TMD.nbytes + step.q_TND.nbytes + step.kv_bytes + 2.0 * angles.nbytes
        name, tolerance = "norm_rope_write" + FP8_CACHE * is_fp8, FP8_CODE if is_fp8 else self.tolerance
        return Work(name, f"{tokens:,} tokens", num_bytes, 0.0, call, compare, tolerance)

    def greedy(self, rows: int) -> Work:
        logits_RV = torch.randn(rows, self.size.vocab, device=self.device)
        call = partial(self.kernels.greedy, logits_RV)

        def compare() -> Pairs:
            expected = reference.greedy(logits_RV.cpu())  # where the first of equal ones is sure
            return [(mine.cpu(), its) for mine, its in zip(call(), expected)]

        return Work("greedy", f"{rows:,} rows", float(logits_RV.nbytes), 0.0, call, compare, 0.0)

    def sample(self, rows: int, top_p: float) -> Work:
        logits_RV = 3 * torch.randn(rows, self.size.vocab, device=self.device)
        options_4 = torch.tensor([1.0, self.size.vocab, top_p, 0.0], dtype=torch.float64, device=self.device)
        u_1R = torch.rand(1, rows, device=self.device).double()
        call = partial(self.kernels.sample, logits_RV, torch.cat([options_4.repeat(rows, 1).T, u_1R]))

        def compare() -> Pairs:
            """The token grows with u; within SUM_ERROR of it, rounding of the sums decides which of two it is."""
            some = slice(0, SAMPLED_ROWS)
            numbers = ((u_1R + error).clamp(0, 1 - 2.0**-53)[:, some] for error in (-SUM_ERROR, SUM_ERROR))
            how = (torch.cat([options_4.repeat(u.shape[1], 1).T, u]) for u in numbers)
            (low_R, finite_R), (high_R, _) = (reference.sample(logits_RV[some], each) for each in how)
            token_R, ours_R = (each[some] for each in call())
            return [(token_R, token_R.clamp(low_R, high_R)), (ours_R, finite_R)]

        case = f"{rows:,} rows" if top_p == 1 else f"{rows:,} rows, top_p {top_p}"
        return Work("sample", case, float(logits_RV.nbytes), 0.0, call, compare, 0.0)

    def attention(
        self,
        case: str,
        counts: list[int],
        contexts: list[int],
        is_fp8: bool = False,
        shared: int = 0,
        kind: str = "",
        other: Callable[[], float] | None = None,
    ) -> Work:
        step = paged_step(
            counts, contexts, self.heads, self.dtype, self.device, with_fp8_cache=is_fp8, shared=shared
        )  # fmt: skip
        scale = self.size.head_dim**-0.5
        call = partial(self.kernels.attention, step.q_TND, step.cache, step.where, scale, None)

        def compare() -> Pairs:
            rows = sampled(len(step.q_TND))
            where, some = step.where.rows(rows), torch.from_numpy(rows).to(self.device)
            expected = reference.attention(step.q_TND[some].float(), step.cache, where, scale, None)
            return [(call()[some], expected)]

        num_bytes, name = step.kv_bytes + 2 * step.q_TND.nbytes, "attention" + FP8_CACHE * is_fp8
        tolerance = 2 * self.tolerance  # torch's own kernel rounds scores too
        return Work(name, case, num_bytes, step.flops, call, compare, tolerance, kind, other)


def sampled(count: int) -> np.ndarray:
    """At most SAMPLED_ROWS of `count` rows, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).round().astype(np.int64))


def _skewed(sequences: int, mean: int) -> list[int]:
    """Contexts of which a few are many times the others, `mean` on average: exponential, from a fixed seed."""
    shares = np.random.default_rng(5).exponential(1.0, sequences)
    contexts = np.maximum(shares / shares.mean() * mean, 1).astype(int)
    return contexts.tolist()


def _torch_attention(prompts: int, tokens: int, heads: Heads, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """Seconds of torch's causal attention over prompts of one length, the faster of scaled_dot_product_attention (on a
    card by FlashAttention) and, where this torch has it, of the one for ragged prompts."""

    def normal(num_heads: int) -> torch.Tensor:
        return torch.randn(prompts, num_heads, tokens, heads.head_dim, device=stopwatch.device).to(dtype)

    q, k, v = normal(heads.num_heads), normal(heads.num_kv_heads), normal(heads.num_kv_heads)
    backend = SDPBackend.FLASH_ATTENTION if stopwatch.on_gpu else SDPBackend.MATH
    with sdpa_kernel(backend):
        dense_s = stopwatch.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    ragged = varlen_attention([tokens] * prompts, q, k, v) if stopwatch.on_gpu else None
    if ragged is None:
        return dense_s
    try:
        return min(dense_s, stopwatch.seconds(ragged))
    except RuntimeError:  # it does not take these heads
        return dense_s
