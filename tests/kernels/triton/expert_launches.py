"""Launches of expert layers and of adapters on tensors without memory: compiling them needs no GPU."""

from dataclasses import dataclass

import torch

from pipeline.kernels.adapters import LowRankUpdate
from pipeline.kernels.routing import Routing
from pipeline.kernels.triton.experts.grouped_product import grouped_launch
from pipeline.kernels.triton.experts.pairs import Pairs, assign_launch, combine_launch
from pipeline.kernels.triton.experts.route import route_launch
from pipeline.kernels.triton.experts.weights import GroupedWeights
from pipeline.kernels.triton.launch import CompileTarget, Launch
from pipeline.kernels.triton.linear.int4 import BLOCK, CHUNK, adjacent_inputs
from pipeline.kernels.triton.lora import GroupedLora

_META = torch.device("meta")


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a layer of experts. top_k: experts of a token. width: between up and down."""

    hidden: int
    width: int
    num_experts: int
    top_k: int
    layers: int
    activation: str = "silu"
    has_bias: bool = False


QWEN3_30B = ExpertShape(2048, 768, 128, 8, 48)
GPT_OSS_20B = ExpertShape(2880, 2880, 32, 4, 24, "clamped_swiglu", has_bias=True)
FORMS = {  # form, inputs that share a scale, type of the scales
    "bf16": ("dense", BLOCK, None),
    "int4": ("int4", 128, torch.float16),
    "fp8": ("e4m3", BLOCK, torch.float32),
    "mxfp4": ("e2m1", 32, torch.bfloat16),
    "nvfp4": ("e2m1", 16, torch.float32),
}


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=_META)


def weights_of(shape: ExpertShape, name: str, target: CompileTarget) -> tuple[GroupedWeights, GroupedWeights]:
    """Return gate and up, and down."""
    form, group, scale_type = FORMS[name]
    found = []
    for num_outputs, num_inputs in ((2 * shape.width, shape.hidden), (shape.hidden, shape.width)):
        blocks, chunks = -(-num_inputs // BLOCK), -(-num_inputs // CHUNK)
        value, scales = (num_outputs, num_inputs), tuple[int, ...]()
        if form == "int4":
            value, scales = (2 * chunks, num_outputs, 16), (chunks, num_outputs, CHUNK // group, 2)
        elif form == "e4m3":
            value, scales = (blocks, num_outputs, 32), (blocks, num_outputs)
        elif form == "e2m1":
            value, scales = (blocks, num_outputs, 16), (blocks, num_outputs, BLOCK // group)
        value_type = torch.bfloat16 if form == "dense" else torch.int32
        found.append(
            GroupedWeights(
                form,
                empty(shape.num_experts, *value, dtype=value_type),
                None if scale_type is None else empty(shape.num_experts, *scales, dtype=scale_type),
                empty(shape.num_experts, num_outputs) if shape.has_bias else None,
                num_outputs,
                num_inputs,
                group,
                adjacent_inputs(target),
            )
        )
    return found[0], found[1]


def expert_launches(shape: ExpertShape, form: str, num_tokens: int, target: CompileTarget) -> dict[str, Launch]:
    """Return the launches of a layer's routing and experts by name."""
    gate_up, down = weights_of(shape, form, target)
    num_pairs = num_tokens * shape.top_k
    expert_TA = empty(num_tokens, shape.top_k, dtype=torch.int64)
    weight_TA = empty(num_tokens, shape.top_k, dtype=torch.float32)
    lists = empty(shape.num_experts, dtype=torch.int32), empty(shape.num_experts, num_tokens, dtype=torch.int32)
    pairs = Pairs(expert_TA.flatten(), shape.num_experts, *(lists if num_tokens > 1 else ()))
    x_TH, up_PF, y_PH = empty(num_tokens, shape.hidden), empty(num_pairs, shape.width), empty(num_pairs, shape.hidden)
    logits_TE = empty(num_tokens, shape.num_experts)
    found = {"route": route_launch(logits_TE, Routing(shape.top_k), None, expert_TA, weight_TA)}
    if num_tokens > 1:
        found["assign"] = assign_launch(pairs)
    products = {
        "gate_up": grouped_launch(x_TH, gate_up, pairs, shape.top_k, up_PF, target, shape.activation),
        "down": grouped_launch(up_PF, down, pairs, 1, y_PH, target),
    }
    return found | products | {"combine": combine_launch(y_PH, weight_TA, x_TH)}


def lora_launches(
    num_adapters: int, rank: int, num_outputs: int, num_inputs: int, num_tokens: int, target: CompileTarget
) -> tuple[Launch, Launch]:
    """Return the products by A and by B of a linear's adapters."""
    update = LowRankUpdate(empty(rank, num_inputs), empty(num_outputs, rank))
    lists = empty(num_adapters, dtype=torch.int32), empty(num_adapters, num_tokens, dtype=torch.int32)
    pairs = Pairs(empty(num_tokens, dtype=torch.int64), num_adapters, *(lists if num_tokens > 1 else ()))
    lora = GroupedLora([update] * num_adapters, torch.bfloat16, _META, target)
    return lora.launches(empty(num_tokens, num_outputs), empty(num_tokens, num_inputs), pairs)
