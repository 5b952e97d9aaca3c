"""Every kernel that serves a device against the reference in float32, over shapes with odd ends."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.adapters import AdapterTokens
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.delta_net import DeltaWeights, StateCache
from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.experts import LoopedExperts
from pipeline.kernels.linears import InputKernels
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.routing import Routing
from pipeline.weights.packed import DenseWeight, LinearWeight
from tests.gpu.checks import FP8_CODE, TOLERANCES, fp8_tolerance, relative_error
from tests.gpu.inputs import paged_step, random_fp8, random_int4, widened
from tests.gpu.targets import TARGETS, Target
from tests.kernels.experts import FORMS, random_experts
from tests.kernels.lora import random_updates

EPS = 1e-5
STEPS = {  # tokens that each sequence computes, its context, and tokens that all contexts begin with
    "decode": ((1,) * 7, (1, 15, 63, 64, 65, 500, 1300), 0),
    "decode, one long": ((1,) * 5, (4000, 3, 70, 1, 129), 0),
    "drafts": ((4, 1, 7, 2), (200, 64, 71, 2), 0),
    "prompts": ((1, 17, 64, 130, 700), (1, 17, 64, 130, 700), 0),
    "chunks with decoding": ((40, 1, 65, 1), (300, 90, 65, 1025), 0),
    "decode, shared prefix": ((1,) * 40, tuple(1025 + 7 * s for s in range(40)), 1024),
    "drafts, shared prefix": ((4, 1, 7, 2) * 11, tuple(1032 + 3 * s for s in range(44)), 1024),
}
DRAWS = (  # temperature, top_k, top_p, min_p
    (1.0, 32_011.0, 0.9, 0.0),
    (0.7, 32_011.0, 1.0, 0.0),
    (1.3, 40.0, 1.0, 0.0),
    (1.0, 32_011.0, 1.0, 0.01),
    (0.0, 32_011.0, 1.0, 0.0),
    (1.5, 200.0, 0.95, 0.001),
)


def close(target: Target, *pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(relative_error(ours, exact) <= TOLERANCES[target.dtype] for ours, exact in pairs)


def weights_of(target: Target) -> dict[str, LinearWeight]:
    random, found = torch.Generator().manual_seed(0), dict[str, LinearWeight]()
    for n, k in target.linears_NK:
        dense = DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).to(target.dtype))
        bias_N = torch.randn(n, generator=random).to(target.dtype)
        found |= {f"dense {n} {k}": dense, f"dense {n} {k}, bias": replace(dense, bias_N=bias_N)}
        found |= {f"int4 {n} {k}, groups of {group}": random_int4(n, k, group, random) for group in (128, 64, 32)}
        found[f"fp8 {n} {k}"] = random_fp8(n, k)
    return found


@TARGETS
@torch.inference_mode()
def test_linears(target: Target) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    for name, weight in weights_of(target).items():
        ours, its = kernels.prepare_linear(weight), exact.prepare_linear(weight)
        for tokens in target.tokens:
            x_TK = target.normal(tokens, weight.in_features)
            assert close(target, (ours(x_TK), its(x_TK.float()))), (name, tokens)


@TARGETS
@pytest.mark.parametrize("routing", [Routing(8), Routing(4, "sigmoid", scale=2.5)], ids=["softmax", "sigmoid"])
@torch.inference_mode()
def test_route(target: Target, routing: Routing) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    for num_experts in (8, 60, 128, 512):
        logits_TE, bias_E = target.normal(300, num_experts).float(), target.normal(num_experts).float()
        for each in (kernels, exact):
            assert [part.dtype for part in each.route(logits_TE, routing, bias_E)] == [torch.int64, torch.float32]
        ours, its = (sorted_route(*each.route(logits_TE, routing, bias_E)) for each in (kernels, exact))
        assert torch.equal(ours[0], its[0])
        assert relative_error(ours[1], its[1]) < 1e-5


def sorted_route(expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    expert_TA, order_TA = expert_TA.sort(dim=1)
    return expert_TA, weight_TA.gather(1, order_TA)


@TARGETS
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_experts(target: Target, form: str) -> None:
    """Every tile, with experts of no, one and many tokens, and inputs that end within a block."""
    kernels = target.kernels()
    exact = reference_kernels(torch.float32, target.device)
    for activation, num_experts, hidden, width in (("silu", 16, 512, 384), ("clamped_swiglu", 4, 640, 256)):
        weights = random_experts(form, num_experts, hidden, width, has_bias=num_experts == 4)
        ours = kernels.prepare_experts(weights, activation, kernels.prepare_linear)
        its = LoopedExperts(weights, activation, exact.prepare_linear, exact.gate_mul)
        for tokens in (*target.tokens, 1500):
            x_TH = target.normal(tokens, hidden)
            routed = exact.route(2 * target.normal(tokens, num_experts).float(), Routing(2))
            error = relative_error(ours(x_TH, *routed), its(x_TH.float(), *routed))
            assert error <= 2 * TOLERANCES[target.dtype], (activation, tokens)


@TARGETS
@torch.inference_mode()
def test_adapters(target: Target) -> None:
    """Ranks that end within a tile, an adapter without this linear, and tokens of the base model."""
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    for n, k in target.linears_NK:
        updates = random_updates((16, 5, 0, 40), n, k)
        ours, its = kernels.prepare_lora(updates), exact.prepare_lora(updates)
        for num_tokens in (*target.tokens, 1500):
            adapter_T = np.random.default_rng(num_tokens).integers(-1, 4, num_tokens)
            x_TK, y_TN = target.normal(num_tokens, k), target.normal(num_tokens, n)
            expected = y_TN.to(torch.float32, copy=True)
            tokens = AdapterTokens(adapter_T, 4, target.device)
            its(expected, x_TK.float(), tokens)
            ours(y_TN, x_TK, tokens)
            assert close(target, (y_TN, expected)), (n, k, num_tokens)


@TARGETS
@torch.inference_mode()
def test_delta_net(target: Target) -> None:
    """Prompts, single tokens and drafts, with states that lag behind the steps."""
    size = 128 if target.device.type == "cuda" else 16
    shape, kernels, exact = (
        DeltaNet(2, 4, size, size, 4),
        target.kernels(),
        reference_kernels(torch.float32, target.device),
    )
    heads, num_sequences = shape.num_value_heads, 5
    norm_D, conv_WC = (target.normal(*sizes).float() for sizes in ((size,), (4, shape.num_channels)))
    decay_V, dt_bias_V = -target.normal(heads).float().abs(), target.normal(heads, 1)[:, 0].float()
    weights = DeltaWeights(shape, conv_WC, decay_V, dt_bias_V, norm_D)
    caches = [StateCache.allocate(8, shape, dtype, target.device) for dtype in (target.dtype, torch.float32)]
    done_S = np.zeros(num_sequences, dtype=np.int64)
    for counts in ((1, 5, 9, 64, 200), (1,) * 5, (4, 1, 8, 2, 30), (1,) * 5):
        done_S += counts
        qkvz_TX = target.normal(sum(counts), shape.num_channels + shape.num_outputs)
        ba_TX = target.normal(sum(counts), 2 * heads)
        step = AttentionInput(
            query_start_S1=np.append(0, np.cumsum(counts)).astype(np.int32),
            context_len_S=done_S.astype(np.int32),
            block_table_SM=np.zeros((num_sequences, 1), dtype=np.int32),
            slot_mapping_T=torch.zeros(sum(counts), dtype=torch.int64, device=target.device),
            block_size=1,
            state_slot_S=np.array([6, 0, 3, 7, 1]),
        )
        ours = kernels.delta_net(qkvz_TX, ba_TX, weights, EPS, caches[0], step)
        its = exact.delta_net(qkvz_TX.float(), ba_TX.float(), weights, EPS, caches[1], replace(step, plans={}))
        assert close(target, (ours, its)), counts


@TARGETS
@torch.inference_mode()
def test_captured_experts_serve_other_choices(target: Target) -> None:
    kernels = target.kernels()
    if target.device.type != "cuda":
        pytest.skip("captures need a card")
    layer = kernels.prepare_experts(random_experts("dense", 16, 512, 384), "silu", kernels.prepare_linear)
    x_TH, logits_TE = target.normal(33, 512), target.normal(33, 16)
    layer(x_TH, *kernels.route(logits_TE, Routing(2)))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = layer(x_TH, *kernels.route(logits_TE, Routing(2)))
    for _ in range(2):
        logits_TE.copy_(logits_TE.roll(3, dims=1))
        graph.replay()
        assert torch.equal(y_TH, layer(x_TH, *kernels.route(logits_TE, Routing(2))))


@TARGETS
@torch.inference_mode()
def test_linears_on_fp8(target: Target) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    if "fp8" not in kernels.rounded:
        pytest.skip("this card has no products of FP8")
    num_served = 0
    for name, weight in weights_of(target).items():
        ours, its = (each.rounded["fp8"].prepare(weight) for each in (kernels, exact))
        assert (ours is None) == (its is None)
        if ours is None or its is None:
            continue
        num_served += 1
        for tokens in target.tokens:
            x_TK = target.normal(tokens, weight.in_features)
            error = relative_error(ours(x_TK), its(x_TK.float()))
            assert error <= fp8_tolerance(target.dtype), (name, tokens)
    assert num_served > 0


@TARGETS
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (37, 896), (300, 4096)])
@torch.inference_mode()
def test_elementwise(target: Target, tokens: int, hidden: int) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    residual_TH = target.normal(tokens, hidden + 1)[:, 1:].contiguous()
    inputs = target.normal(tokens, hidden), residual_TH, target.normal(hidden)
    expected = exact.add_rms_norm(*(tensor.float() for tensor in inputs), EPS)  # the kernel may write into its inputs
    assert close(target, *zip(kernels.add_rms_norm(*inputs, EPS), expected))
    gate_up = target.normal(tokens, 2 * hidden)
    assert close(target, (kernels.gate_mul(gate_up, "silu"), exact.gate_mul(gate_up.float(), "silu")))


@TARGETS
@pytest.mark.parametrize("is_block", [True, False], ids=["blocks", "tokens"])
@pytest.mark.parametrize(("tokens", "inputs"), [(1, 4096), (37, 896), (300, 1408), (64, 14336)])
@torch.inference_mode()
def test_norms_and_silu_round_for_fp8_to_the_same_bits(
    target: Target, is_block: bool, tokens: int, inputs: int
) -> None:
    kernels, int4 = target.kernels(), random_int4(384, inputs, 128, torch.Generator().manual_seed(0))
    weight = random_fp8(384, inputs) if is_block else int4
    linear = kernels.rounded["fp8"].prepare(weight) if "fp8" in kernels.rounded else None
    before = linear
    if linear is None or not isinstance(before, InputKernels):
        pytest.skip("no kernel of this set rounds for the next linear")
    x_TH, weight_H = target.normal(tokens, inputs), target.normal(inputs)
    ours, apart = (each.add_rms_norm(x_TH.clone(), x_TH.clone(), weight_H, EPS) for each in (before, kernels))
    assert torch.equal(ours[1], apart[1])
    assert torch.equal(linear(ours[0]), linear(apart[0]))
    gate_up_T2F = target.normal(tokens, 2 * inputs)
    rounded_TF = before.gate_mul(gate_up_T2F, "silu")
    assert not isinstance(rounded_TF, torch.Tensor)
    assert torch.equal(linear(rounded_TF), linear(kernels.gate_mul(gate_up_T2F, "silu")))


@TARGETS
@pytest.mark.parametrize("rows", [1, 37, 300])
@torch.inference_mode()
def test_sampling(target: Target, rows: int) -> None:
    """The first of equal logits wins; rows with NaN or infinity are reported."""
    kernels, exact = target.kernels(), reference_kernels(torch.float32, torch.device("cpu"))
    logits_RV = target.normal(rows, 32_011).float().round(decimals=1)
    logits_RV[:: rows + 1, 7] = float("inf")
    logits_RV[1::5, -1] = float("nan")
    options_R4 = torch.tensor(DRAWS).repeat(-(-rows // len(DRAWS)), 1)[:rows].double()
    u_R1 = torch.rand(rows, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    sampling_params_5R = torch.cat([options_R4, u_R1], dim=1).T.contiguous()
    noise_RV = 3 * target.normal(rows, 32_012)[:, 1:].float()
    noise_RV[1::7, -1] = float("nan")
    for ours, its in (
        (kernels.greedy(logits_RV), exact.greedy(logits_RV.cpu())),
        (
            kernels.sample(noise_RV, sampling_params_5R.to(target.device)),
            exact.sample(noise_RV.cpu(), sampling_params_5R),
        ),
    ):
        finite_R = ours[1].cpu().bool()
        assert torch.equal(finite_R, its[1].bool())
        assert torch.equal(ours[0].cpu()[finite_R], its[0][finite_R])


@TARGETS
@pytest.mark.parametrize("with_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_attention(target: Target, name: str, with_fp8: bool) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    counts, contexts, shared = STEPS[name]
    for heads in target.heads:
        step = paged_step(counts, contexts, heads, target.dtype, target.device, with_fp8_cache=with_fp8, shared=shared)
        sinks_N = target.normal(heads.num_heads).float()
        for window, *softmax in ((None,), (48,), (None, 2.0, sinks_N), (48, 0.0, sinks_N)):
            params = replace(step.attn_metadata, plans={}), heads.head_dim**-0.5, window, *softmax
            ours = kernels.attention(step.q_TND, step.cache, *params)
            expected = exact.attention(step.q_TND.float(), step.cache, replace(params[0], plans={}), *params[1:])
            assert close(target, (ours, expected)), (heads, window)


@TARGETS
@pytest.mark.parametrize("with_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norms"])
@torch.inference_mode()
def test_keys_and_values_are_written(target: Target, with_norm: bool, with_fp8: bool) -> None:
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    counts, contexts, _ = STEPS["chunks with decoding"]
    for heads in target.heads:
        step = paged_step(counts, contexts, heads, target.dtype, target.device, with_fp8_cache=with_fp8)
        slots, wide = step.attn_metadata.slot_mapping_T, widened(step.cache)
        qkv_TMD = target.normal(len(slots), heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        angle_TD2 = target.normal(len(slots), heads.head_dim // 2).float()
        angles = angle_TD2.cos(), angle_TD2.sin()
        norms = (
            (target.normal(heads.head_dim), target.normal(heads.head_dim + 1)[1:].contiguous()) if with_norm else None
        )
        wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
        q_TND = kernels.norm_rope_write(qkv_TMD.clone(), *angles, norms, EPS, step.cache, slots)
        expected = exact.norm_rope_write(qkv_TMD.float(), *angles, wide_norms, EPS, wide, slots)
        assert close(target, (q_TND, expected))
        tolerance = FP8_CODE if with_fp8 else TOLERANCES[target.dtype]
        for ours, its in zip(widened(step.cache).tensors, wide.tensors):
            assert relative_error(ours, its) <= tolerance, heads


def test_errors_are_relative_and_never_pass_unseen() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.1, -4.0]), expected) == pytest.approx(0.1 / 4)
    for wrong in (torch.tensor([float("nan"), -4.0]), torch.tensor([1.0])):
        assert relative_error(wrong, expected) == float("inf")
