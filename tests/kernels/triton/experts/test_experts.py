"""Routing and expert layers against plain torch, in each form of weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.engine.startup.memory import layer_bytes_on_gpu
from pipeline.kernels import experts, reference
from pipeline.kernels.experts import LoopedExperts
from pipeline.kernels.routing import Routing
from pipeline.kernels.triton.experts.grouped_product import grouped_launch, tile_for
from pipeline.kernels.triton.experts.layer import GroupedExperts, prepare_experts
from pipeline.kernels.triton.experts.pairs import Pairs, assign_launch, pairs_by_expert
from pipeline.kernels.triton.experts.route import route
from pipeline.kernels.triton.experts.weights import GroupedWeights
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.launch import A100, H100, CompileTarget
from pipeline.model.config import read_config
from pipeline.weights.packed import DenseWeight, ExpertWeights, Fp8Weight, select_inputs, select_outputs
from pipeline.weights.round_to_nearest import RoundToNearest
from tests.kernels.experts import FORMS, random_experts, random_linear
from tests.kernels.triton import problems
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT, TYPES, recorded_launches
from tests.model_folders import small_config

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of empty columns in the interpreter


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def random_route(num_tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return experts.route(3 * normal(num_tokens, num_experts), Routing(top_k))


def prepared(weights: ExpertWeights, dtype: torch.dtype, activation: str = "silu", **options: bool) -> GroupedExperts:
    return prepare_experts(weights, activation, dtype, DEVICE, **options)


def oracle(
    weights: ExpertWeights, x_TH: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], activation: str = "silu"
) -> torch.Tensor:
    looped = LoopedExperts(
        weights,
        activation,
        lambda weight: reference.prepare_linear(weight, torch.float32, CPU),
        reference.gate_mul,
    )
    return looped(x_TH.float().cpu(), *routed)


def error_of(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float().cpu() - exact).abs().max() / exact.abs().max())


# -- routing

ROUTINGS = [
    Routing(8),
    Routing(1, renormalize=False),
    Routing(4, "sigmoid", scale=2.5),
    Routing(2, "sigmoid", num_groups=2, top_groups=1),
]


@pytest.mark.parametrize("num_experts", [8, 60, 128])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias of choice"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_route(num_experts: int, routing: Routing, with_bias: bool, dtype: torch.dtype) -> None:
    bias_E = normal(num_experts) if with_bias else None
    for num_tokens in (0, 1, 7):
        logits_TE = normal(num_tokens, num_experts + 1).to(dtype)[:, :num_experts]
        expert_TA, weight_TA = experts.route(logits_TE, routing, bias_E)
        found = route(logits_TE.to(DEVICE), routing, None if bias_E is None else bias_E.to(DEVICE))
        assert (found[0].dtype, found[1].dtype) == (torch.int64, torch.float32)
        ours, order = found[0].cpu().sort(dim=1)
        assert torch.equal(ours, expert_TA.sort(dim=1).values)
        in_order = weight_TA.gather(1, expert_TA.argsort(dim=1))
        assert torch.allclose(found[1].cpu().gather(1, order), in_order, rtol=2e-6, atol=1e-9)


def test_equal_scores_choose_the_first_experts() -> None:
    expert_TA, weight_TA = route(torch.zeros(2, 12, device=DEVICE), Routing(3))
    assert expert_TA.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weight_TA, torch.tensor(1 / 3))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_different_and_weights_not_finite_for_logits_that_are_not(scoring: str) -> None:
    """The lists of pairs have room for each token once per expert."""
    logits_TE = torch.zeros(3, 12, device=DEVICE)
    logits_TE[0], logits_TE[1, 3] = float("nan"), float("nan")
    bias_E = torch.full((12,), float("-inf"), device=DEVICE)
    expert_TA, weight_TA = route(logits_TE, Routing(8, scoring), bias_E)
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 12 for row in expert_TA.tolist())
    assert bool(weight_TA[0].isnan().all())
    assert bool(weight_TA[2].isfinite().all())


# -- expert layers


@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights(form: str, dtype: torch.dtype) -> None:
    """Outputs and inputs of both linears end within a tile."""
    hidden, width = (160, 96) if form in ("dense", "fp8, outputs", "mxfp4", "nvfp4") else (384, 128)
    if form == "int4, groups of 32":
        hidden, width = 288, 160
    weights = random_experts(form, 5, hidden, width, has_bias=True)
    layer = prepared(weights, dtype)
    for num_tokens in (1, 7):
        x_TH, routed = normal(num_tokens, hidden).to(DEVICE, dtype), random_route(num_tokens, 5, 2)
        ours = layer(x_TH, *(each.to(DEVICE) for each in routed))
        assert ours.dtype == dtype
        assert error_of(ours, oracle(weights, x_TH, routed)) < 2 * PRODUCT[dtype], num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (2, 3, 2), (33, 1, 1), (33, 60, 8), (150, 3, 2)]
)
@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_shapes_of_steps(num_tokens: int, num_experts: int, top_k: int, activation: str) -> None:
    weights = random_experts("dense", num_experts, 24, 20)
    x_TH, routed = 6 * normal(num_tokens, 24).to(DEVICE), random_route(num_tokens, num_experts, top_k)
    ours = prepared(weights, torch.float32, activation)(x_TH, *(each.to(DEVICE) for each in routed))
    assert error_of(ours, oracle(weights, x_TH, routed, activation)) < 2 * PRODUCT[torch.float32]


def test_one_expert_of_many_has_all_tokens_and_rows_may_lie_apart() -> None:
    weights, x_TH = random_experts("dense", 8, 24, 20), normal(40, 48).to(DEVICE)[:, :24]
    expert_TA = torch.tensor([[5, 2]] * 39 + [[5, 7]])
    routed = expert_TA, torch.rand(40, 2)
    ours = prepared(weights, torch.float32)(x_TH, *(each.to(DEVICE) for each in routed))
    assert error_of(ours, oracle(weights, x_TH, routed)) < 2 * PRODUCT[torch.float32]
    assert prepared(weights, torch.float32)(x_TH[:0], expert_TA[:0], routed[1][:0]).shape == (0, 24)


def test_a_nan_stays_in_its_token() -> None:
    weights, routed = random_experts("mxfp4", 3, 64, 32), random_route(9, 3, 2)
    layer, x_TH = prepared(weights, torch.float32, "clamped_swiglu"), normal(9, 64).to(DEVICE)
    clean = layer(x_TH, *routed)
    x_TH[4, 7] = float("nan")
    broken = layer(x_TH, *routed)
    assert broken[4].isnan().all()
    assert torch.equal(broken[torch.arange(9) != 4], clean[torch.arange(9) != 4])


@DTYPES
@pytest.mark.parametrize("adjacent", [A100, H100], ids=["adjacent inputs of mma", "of wgmma"])
@pytest.mark.parametrize("form", ["fp8, blocks", "mxfp4", "nvfp4"])
def test_codes_of_small_floats_convert_exactly(form: str, adjacent: CompileTarget, dtype: torch.dtype) -> None:
    """The product with the unit matrix is the dequantized weight: all codes, subnormal ones included."""
    random = torch.Generator().manual_seed(1)
    weight = random_linear(form, 32, 256, False, random)
    if isinstance(weight, Fp8Weight):
        codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
        codes[:, [0x7F, 0xFF]] = 0
        weight = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.full((1, 2), 0.25), weight.block)
    stacked = GroupedWeights.stack([weight], dtype, DEVICE, adjacent)
    assert stacked is not None
    x_TK, out_TN = torch.eye(256, device=DEVICE, dtype=dtype), torch.empty(256, 32, device=DEVICE, dtype=dtype)
    pairs = pairs_by_expert(torch.zeros(256, 1, dtype=torch.int64, device=DEVICE), 1)
    grouped_launch(x_TK, stacked, pairs, 1, out_TN, CompileTarget.from_device(DEVICE)).run()
    assert torch.equal(out_TN.t().cpu(), weight.dequantize(dtype))


def test_pairs_without_an_expert_are_not_computed() -> None:
    """Rows without an adapter have none."""
    weights = [DenseWeight(normal(20, 24 + each)[:, :24].contiguous()) for each in range(3)]
    stacked = GroupedWeights.stack(weights, torch.float32, DEVICE, CompileTarget.from_device(DEVICE))
    assert stacked is not None
    for adapter_T in ([2, -1, 0, 2, -1], [-1], [1]):
        x_TK, out_TN = normal(len(adapter_T), 24).to(DEVICE), torch.zeros(len(adapter_T), 20, device=DEVICE)
        pairs = pairs_by_expert(torch.tensor(adapter_T, device=DEVICE)[:, None], 3)
        grouped_launch(x_TK, stacked, pairs, 1, out_TN, CompileTarget.from_device(DEVICE)).run()
        exact = [x @ weights[e].weight_NK.t() if e >= 0 else torch.zeros(20) for e, x in zip(adapter_T, x_TK.cpu())]
        assert torch.allclose(out_TN.cpu(), torch.stack(exact), atol=1e-5)


def test_lists_hold_each_pair_once_and_tiles_end_with_them() -> None:
    """Nothing is written before the first list, and what follows a list's end is not read."""
    expert_P = torch.tensor([2, 0, -1, 2, 2, -1, 0], device=DEVICE)
    count_E = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    pair_ET = torch.ones(4, 7, dtype=torch.int32, device=DEVICE)
    pairs = Pairs(expert_P, 3, count_E[1:], pair_ET[1:])
    assign_launch(pairs).run()
    assert count_E.tolist() == [0, 2, 0, 3]
    assert [sorted(row) for row in pair_ET.tolist()] == [[1] * 7, [1, 1, 1, 1, 1, 1, 6], [1] * 7, [0, 1, 1, 1, 1, 3, 4]]
    weights = [DenseWeight(torch.full((20, 24), float(1 + each))) for each in range(3)]
    target = CompileTarget.from_device(DEVICE)
    stacked = GroupedWeights.stack(weights, torch.float32, DEVICE, target)
    assert stacked is not None
    out_PN = torch.zeros(7, 20, device=DEVICE)
    grouped_launch(torch.ones(7, 24, device=DEVICE), stacked, pairs, 1, out_PN, target).run()
    assert out_PN[:, 7].tolist() == [72.0, 24.0, 0.0, 72.0, 72.0, 0.0, 24.0]


def test_torchs_grouped_product_agrees() -> None:
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None:
        pytest.skip("torch before 2.10 has no grouped_mm")
    weights = [DenseWeight(normal(16 + each, 32)[:16].bfloat16()) for each in range(4)]
    counts = [3, 0, 9, 4]
    expert_T1 = torch.arange(4).repeat_interleave(torch.tensor(counts))[:, None]
    x_TK = normal(16, 32).bfloat16()
    weight_EKN = torch.stack([each.weight_NK.t() for each in weights])
    theirs = grouped_mm(x_TK, weight_EKN, offs=torch.tensor(counts).cumsum(0).int())
    target = CompileTarget.from_device(DEVICE)
    stacked = GroupedWeights.stack(weights, torch.float32, DEVICE, target)
    assert stacked is not None
    out_TN = torch.empty(16, 16, device=DEVICE)
    pairs = pairs_by_expert(expert_T1.to(DEVICE), 4)
    grouped_launch(x_TK.float().to(DEVICE), stacked, pairs, 1, out_TN, target).run()
    assert error_of(theirs, out_TN.cpu()) < PRODUCT[torch.bfloat16]


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("int4, groups of 32", {"input_order_K": torch.arange(64)}),
        ("int4, groups of 32", {"bits": 8}),
        ("fp8, blocks", {"block": (32, 32), "scales_RG": torch.rand(2, 2)}),
        ("fp8, blocks", {"value_NK": torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)}),
        ("mxfp4", {"codebook_C": torch.arange(16.0)}),
        ("mxfp4", {"scales_NG": torch.full((64, 2), 4.0)}),
        ("mxfp4", {"group_size": 64, "scales_NG": torch.ones(64, 1)}),
    ],
    ids=["order of inputs", "8 bits", "small blocks", "NaN", "another codebook", "large scales", "groups of 64"],
)
def test_unsupported_weights_are_widened(form: str, change: dict) -> None:
    weights = random_experts(form, 2, 64, 64)
    assert prepared(weights, torch.float32).down.form != "dense"
    dense, x_TH, routed = random_experts("dense", 2, 64, 64).down, normal(5, 64), random_route(5, 2, 1)
    for down in (tuple(replace(each, **change) for each in weights.down), (weights.down[0], dense[1])):
        changed = replace(weights, down=down)
        layer = prepared(changed, torch.float32)
        assert layer.down.form == "dense"
        found = layer(x_TH.to(DEVICE), *(each.to(DEVICE) for each in routed)).cpu()
        torch.testing.assert_close(found, oracle(changed, x_TH, routed), rtol=1e-4, atol=1e-4, equal_nan=True)


# -- steps


@pytest.mark.parametrize("form", ["dense", "int4, groups of 32", "mxfp4"])
def test_a_token_is_independent_of_its_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems.make_dots_ordered(monkeypatch)
    weights, routed = random_experts(form, 3, 160, 64), random_route(70, 3, 2)
    layer, x_TH = prepared(weights, torch.float32, deterministic=True), normal(70, 160).to(DEVICE)
    whole = layer(x_TH, *(each.to(DEVICE) for each in routed))
    for rows in (slice(0, 1), slice(3, 10), slice(2, 70)):
        assert torch.equal(layer(x_TH[rows], *(each[rows].to(DEVICE) for each in routed)), whole[rows])


def test_one_tile_for_any_number_of_tokens() -> None:
    weights = GroupedWeights.stack(random_experts("dense", 4, 32, 16).down, torch.float16, CPU, H100)
    assert weights is not None
    sizes = 1, 4, 64, 200, 5000
    assert len({tile_for(size, weights, torch.bfloat16, H100, is_fixed=True) for size in sizes}) == 1
    assert [tile_for(size, weights, torch.bfloat16, H100).tokens for size in sizes] == [16, 16, 32, 128, 128]


def test_launches_depend_on_the_number_of_tokens_alone() -> None:
    """A captured graph replays them for any choice of experts."""
    layer = prepared(random_experts("dense", 8, 24, 20), torch.float32)
    shapes = []
    for expert_TA in (torch.arange(24).view(12, 2) % 8, torch.tensor([[0, 1]] * 12)):
        with recorded_launches() as launches:
            layer(normal(12, 24).to(DEVICE), expert_TA.to(DEVICE), torch.ones(12, 2, device=DEVICE))
        shapes.append([(launch.kernel.__name__, launch.grid, dict(launch.constants)) for launch in launches])
    assert [name for name, *_ in shapes[0]] == ["_assign", "_multiply_grouped", "_multiply_grouped", "_combine"]
    assert shapes[0] == shapes[1]
    with recorded_launches() as launches:
        layer(normal(1, 24).to(DEVICE), torch.tensor([[3, 1]], device=DEVICE), torch.ones(1, 2, device=DEVICE))
    assert len(launches) == 3, "one token needs no lists"


@pytest.mark.parametrize(("block", "num_ranks"), [(128, 1), (128, 2), (128, 3), (64, 1)])
def test_memory_of_fp8_experts_is_planned_as_they_are_packed(block: int, num_ranks: int, tmp_path: Path) -> None:
    """Products read blocks of 128 inputs. Half of three blocks ends within one."""
    values = {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 384,
              "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small_config(128, 384, 1, 6, 6, head_dim=16) | values))
    config = read_config(tmp_path)

    def random(outputs: int, inputs: int) -> Fp8Weight:
        scales_RG = normal(outputs // block, inputs // block)
        return Fp8Weight(normal(outputs, inputs).to(torch.float8_e4m3fn), scales_RG, (block, block))

    width, local = 384 // num_ranks, config.local(num_ranks)
    gate_up = select_outputs(random(768, 128), torch.arange(2 * width))
    down = select_inputs(random(128, 384), 0, width)
    packed = prepared(ExpertWeights((gate_up,) * 2, (down,) * 2), torch.float16)
    linears = sum(rows * inputs for parts in local.linears(0).values() for _, rows, inputs in parts)
    (planned,) = layer_bytes_on_gpu(local, torch.float16)
    linears *= 2 if block == 64 else 1 + 4 / 128
    assert planned == pytest.approx(linears + packed.gate_up.num_bytes + packed.down.num_bytes, abs=1)


def test_memory_of_experts_that_are_quantized_on_load_has_their_groups(tmp_path: Path) -> None:
    """Inputs that 128 does not divide, as in gpt-oss, have groups of 64 and are padded."""
    values = {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(small_config(192, 384, 1, 6, 6, head_dim=16) | values))
    rounding = RoundToNearest("int4-rtn")
    config = replace(read_config(tmp_path), quantization=rounding)
    gate_up, down = (rounding.quantize(DenseWeight(normal(rows, 192), None), "w") for rows in (384, 192))
    packed = prepared(ExpertWeights((gate_up,) * 2, (down,) * 2), torch.float16)
    linears = sum(rows * inputs for parts in config.linears(0).values() for _, rows, inputs in parts)
    (planned,) = layer_bytes_on_gpu(config, torch.float16)
    experts = packed.gate_up.num_bytes + packed.down.num_bytes
    assert planned == pytest.approx(linears * (0.5 + 8 / 128) + experts, abs=1)


def test_the_kernel_set_routes_and_prepares_experts() -> None:
    for deterministic in (False, True):
        kernels = triton_kernels(torch.float32, DEVICE, deterministic=deterministic)
        assert kernels.route is route
        layer = kernels.prepare_experts(random_experts("dense", 2, 8, 8), "silu", kernels.prepare_linear)
        assert isinstance(layer, GroupedExperts)
        assert layer.is_fixed == deterministic
