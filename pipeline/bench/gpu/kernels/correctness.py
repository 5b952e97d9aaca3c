"""Every kernel on this device against the oracle.

The oracle computes in float32 from the same inputs, which are rounded to the kernel's type before. An error is the
largest difference over the largest value of the oracle's result. A kernel that fails to compile or to start is a failed
check with its reason, and the others go on: which ones work on a new card is the question.

Suffixes as in `kernels/contract.py`; K and N of a linear are its inputs and outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from pipeline.bench.gpu.kernels.paged import Heads, PagedStep, paged_step
from pipeline.kernels.activations.fp8 import fp8_block
from pipeline.kernels.cache import FP8, FP8_MAX, LayerCache
from pipeline.kernels.contract import Kernels, RoundedLinears
from pipeline.kernels.reference import read_kv, reference_kernels
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight

TOLERANCES = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5
ALL_HEADS = (Heads(32, 8, 128), Heads(16, 8, 128), Heads(14, 2, 64), Heads(4, 4, 64))
STEPS = {  # tokens that each sequence computes, and its context
    "decode": ((1,) * 7, (1, 15, 63, 64, 65, 500, 1300)),
    "decode, one long": ((1,) * 5, (4000, 3, 70, 1, 129)),
    "drafts": ((4, 1, 7, 2), (200, 64, 71, 2)),
    "prompts": ((1, 17, 64, 130, 700), (1, 17, 64, 130, 700)),
    "chunks beside decoding": ((40, 1, 65, 1), (300, 90, 65, 1025)),
}
SHARED = 1024
SHARED_STEPS = {  # the same, of contexts that all begin with the same SHARED tokens: enough to be read together
    "decode, shared prefix": ((1,) * 40, tuple(SHARED + 1 + 7 * s for s in range(40))),
    "drafts, shared prefix": ((4, 1, 7, 2) * 11, tuple(SHARED + 8 + 3 * s for s in range(44))),
}
LINEARS_NK = ((384, 256), (1536, 1024), (256, 896))
TOKENS = (1, 3, 16, 33, 64, 200)
ROWS = (1, 37, 300)
DRAWS = (  # temperature, top_k, top_p, min_p
    (1.0, 32_011.0, 0.9, 0.0),
    (0.7, 32_011.0, 1.0, 0.0),
    (1.3, 40.0, 1.0, 0.0),
    (1.0, 32_011.0, 1.0, 0.01),
    (0.0, 32_011.0, 1.0, 0.0),
    (1.5, 200.0, 0.95, 0.001),
)

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""What a kernel gave, and what the oracle."""


@dataclass(frozen=True)
class Check:
    """error: as the module says; None where the kernel failed, for the reason in `failure`."""

    kernel: str
    case: str
    dtype: str
    served_by: str
    error: float | None
    tolerance: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True)
class Correctness:
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        return {"passed": len(self.checks) - len(self.failed), "checks": [asdict(check) for check in self.checks]}

    def to_text(self) -> str:
        passed = len(self.checks) - len(self.failed)
        lines = [
            f"Against the oracle in float32: {passed} of {len(self.checks)} checks passed. Largest errors, over the "
            "largest value; of the engine, how far a token was behind the best, in deviations of the logits; of bits, "
            "the share of rows that differ, with engine.deterministic, where they are computed with others:",
            f"{'kernel':<20} {'type':<9} {'checks':>6} {'error':>9} {'allowed':>9}  served by",
        ]
        groups = dict.fromkeys((check.kernel, check.dtype) for check in self.checks)
        for kernel, dtype in groups:
            of = [check for check in self.checks if (check.kernel, check.dtype) == (kernel, dtype)]
            errors = [check.error for check in of if check.error is not None]
            error = f"{max(errors):.1e}" if errors else "none ran"
            lines.append(f"{kernel:<20} {dtype:<9} {len(of):>6} {error:>9} {of[0].tolerance:>9.1e}  {of[0].served_by}")
        lines += [
            f"FAILED {check.kernel} {check.dtype}, {check.case}: {check.failure or f'error {check.error:.1e}'}"
            for check in self.failed
        ]
        return "\n".join(lines)


def check_kernels(device: torch.device, dtypes: Sequence[torch.dtype], every: int = 1) -> Iterator[Check]:
    """Every kernel that serves `device`, in each of `dtypes`, over shapes with odd ends; of these, each `every`th."""
    oracle = reference_kernels(torch.float32, device)
    for dtype in dtypes:
        kernels = select_kernels(device, dtype)
        for kernel, case, run in islice(_cases(kernels, oracle, dtype, device), 0, None, every):
            yield _checked(kernel, case, dtype, kernels.served_by[kernel], run)
        fp8 = kernels.rounded.get("fp8")
        if fp8 is not None:
            for case, run in islice(_fp8_cases(fp8, oracle.rounded["fp8"], dtype, device), 0, None, every):
                yield _checked("fp8 linear", case, dtype, fp8.served_by, run)


def _checked(kernel: str, case: str, dtype: torch.dtype, served_by: str, run: Callable[[], Pairs]) -> Check:
    check = Check(kernel, case, str(dtype).removeprefix("torch."), served_by, None, TOLERANCES[dtype])
    return outcome(check, lambda: max(relative_error(actual, expected) for actual, expected in run()))


def outcome(check: Check, error: Callable[[], float]) -> Check:
    """The check with its error, or with the reason why there is none."""
    try:
        with torch.inference_mode():
            found = error()
        if not math.isfinite(found):
            return replace(check, failure="values that are not finite, or another shape than the oracle's")
        return replace(check, error=found)
    except Exception as reason:  # whatever a compiler or a driver raises is this check's result
        return replace(check, failure=f"{type(reason).__name__}: {str(reason).strip()[:500]}")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinite where anything is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    wide = actual.float()
    if not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - expected).abs().max() / expected.abs().max().clamp_min(1e-20))


def _cases(
    kernels: Kernels, oracle: Kernels, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, Callable[[], Pairs]]]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(sum(shape))).to(dtype)

    def of_linear(weight: LinearWeight, tokens: int) -> Pairs:
        x_TK = normal(tokens, weight.in_features)
        return [(kernels.prepare_linear(weight)(x_TK), oracle.prepare_linear(weight)(x_TK.float()))]

    def of_norm(tokens: int, hidden: int) -> Pairs:
        x_TH, weight_H = normal(tokens, hidden), normal(hidden)
        residual_TH = normal(tokens, hidden + 1)[:, 1:].contiguous()
        wide_y, wide_sum = oracle.add_rms_norm(x_TH.float(), residual_TH.float(), weight_H.float(), EPS)
        y_TH, sum_TH = kernels.add_rms_norm(x_TH, residual_TH, weight_H, EPS)  # may write into its inputs
        return [(y_TH, wide_y), (sum_TH, wide_sum)]

    def of_gate(tokens: int, width: int) -> Pairs:
        gate_up = normal(tokens, 2 * width)
        return [(kernels.silu_mul(gate_up), oracle.silu_mul(gate_up.float()))]

    def of_greedy(rows: int, vocab_size: int) -> Pairs:
        logits_RV = normal(rows, vocab_size).float().round(decimals=1)  # the first of equal ones counts
        logits_RV[:: rows + 1, 7] = float("inf")
        logits_RV[1::5, -1] = float("nan")
        token_R, finite_R = kernels.greedy(logits_RV)
        best_R, sound_R = (each.to(device) for each in oracle.greedy(logits_RV.cpu()))  # where the first one is sure
        return [(finite_R, sound_R.float()), (token_R * sound_R, (best_R * sound_R).float())]

    def of_draw(rows: int, vocab_size: int) -> Pairs:
        logits_RV = 3 * normal(rows, vocab_size).float()
        logits_RV[1::7, -1] = float("nan")
        random = torch.Generator().manual_seed(rows)
        options_R4 = torch.tensor(DRAWS).repeat(-(-rows // len(DRAWS)), 1)[:rows].double()
        u_R1 = torch.rand(rows, 1, dtype=torch.float64, generator=random)
        how_5R = torch.cat([options_R4, u_R1], dim=1).T.contiguous()
        token_R, finite_R = kernels.draw(logits_RV, how_5R.to(device))
        drawn_R, sound_R = (each.to(device) for each in oracle.draw(logits_RV.cpu(), how_5R))
        return [(finite_R, sound_R.float()), (token_R * sound_R, (drawn_R * sound_R).float())]

    for weight_name, weight in _linears(dtype):
        for tokens in TOKENS:
            yield "linear", f"{weight_name}, {tokens} tokens", partial(of_linear, weight, tokens)
    for tokens in ROWS:
        yield "add_rms_norm", f"{tokens} tokens of 4096", partial(of_norm, tokens, 4096)
        yield "add_rms_norm", f"{tokens} tokens of 896", partial(of_norm, tokens, 896)
        yield "silu_mul", f"{tokens} tokens of 1792", partial(of_gate, tokens, 1792)
        yield "greedy", f"{tokens} rows of 32,011", partial(of_greedy, tokens, 32_011)
        yield "draw", f"{tokens} rows of 32,011", partial(of_draw, tokens, 32_011)
    for heads in ALL_HEADS:
        about = f"{heads.num_heads} heads on {heads.num_kv_heads} of {heads.head_dim}"
        for with_fp8, form in ((False, ""), (True, ", fp8 cache")):
            made = partial(paged_step, heads=heads, dtype=dtype, device=device, with_fp8_cache=with_fp8)
            steps = {name: partial(made, *step) for name, step in STEPS.items()}
            steps |= {name: partial(made, *step, shared=SHARED) for name, step in SHARED_STEPS.items()}
            for name, step in steps.items():
                for window in (None, 48):
                    case = f"{name}, {about}{form}" + (f", window {window}" if window else "")
                    yield "attention", case, _of_attention(kernels, oracle, step, window)
            for norm in (False, True):
                case = f"{about}{form}{', norms' if norm else ''}"
                yield "norm_rope_write", case, _of_write(kernels, oracle, steps["chunks beside decoding"], normal, norm)


def _fp8_cases(
    fp8: RoundedLinears, oracle: RoundedLinears, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], Pairs]]]:
    """Those of the linears that have such a form. Both round the same inputs, in `dtype`."""

    def of_linear(weight: LinearWeight, tokens: int) -> Pairs:
        random = torch.Generator(device).manual_seed(tokens)
        x_TK = torch.randn(tokens, weight.in_features, device=device, generator=random).to(dtype)
        linear, exact = fp8.prepare(weight), oracle.prepare(weight)
        assert linear is not None
        assert exact is not None
        return [(linear(x_TK), exact(x_TK.float()))]

    for name, weight in _linears(dtype):
        if fp8_block(weight) is not None:
            for tokens in TOKENS:
                yield f"{name}, {tokens} tokens", partial(of_linear, weight, tokens)


def _linears(dtype: torch.dtype) -> Iterator[tuple[str, LinearWeight]]:
    random = torch.Generator().manual_seed(0)
    for n, k in LINEARS_NK:
        bias_N = torch.randn(n, generator=random).to(dtype)
        dense = DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).to(dtype))
        yield f"dense {k} to {n}", dense
        yield f"dense {k} to {n}, bias", replace(dense, bias_N=bias_N)
        for group in (128, 64, 32):
            yield f"int4 {k} to {n}, groups of {group}", random_int4(n, k, group, random)


def random_int4(n: int, k: int, group: int, random: torch.Generator) -> GroupIntWeight:
    """An int4 weight on the host, whose outputs have about the size of its inputs."""
    return GroupIntWeight(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=random),
        (0.5 + torch.rand(n, k // group, generator=random)) * (k**-0.5 / 4.6),
        torch.randint(6, 10, (n, k // group), generator=random).float(),
        group,
    )


def _of_attention(
    kernels: Kernels, oracle: Kernels, make_step: Callable[[], PagedStep], window: int | None
) -> Callable[[], Pairs]:
    def run() -> Pairs:
        step = make_step()
        scale = step.q_TND.shape[2] ** -0.5
        q_TND, wide = step.q_TND, _wide(step.cache)
        actual = kernels.attention(q_TND, step.cache, replace(step.where, worked_out={}), scale, window)
        return [(actual, oracle.attention(q_TND.float(), wide, step.where, scale, window))]

    return run


def _of_write(
    kernels: Kernels,
    oracle: Kernels,
    make_step: Callable[[], PagedStep],
    normal: Callable[..., torch.Tensor],
    norm: bool,
) -> Callable[[], Pairs]:
    def run() -> Pairs:
        step = make_step()
        tokens, heads, head_dim = step.q_TND.shape
        qkv_TMD = normal(tokens, heads + 2 * step.cache.k_CBKD.shape[2], head_dim)
        angle_TD2 = normal(tokens, head_dim // 2).float()
        cos_TD2, sin_TD2 = angle_TD2.cos(), angle_TD2.sin()
        norms = (normal(head_dim), normal(head_dim + 1)[1:].contiguous()) if norm else None
        wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
        cache, slots, wide = step.cache, step.where.slot_mapping_T, _widened(step.cache)
        q_TND = kernels.norm_rope_write(qkv_TMD.clone(), cos_TD2, sin_TD2, norms, EPS, cache, slots)
        expected = oracle.norm_rope_write(qkv_TMD.float(), cos_TD2, sin_TD2, wide_norms, EPS, wide, slots)
        written = _widened(cache)
        pairs = [(written.k_CBKD, wide.k_CBKD), (written.v_CBKD, wide.v_CBKD)]
        if cache.k_scale_CBK is not None and cache.v_scale_CBK is not None:
            scales = cache.k_scale_CBK, cache.v_scale_CBK
            pairs = [(_within_rounding(*pair, scale), pair[1]) for pair, scale in zip(pairs, scales)]
            exact = (each.flatten(0, 1)[slots].abs().amax(-1) * (1.0 / FP8_MAX) for _, each in pairs)
            pairs += [(scale.flatten(0, 1)[slots], each) for scale, each in zip(scales, exact)]
        return [(q_TND, expected), *pairs]

    return run


def _wide(cache: LayerCache) -> LayerCache:
    """As the oracle reads it: in float32, FP8 as it is."""
    return LayerCache(*(tensor if tensor.dtype == FP8 else tensor.float() for tensor in cache.tensors))


def _widened(cache: LayerCache) -> LayerCache:
    """What it holds in float32, in tensors of its own."""
    everywhere = torch.arange(len(cache.k_CBKD), device=cache.k_CBKD.device)
    stored = (cache.k_CBKD, cache.k_scale_CBK), (cache.v_CBKD, cache.v_scale_CBK)
    return LayerCache(*(read_kv(values, scale, everywhere).to(torch.float32, copy=True) for values, scale in stored))


def _within_rounding(stored: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What is nearest to `exact` of all that rounds to what FP8 stored: half a unit in the last of 3 bits of mantissa
    to either side, or of the smallest code."""
    half = torch.maximum(stored.abs() * 2.0**-4, scale[..., None] * 2.0**-10)
    return torch.minimum(torch.maximum(exact, stored - half), stored + half)
