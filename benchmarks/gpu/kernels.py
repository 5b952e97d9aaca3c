"""Time variants of a layer's and the sampler's kernels, against a floor: moving their bytes and computing their FLOPs.

To time another variant of a kernel, add a line to `variants` in the function of its work below. The engine uses the
first variant, and the results of others are compared with it. Bytes count the memory that must be read or written once.
Times exclude work on the host that is done once for all layers of a step.

Suffixes as in `kernels/contract.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.section import Found, Setting
from benchmarks.measure import table
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.delta_net import DeltaWeights, StateCache
from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.linears import InputKernels
from pipeline.kernels.select import select_kernels
from tests.gpu.inputs import Heads, paged_step, random_fp8, random_int4

EPS = 1e-5
PROGRAMS_AND_WARPS = ((3, 4), (4, 2))  # per multiprocessor, besides the served ones
NUM_DRAFTS = 4  # draft tokens of each sequence in verification steps
SERVED, ROUNDED_APART = "served", "apart"
FP8_FORMS = "fp8", "fp8, blocks"


@dataclass(frozen=True)
class Sizes:
    """Input sizes.

    tokens: of elementwise kernels. rows: of sampling. decoding: (sequences, context). prompts: (prompts, tokens).
    shared: (sequences, context, shared tokens of the context). summed: tokens of a residual and what is added. states:
    (sequences, tokens of each) of a Gated DeltaNet.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    decoding: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int, int], ...]
    summed: tuple[int, ...]
    states: tuple[tuple[int, int], ...]


FULL = Sizes(
    (1, 64, 512, 8192),
    (1, 16, 64, 256, 512),
    ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (512, 512), (64, 4096)),
    ((1, 512), (11, 735), (4, 2048), (1, 8192)),
    ((64, 2176, 2048), (835, 2176, 2048)),
    (512, 4096, 16_384),
    ((1, 1), (64, 1), (256, 1), (64, 5), (11, 735), (4, 2048)),
)
SMOKE = Sizes((16,), (4,), ((4, 100),), ((2, 60),), ((4, 200, 128),), (16,), ((2, 1), (2, 20)))
STATES, SMOKE_STATES = DeltaNet(16, 32, 128, 128, 4), DeltaNet(2, 4, 16, 16, 4)  # the first as in Qwen3.5-9B


@dataclass(frozen=True)
class Work:
    """One kernel on inputs of one shape. variants: name -> call that returns one or several tensors."""

    kernel: str
    shape: str
    num_bytes: float
    flops: float
    variants: Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class KernelTime:
    """Time of one variant.

    off: largest difference from the served variant's result, relative to its largest value. For integers, the share of
    unequal values. None if shapes differ.
    """

    kernel: str
    shape: str
    variant: str
    seconds: float
    floor_s: float
    num_bytes: float
    flops: float
    off: float | None


def kernel_times(setting: Setting) -> Iterator[Found]:
    """Time every variant of every work, the most important first."""
    works = Layer(setting).works(SMOKE if setting.is_smoke else FULL)
    return time_works(f"Kernels of {setting.model}", works, setting)


def time_works(title: str, works: Iterable["partial[Work]"], setting: Setting) -> Iterator[Found]:
    """Build each work in turn and time its variants."""
    found, times, stopwatch = Found(), list[KernelTime](), setting.stopwatch()
    for build in works:
        with found.case(f"{build.func.__name__}{build.args}"), torch.inference_mode():
            work, results = build(), list[list[torch.Tensor]]()
            for name, call in work.variants.items():
                with found.case(f"{work.kernel}, {work.shape}, {name}"):
                    result = call()
                    results.append([t.clone() for t in (result if isinstance(result, tuple) else (result,))])
                    floor_s = setting.rates.floor_s(work.num_bytes, work.flops)
                    seconds, off = stopwatch.seconds(call), difference(results[-1], results[0])
                    sizes = work.num_bytes, work.flops
                    times.append(KernelTime(work.kernel, work.shape, name, seconds, floor_s, *sizes, off))
        head = f"{title}, {setting.dtype}. to served: the served variant's time over this one's"
        found.text = "\n".join([head, *times_to_lines(times), *stopwatch.complaints()])
        found.figures = {"model": setting.model, "kernels": [asdict(time) for time in times]}
        yield found


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float | None:
    """Return the largest difference of the tensors (see `KernelTime.off`), or infinity for non-finite values."""
    found = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return None
        if not a.is_floating_point():
            found = max(found, float((a != b).float().mean()))
        elif not bool(a.isfinite().all()):
            return float("inf")
        else:
            found = max(found, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-20)))
    return found


def times_to_lines(times: list[KernelTime]) -> list[str]:
    columns = "kernel <16 | shape <44 | variant <8 | us >9,.1f | floor us >9,.1f | share >6.0% | GB/s >7,.0f"
    rows, served_s = [], dict[tuple[str, str], float]()
    for t in times:
        served_s.setdefault((t.kernel, t.shape), t.seconds)
        rates = t.num_bytes / t.seconds / 1e9, t.flops / t.seconds / 1e12
        faster = served_s[t.kernel, t.shape] / t.seconds
        share = t.floor_s / t.seconds
        rows.append((t.kernel, t.shape, t.variant, t.seconds * 1e6, t.floor_s * 1e6, share, *rates, faster, t.off))
    return table(f"{columns} | TFLOP/s >8,.2f | to served >9.2f | off >8.1e", rows)


class Layer:
    """Builder of each work's inputs, with the sizes of one model."""

    def __init__(self, setting: Setting) -> None:
        self.size, self.dtype, self.device = setting.size, setting.dtype, setting.device
        self.kernels = select_kernels(self.device, self.dtype)
        self.heads = Heads(self.size.heads, self.size.kv_heads, self.size.head_dim)
        self.random = torch.Generator(self.device).manual_seed(0)

    def works(self, sizes: Sizes) -> Iterator["partial[Work]"]:
        for rows in sizes.rows:
            for is_peaked in (False, True):
                yield from (partial(self.sample, rows, top_p, is_peaked) for top_p in (1.0, 0.9))
            yield partial(self.greedy, rows)
        for is_fp8 in (True, False):
            for sequences, context in sizes.decoding:
                yield partial(self.decode, [context] * sequences, is_fp8=is_fp8)
            for sequences, context, shared in sizes.shared:
                yield partial(self.decode, [context] * sequences, is_fp8=is_fp8, shared=shared)
            for prompts, tokens in sizes.prompts:
                yield partial(self.prompts, [tokens] * prompts, is_fp8=is_fp8)
        for sequences, context in sizes.decoding[1:]:
            yield partial(self.decode, _skewed(sequences, context))
            yield partial(self.decode, [context] * sequences, queries=1 + NUM_DRAFTS)
        for tokens in sizes.tokens:
            writes = partial(self.write, tokens), partial(self.write, tokens, is_fp8=True)
            yield from (partial(self.norm, tokens), partial(self.gate, tokens), *writes)
            forms = [form for form in FP8_FORMS if self.device.type == "cuda" and "fp8" in self.kernels.rounded]
            yield from (
                partial(work, tokens, form) for form in forms for work in (self.rounded_norm, self.rounded_gate)
            )
        yield from (partial(self.summed, tokens) for tokens in sizes.summed)
        shape = SMOKE_STATES if sizes is SMOKE else STATES
        yield from (partial(self.delta_net, shape, *size) for size in sizes.states)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.random).to(self.dtype)

    def sample(self, rows: int, top_p: float, is_peaked: bool) -> Work:
        """Sample from normal logits with a standard deviation of 3, or peaked ones like a model's, with weights of
        rank^-1.5."""
        vocab = self.size.vocab
        logits_RV = 3 * torch.randn(rows, vocab, device=self.device, generator=self.random)
        if is_peaked:
            ranks = torch.arange(1, vocab + 1, device=self.device).log() * -1.5
            logits_RV = logits_RV.scatter(1, logits_RV.argsort(1, descending=True), ranks.expand(rows, -1))
        options_4 = torch.tensor([1.0, vocab, top_p, 0.0], dtype=torch.float64, device=self.device)
        u_1R = torch.rand(1, rows, device=self.device, generator=self.random).double()
        sampling_params_5R = torch.cat([options_4.repeat(rows, 1).T, u_1R])
        variants = {
            SERVED: partial(self.kernels.sample, logits_RV, sampling_params_5R),
        }
        kernel = f"sample{', top_p 0.9' if top_p < 1 else ''}"
        return Work(kernel, f"{rows:,} rows, {'peaked' if is_peaked else 'flat'}", logits_RV.nbytes, 0.0, variants)

    def greedy(self, rows: int) -> Work:
        logits_RV = torch.randn(rows, self.size.vocab, device=self.device, generator=self.random)
        variants = {SERVED: partial(self.kernels.greedy, logits_RV)}
        return Work("greedy", f"{rows:,} rows", logits_RV.nbytes, 0.0, variants)

    def decode(self, contexts: list[int], queries: int = 1, is_fp8: bool = False, shared: int = 0) -> Work:
        """Decode the last `queries` tokens of each sequence."""
        step = self._step([queries] * len(contexts), contexts, is_fp8, shared)
        options = self.size.head_dim**-0.5, None
        variants = {SERVED: partial(self.kernels.attention, step.q_TND, step.cache, step.attn_metadata, *options)}
        if self.device.type == "cuda" and not is_fp8:
            for programs, warps in PROGRAMS_AND_WARPS:
                planned = replace(step.attn_metadata, plans={})
                call = partial(self.kernels.attention, step.q_TND, step.cache, planned, *options)
                variants[f"{programs} x {warps}"] = partial(_with_programs, programs, warps, call)
        lengths = f"{contexts[0]:,}" if len(set(contexts)) == 1 else f"{min(contexts):,} to {max(contexts):,}"
        shape = f"{len(contexts):,} at {lengths}"
        shape += f", {shared:,} shared" if shared else ""
        shape += f", {queries - 1} drafts each" if queries > 1 else ""
        return Work(f"decode{', fp8' if is_fp8 else ''}", shape, _bytes(step), step.flops, variants)

    def prompts(self, counts: list[int], is_fp8: bool = False) -> Work:
        step = self._step(counts, counts, is_fp8)
        variants: dict[str, Callable[[], Any]] = {
            SERVED: partial(
                self.kernels.attention, step.q_TND, step.cache, step.attn_metadata, self.size.head_dim**-0.5, None
            ),
        }
        if not is_fp8:
            variants["torch"] = self._torch_attention(len(counts), counts[0])
        shape = f"{len(counts)} of {counts[0]:,}"
        return Work(f"prompts{', fp8' if is_fp8 else ''}", shape, _bytes(step), step.flops, variants)

    def norm(self, tokens: int) -> Work:
        x_TH, residual_TH, weight_H = (self.normal(*n, self.size.hidden) for n in ((tokens,), (tokens,), ()))
        variants = {SERVED: partial(self.kernels.add_rms_norm, x_TH, residual_TH, weight_H, EPS)}
        return Work("add_rms_norm", f"{tokens:,} tokens", 4.0 * x_TH.nbytes, 0.0, variants)

    def summed(self, tokens: int) -> Work:
        """Run `o`, and add its outputs to the residual and norm the sum: apart, or added by the product. Variants add
        to their own copies of the residual, again in each run, so only the first results are compared."""
        _, inputs, width = self.size.linears()[1]
        x_TK, weight_NK, weight_H = (
            self.normal(tokens, inputs),
            self.normal(width, inputs) * inputs**-0.5,
            self.normal(width),
        )
        residual_TH = self.normal(tokens, width)

        def apart(residual_TH: torch.Tensor) -> torch.Tensor:
            return self.kernels.add_rms_norm(F.linear(x_TK, weight_NK), residual_TH, weight_H, EPS)[0]

        def by_product(residual_TH: torch.Tensor) -> torch.Tensor:
            return self.kernels.rms_norm(residual_TH.addmm_(x_TK, weight_NK.T).clone(), weight_H, EPS)

        calls = {SERVED: apart, "addmm": by_product}
        variants = {name: partial(call, residual_TH.clone()) for name, call in calls.items()}
        flops = 2.0 * tokens * inputs * width
        return Work("o, add, norm", f"{tokens:,} tokens", 4.0 * residual_TH.nbytes + weight_NK.nbytes, flops, variants)

    def delta_net(self, shape: DeltaNet, sequences: int, tokens: int) -> Work:
        """Compute the first `tokens` tokens of sequences, or one more after them if it is one."""
        heads, count = shape.num_value_heads, sequences * tokens
        qkvz_TX, ba_TX = self.normal(count, shape.num_channels + shape.num_outputs), self.normal(count, 2 * heads)
        drawn = [self.normal(*size).float() for size in ((shape.conv_width, shape.num_channels), (heads,), (heads,))]
        conv_WC, decay_V, dt_bias_V = drawn
        ones_D = torch.ones(shape.value_dim, device=self.device)
        weights = DeltaWeights(shape, conv_WC, -decay_V.abs(), dt_bias_V, ones_D)
        cache = StateCache.allocate(sequences, shape, self.dtype, self.device)
        step = AttentionInput(
            query_start_S1=np.arange(0, count + 1, tokens, dtype=np.int32),
            context_len_S=np.full(sequences, tokens, dtype=np.int32),
            block_table_SM=np.zeros((sequences, 1), dtype=np.int32),
            slot_mapping_T=torch.zeros(count, dtype=torch.int64, device=self.device),
            block_size=1,
            state_slot_S=np.arange(sequences),
        )
        variants = {SERVED: partial(self.kernels.delta_net, qkvz_TX, ba_TX, weights, EPS, cache, step)}
        out_bytes = qkvz_TX.nbytes * shape.num_outputs / qkvz_TX.shape[1]
        num_bytes = qkvz_TX.nbytes + ba_TX.nbytes + out_bytes + 2.0 * cache.state_LVKD.nbytes
        flops = 6.0 * count * shape.key_dim * shape.num_outputs
        return Work("delta_net", f"{sequences:,} of {tokens:,}", num_bytes, flops, variants)

    def gate(self, tokens: int) -> Work:
        gate_up = self.normal(tokens, 2 * self.size.intermediate)
        variants = {SERVED: partial(self.kernels.gate_mul, gate_up, "silu")}
        return Work("gate_mul", f"{tokens:,} tokens", 1.5 * gate_up.nbytes, 0.0, variants)

    def rounded_norm(self, tokens: int, form: str) -> Work:
        """Round a norm's output for the linear that reads it, in one launch and in two. Variants write into their own
        copies of the inputs."""
        linear, width = self._fp8_linear(form, self.size.hidden), self.size.hidden
        inputs, weight_H = [self.normal(tokens, width), self.normal(tokens, width)], self.normal(width)

        def call(before: InputKernels, x_TH: torch.Tensor, residual_TH: torch.Tensor) -> Any:
            return _codes_and_scales(before.add_rms_norm(x_TH, residual_TH, weight_H, EPS)[0], linear)

        sets = {SERVED: linear, ROUNDED_APART: self.kernels}
        variants = {name: partial(call, each, *(x.clone() for x in inputs)) for name, each in sets.items()}
        return Work(f"add_rms_norm, {form}", f"{tokens:,} tokens", 3.5 * inputs[0].nbytes, 0.0, variants)

    def rounded_gate(self, tokens: int, form: str) -> Work:
        """Round silu * up for the linear that reads it, in one launch and in two."""
        linear, gate_up = (
            self._fp8_linear(form, self.size.intermediate),
            self.normal(tokens, 2 * self.size.intermediate),
        )

        def call(before: InputKernels) -> Any:
            return _codes_and_scales(before.gate_mul(gate_up, "silu"), linear)

        variants = {SERVED: partial(call, linear), ROUNDED_APART: partial(call, self.kernels)}
        return Work(f"gate_mul, {form}", f"{tokens:,} tokens", 1.25 * gate_up.nbytes, 0.0, variants)

    def _fp8_linear(self, form: str, inputs: int) -> Any:
        """Return a linear with few outputs that reads inputs in `form`."""
        int4 = random_int4(128, inputs, 128, torch.Generator().manual_seed(1))
        return self.kernels.rounded["fp8"].prepare(int4 if form == "fp8" else random_fp8(128, inputs))

    def write(self, tokens: int, is_fp8: bool = False) -> Work:
        """Run norm_rope_write without norms, on prompts of up to 512 tokens."""
        counts = [512] * (tokens // 512) + ([tokens % 512] if tokens % 512 else [])
        step = self._step(counts, counts, is_fp8)
        qkv_TMD = self.normal(tokens, self.heads.num_heads + 2 * self.heads.num_kv_heads, self.heads.head_dim)
        angles = torch.rand(tokens, self.heads.head_dim // 2, device=self.device, generator=self.random)
        to = step.cache, step.attn_metadata.slot_mapping_T
        variants = {SERVED: partial(self.kernels.norm_rope_write, qkv_TMD, angles, angles, None, EPS, *to)}
        num_bytes = qkv_TMD.nbytes + step.q_TND.nbytes + step.kv_bytes + 2.0 * angles.nbytes
        return Work(f"norm_rope_write{', fp8' if is_fp8 else ''}", f"{tokens:,} tokens", num_bytes, 0.0, variants)

    def _step(self, counts: list[int], contexts: list[int], is_fp8: bool, shared: int = 0) -> Any:
        options = {"with_fp8_cache": is_fp8, "shared": shared}
        return paged_step(counts, contexts, self.heads, self.dtype, self.device, **options)

    def _torch_attention(self, prompts: int, tokens: int) -> Callable[[], torch.Tensor]:
        """Return scaled_dot_product_attention on contiguous tensors, with FlashAttention on a GPU."""
        heads = self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads
        q, k, v = (self.normal(prompts, count, tokens, self.heads.head_dim) for count in heads)
        backend = SDPBackend.FLASH_ATTENTION if self.device.type == "cuda" else SDPBackend.MATH

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call


def _with_programs(programs: int, warps: int, call: Callable[[], Any]) -> Any:
    """Run decode attention with other numbers of programs per multiprocessor and of warps per program."""
    from pipeline.kernels.triton.attention import decode, decode_metadata

    served = decode_metadata.programs_and_warps
    decode.programs_and_warps = decode_metadata.programs_and_warps = lambda *_: (programs, warps)
    try:
        return call()
    finally:
        decode.programs_and_warps = decode_metadata.programs_and_warps = served


def _codes_and_scales(x: Any, linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `x` with the linear's own launch if it is not rounded yet, and return codes and scales."""
    rounded = linear.round(x) if isinstance(x, torch.Tensor) else x
    return rounded.value_MK[: rounded.num_tokens].view(torch.uint8), rounded.scale_BM[:, : rounded.num_tokens]


def _bytes(step: Any) -> float:
    return step.kv_bytes + 2.0 * step.q_TND.nbytes


def _skewed(sequences: int, mean: int) -> list[int]:
    """Return exponentially distributed contexts with the given mean, a few of which are very long."""
    shares = np.random.default_rng(5).exponential(1.0, sequences)
    return np.maximum(shares / shares.mean() * mean, 1).astype(int).tolist()
