"""Print what compiled expert layers should take on a card. Needs no GPU; nothing here was timed.

python -m tools.expert_kernels --card h200

Experts are chosen at random, each equally likely. Columns:

- tile: outputs x pairs of a program. instructions: of a warp, in the loop, for 128 inputs.
- bytes: time of reading the weights of the experts that some token chose, at the card's bandwidth. The floor of a step
  of few tokens.
- products: time of all products at the card's 16-bit rate, without those of empty columns of tiles.
- issue: time of issuing the loops' instructions, at 4 a clock and multiprocessor of 1.755 GHz.
- predicted: with the shares of the bandwidth and of the rate that the dense kernels reach (`roofline/shares.py`;
  quantized weights: those of int4), including empty columns of tiles, tensors between launches, and 2 us for each
  further launch.
"""

import argparse
import math
import sys
from dataclasses import dataclass

import torch

from pipeline.kernels.triton.experts.grouped_product import GroupedTile, tile_for
from pipeline.kernels.triton.experts.weights import GroupedWeights
from pipeline.kernels.triton.launch import A100, H100, CompileTarget, Launch
from pipeline.roofline.cards import Card, find_card
from pipeline.roofline.shares import MEASURED
from tests.kernels.triton.compiling import compile_for
from tests.kernels.triton.expert_launches import (
    GPT_OSS_20B,
    QWEN3_30B,
    ExpertShape,
    expert_launches,
    weights_of,
)

MODELS = (
    ("Qwen3-30B-A3B", QWEN3_30B, ("bf16", "int4", "fp8")),
    ("gpt-oss-20b", GPT_OSS_20B, ("mxfp4",)),
)
TOKENS = 1, 64, 512, 4096
LAUNCH_S = 2e-6
CLOCK_HZ = 1.755e9
COLUMNS = "model", "weights", "tokens", "tile", "instructions", "bytes", "products", "issue", "predicted"


@dataclass(frozen=True)
class Times:
    """Seconds of a product, or of a layer's experts: see the columns at the head of the file."""

    read: float
    products: float
    issue: float
    predicted: float

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.read + other.read,
            self.products + other.products,
            self.issue + other.issue,
            self.predicted + other.predicted,
        )


def tiles_of(num_tokens: int, shape: ExpertShape, tokens: int) -> float:
    """Return the expected number of tiles of `tokens` pairs. An expert's number of pairs is binomial."""
    share, expected = shape.top_k / shape.num_experts, 0.0
    for count in range(1, num_tokens + 1):
        log = math.lgamma(num_tokens + 1) - math.lgamma(count + 1) - math.lgamma(num_tokens - count + 1)
        if share < 1:
            log += count * math.log(share) + (num_tokens - count) * math.log1p(-share)
        expected += math.exp(log) * -(-count // tokens)
    return shape.num_experts * expected


def times_of(
    weights: GroupedWeights, instructions: int, tile: GroupedTile, num_tokens: int, shape: ExpertShape, card: Card
) -> Times:
    target = target_of(card)
    tiles, used = (tiles_of(num_tokens, shape, width) for width in (tile.tokens, num_tokens))
    read_bytes = used * weights.num_bytes / weights.num_experts
    flops_of_row = 2 * weights.num_outputs * weights.num_inputs
    flops = num_tokens * shape.top_k * flops_of_row
    programs = tiles * -(-weights.num_outputs // tile.outputs)
    issued = programs * tile.num_warps * instructions * -(-weights.num_inputs // 128)
    is_dense = weights.form == "dense"
    read_share = MEASURED.bandwidth * (1.0 if is_dense else MEASURED.int4_read)
    rate_share = MEASURED.gemm if is_dense else MEASURED.int4
    read, products = read_bytes / card.bandwidth_bytes_per_s, flops / card.bf16_flops
    with_empty = products * max(1.0, tiles * tile.tokens / (num_tokens * shape.top_k))
    return Times(
        read,
        products,
        issued / (4 * target.num_multiprocessors * CLOCK_HZ),
        max(read / read_share, with_empty / rate_share),
    )


def target_of(card: Card) -> CompileTarget:
    return H100 if card.compute_capability == (9, 0) else A100


def instructions_of(launch: Launch, target: CompileTarget) -> int:
    """Return the instructions of the loop for 128 inputs."""
    inputs = {"dense": launch.constants["DEPTH"], "int4": 256}.get(launch.constants["FORM"], 128)
    return round(len(compile_for(launch, target).loop()) * 128 / inputs)


def row_of(model: str, shape: ExpertShape, form: str, num_tokens: int, card: Card) -> list[str]:
    target = target_of(card)
    launches, total = expert_launches(shape, form, num_tokens, target), Times(0, 0, 0, 0)
    of_gate_up = list[str]()
    for name, weights in zip(("gate_up", "down"), weights_of(shape, form, target)):
        tile = tile_for(num_tokens * shape.top_k, weights, torch.bfloat16, target)
        instructions = instructions_of(launches[name], target)
        of_gate_up = of_gate_up or [f"{tile.outputs} x {tile.tokens}", str(instructions)]
        total += times_of(weights, instructions, tile, num_tokens, shape, card)
    # Inner activations and outputs of pairs, in 16 bits, written and read once.
    between_bytes = 2 * 2 * num_tokens * shape.top_k * (shape.width + shape.hidden)
    between_s = between_bytes / (card.bandwidth_bytes_per_s * MEASURED.bandwidth)
    short_launches = 2 if num_tokens == 1 else 4  # routing, memset and lists, sum
    predicted = total.predicted + between_s + short_launches * LAUNCH_S
    times = [f"{1e6 * each:,.0f}" for each in (total.read, total.products, total.issue, predicted)]
    return [model, form, f"{num_tokens:,}", *of_gate_up, *times]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--card", default="h200", help="name in hardware.yaml; sm_90 or sm_80")
    card = find_card(parser.parse_args(arguments).card)
    print(f"One layer's experts on one {card.name}, microseconds; not run on a card.\n")
    rows = [
        row_of(model, shape, form, num_tokens, card)
        for model, shape, forms in MODELS
        for form in forms
        for num_tokens in TOKENS
    ]
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
