"""Kernels against their floor: the longer of moving their bytes and computing their products at the measured rates.

Bytes are those that have to be moved once: what is read and what is written. Where torch has a kernel for the same work
(scaled_dot_product_attention, which is FlashAttention on a card, for prompts), its time stands beside. What a kernel
plans on the host once for all layers of a step is not in its time.

Suffixes as in `kernels/contract.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.bench.gpu.kernels.paged import Heads, paged_step
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.stopwatch import Stopwatch
from pipeline.kernels.contract import Kernels
from pipeline.roofline.step import DecoderSize

EPS = 1e-5
FP8_CACHE = ", fp8"  # behind the names of kernels that read or write a cache in FP8
DRAFTS = 4  # of each sequence, where drafts are checked
DECODING, SKEWED, CHECKING, PROMPTS = "decoding", "decoding, skewed", "checking drafts", "prompts"  # see `aims.py`

_Work = tuple[float, float, Callable[[], object]]
"""Bytes, operations, and the call that moves and computes them."""


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

    def to_json(self) -> dict[str, Any]:
        return {"times": [asdict(time) | {"share": time.share} for time in self.times]}

    def to_text(self) -> str:
        lines = [
            "Kernels, one layer each, against their floor at the rates above; other: torch's attention on its own "
            "contiguous tensors.",
            f"{'kernel':<16} {'work':<44} {'us':>9} {'floor us':>9} {'share':>6} {'GB/s':>7} {'TFLOP/s':>8} "
            f"{'other us':>9}",
        ]
        for t in self.times:
            other = "" if t.other_s is None else f"{t.other_s * 1e6:>9,.1f}"
            lines.append(
                f"{t.kernel:<16} {t.case:<44} {t.seconds * 1e6:>9,.1f} {t.floor_s * 1e6:>9,.1f} {t.share:>6.0%} "
                f"{t.num_bytes / t.seconds / 1e9:>7,.0f} {t.flops / t.seconds / 1e12:>8,.2f} {other:>9}"
            )
        return "\n".join(lines)


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
QUICK = KernelCases((64, 8192), ((64, 1024), (256, 1024)), ((11, 735), (1, 8192)), ((256, 2176, 2048),))
SMOKE = KernelCases((16,), ((4, 100),), ((2, 60),), ((4, 200, 128),))


def kernel_cases(
    size: DecoderSize, kernels: Kernels, dtype: torch.dtype, stopwatch: Stopwatch, rates: Rates, cases: KernelCases
) -> Iterator[Callable[[], KernelTime]]:
    """Measurements of the kernels of one layer of a model of that size, the linears apart; each runs when called."""
    heads = Heads(size.heads, size.kv_heads, size.head_dim)

    def timed(kernel: str, case: str, work: _Work, other_s: float | None = None) -> KernelTime:
        num_bytes, flops, call = work
        seconds = stopwatch.seconds(call)
        return KernelTime(kernel, case, seconds, rates.floor_s(num_bytes, flops), num_bytes, flops, other_s)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=stopwatch.device).to(dtype)

    def of_norm(tokens: int) -> KernelTime:
        x_TH, residual_TH, weight_H = normal(tokens, size.hidden), normal(tokens, size.hidden), normal(size.hidden)
        work = 4.0 * x_TH.nbytes, 0.0, lambda: kernels.add_rms_norm(x_TH, residual_TH, weight_H, EPS)
        return timed("add_rms_norm", f"{tokens:,} tokens", work)

    def of_gate(tokens: int) -> KernelTime:
        gate_up = normal(tokens, 2 * size.intermediate)
        return timed("silu_mul", f"{tokens:,} tokens", (1.5 * gate_up.nbytes, 0.0, lambda: kernels.silu_mul(gate_up)))

    def of_write(tokens: int, with_fp8: bool = False) -> KernelTime:
        work = _write(tokens, heads, kernels, dtype, stopwatch.device, with_fp8)
        return timed("norm_rope_write" + FP8_CACHE * with_fp8, f"{tokens:,} tokens", work)

    def of_greedy(rows: int) -> KernelTime:
        logits_RV = torch.randn(rows, size.vocab, device=stopwatch.device)
        return timed("greedy", f"{rows:,} rows", (float(logits_RV.nbytes), 0.0, lambda: kernels.greedy(logits_RV)))

    def of_draw(rows: int, top_p: float) -> KernelTime:
        logits_RV = 3 * torch.randn(rows, size.vocab, device=stopwatch.device)
        options = torch.tensor([1.0, size.vocab, top_p, 0.0], dtype=torch.float64, device=stopwatch.device)
        how_5R = torch.cat([options.repeat(rows, 1).T, torch.rand(1, rows, device=stopwatch.device).double()])
        case = f"{rows:,} rows" if top_p == 1 else f"{rows:,} rows, top_p {top_p}"
        return timed("draw", case, (float(logits_RV.nbytes), 0.0, lambda: kernels.draw(logits_RV, how_5R)))

    def of_attention(
        case: str, counts: list[int], contexts: list[int], with_fp8: bool = False, shared: int = 0
    ) -> KernelTime:
        step = paged_step(counts, contexts, heads, dtype, stopwatch.device, with_fp8_cache=with_fp8, shared=shared)
        num_bytes = step.kv_bytes + 2 * step.q_TND.nbytes
        call = partial(kernels.attention, step.q_TND, step.cache, step.where, size.head_dim**-0.5, None)
        return timed("attention" + FP8_CACHE * with_fp8, case, (num_bytes, step.flops, call))

    def of_prompts(prompts: int, tokens: int) -> KernelTime:
        found = of_attention(f"{prompts} prompts of {tokens:,}", [tokens] * prompts, [tokens] * prompts)
        return replace(found, other_s=_torch_attention(prompts, tokens, heads, dtype, stopwatch), kind=PROMPTS)

    def of_decoding(kind: str, case: str, contexts: list[int], queries: int = 1) -> KernelTime:
        return replace(of_attention(case, [queries] * len(contexts), contexts), kind=kind)

    for tokens in cases.tokens:
        yield from (partial(of, tokens) for of in (of_norm, of_gate, of_write, partial(of_write, with_fp8=True)))
    for sequences, context in cases.decoding:
        yield partial(of_greedy, sequences)
        yield partial(of_draw, sequences, 1.0)
        yield partial(of_draw, sequences, 0.9)
        about, contexts = f"decoding, {sequences:,} at {context:,}", [context] * sequences
        yield partial(of_decoding, DECODING, about, contexts)
        yield partial(of_attention, about, [1] * sequences, contexts, True)
        if sequences > 1:
            yield partial(of_decoding, CHECKING, f"{about}, {DRAFTS} drafts each", contexts, 1 + DRAFTS)
            contexts = _skewed(sequences, context)
            about = f"decoding, {sequences:,} at {min(contexts):,} to {max(contexts):,}, {context:,} on average"
            yield partial(of_decoding, SKEWED, about, contexts)
    for sequences, context, shared in cases.shared:
        about, ones = f"{shared:,} shared, decoding, {sequences:,} at {context:,}", [1] * sequences
        yield from (partial(of_attention, about, ones, [context] * sequences, fp8, shared) for fp8 in (False, True))
    for prompts, tokens in cases.prompts:
        yield partial(of_prompts, prompts, tokens)
        about, counts = f"{prompts} prompts of {tokens:,}", [tokens] * prompts
        yield partial(of_attention, about, counts, counts, True)
    long = max(tokens for _, tokens in cases.prompts)
    yield partial(of_attention, f"last half of a prompt of {long:,}", [long // 2], [long])


def _write(
    tokens: int, heads: Heads, kernels: Kernels, dtype: torch.dtype, device: torch.device, with_fp8: bool
) -> _Work:
    """norm_rope_write on prompts of 512 tokens at the most, without norms."""
    counts = [512] * (tokens // 512) + ([tokens % 512] if tokens % 512 else [])
    step = paged_step(counts, counts, heads, dtype, device, with_fp8_cache=with_fp8)
    qkv_TMD = torch.randn(tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    cos_TD2 = torch.rand(tokens, heads.head_dim // 2, device=device)
    cache, slots = step.cache, step.where.slot_mapping_T
    num_bytes = qkv_TMD.nbytes + step.q_TND.nbytes + step.kv_bytes + 2.0 * cos_TD2.nbytes
    return num_bytes, 0.0, lambda: kernels.norm_rope_write(qkv_TMD, cos_TD2, cos_TD2, None, EPS, cache, slots)


def _skewed(sequences: int, mean: int) -> list[int]:
    """Contexts of which a few are many times the others, `mean` on average: exponential, from a fixed seed."""
    drawn = np.random.default_rng(5).exponential(1.0, sequences)
    contexts = np.maximum(drawn / drawn.mean() * mean, 1).astype(int)
    return contexts.tolist()


def _torch_attention(prompts: int, tokens: int, heads: Heads, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """Seconds of causal scaled_dot_product_attention over prompts of one length; on a card by FlashAttention."""

    def normal(num_heads: int) -> torch.Tensor:
        return torch.randn(prompts, num_heads, tokens, heads.head_dim, device=stopwatch.device).to(dtype)

    q, k, v = normal(heads.num_heads), normal(heads.num_kv_heads), normal(heads.num_kv_heads)
    backend = SDPBackend.FLASH_ATTENTION if stopwatch.on_gpu else SDPBackend.MATH
    with sdpa_kernel(backend):
        return stopwatch.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
