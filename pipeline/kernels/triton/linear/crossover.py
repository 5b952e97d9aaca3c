"""Up to how many tokens an int4 weight on a GPU goes through the fused product: by a model of the card. Imports no
triton.

The model counts what a multiprocessor does for a block of 128 inputs of a tile of outputs: bytes from memory, bytes
from the second-level cache (weights, and the tokens' inputs, which every tile reads again), issued instructions,
products, and the time of a program that waits for its own products. The slowest counts. The instructions are counted in
the compiled loop (`python -m tests.kernels.triton.compiling`); the other path is `roofline.cost_model`'s. Nothing of it
was measured on a card: `pipeline bench gpu` measures both paths and says the number that belongs into MEASURED."""

from dataclasses import dataclass
from functools import cache

from pipeline.roofline.cost_model import AWQ, Ceilings, DecoderSize, Reached, Weights, linear_seconds

_BLOCK = 128  # inputs
_SCHEDULERS = 4  # of a multiprocessor, each of which issues an instruction a clock
_WAIT = 150  # clocks of a barrier and of the first product, in which a program does nothing else
_JOIN_S = 2e-6  # of the launch that adds up parts
_MARGIN = 1.25  # by which the fused product must be ahead, as the model leaves out what nobody counted
_MOST = 1024  # tokens that are looked at
_REACHED = Reached(bandwidth=0.8, gemm=0.65)  # usual shares of cuBLAS and of copies
_LAYER = DecoderSize(4096, 14336, 32, 32, 8, 128, 128256)  # Llama-3-8B: the linears of its layer decide


@dataclass(frozen=True)
class Crossover:
    """The most tokens that the fused product takes. cached: where 16-bit weights lie ready; scratch: where they are
    written anew in each call."""

    cached: int
    scratch: int


@dataclass(frozen=True)
class FusedTile:
    """Of the fused product: instructions of a warp for a block of inputs, counted in the compiled loop with groups of
    128; programs of `warps` that are on a multiprocessor at once."""

    tokens: int
    outputs: int
    warps: int
    instructions: int
    programs: int


@dataclass(frozen=True)
class CardModel:
    """clock_hz: under load. cache_bytes: of the second-level cache for each clock and multiprocessor, assumed."""

    ceilings: Ceilings
    num_multiprocessors: int
    clock_hz: float
    cache_bytes: float
    tiles: tuple[FusedTile, ...]


def _ceilings(name: str, bytes_per_s: float, flops_per_s: float) -> Ceilings:
    return Ceilings(name, bytes_per_s, flops_per_s, 0.0, _REACHED)


MODELLED = {
    (8, 0): CardModel(
        _ceilings("A100 80GB", 2.039e12, 312e12), 108, 1.41e9, 32,
        (FusedTile(16, 64, 4, 299, 3), FusedTile(32, 64, 4, 376, 2), FusedTile(64, 64, 8, 507, 1)),
    ),
    (8, 9): CardModel(
        _ceilings("L40S", 0.864e12, 362e12), 142, 2.2e9, 16,
        (FusedTile(16, 64, 4, 299, 2), FusedTile(32, 64, 4, 376, 2), FusedTile(64, 64, 8, 505, 1)),
    ),
    (9, 0): CardModel(
        _ceilings("H100", 3.35e12, 989e12), 132, 1.755e9, 28,
        (FusedTile(16, 64, 4, 275, 3), FusedTile(32, 128, 8, 284, 2), FusedTile(64, 128, 8, 303, 1)),
    ),
}  # fmt: skip
"""By compute capability, the card of it that is rented most."""

MEASURED: dict[tuple[int, int], Crossover] = {}
"""What `pipeline bench gpu` said on a card. It takes precedence over the model."""


@cache
def crossover_of(capability: tuple[int, int]) -> Crossover:
    """For cards of this compute capability; of one that is not in the tables, for the next older one that is."""
    known = [each for each in sorted({*MODELLED, *MEASURED}) if each <= capability]
    nearest = known[-1] if known else min(MODELLED)
    return MEASURED.get(nearest) or Crossover(_modelled(nearest, cached=True), _modelled(nearest, cached=False))


def _modelled(capability: tuple[int, int], cached: bool) -> int:
    """The most tokens up to which a layer's fused products always take less, by `_MARGIN`, in steps of 32."""
    card, weights = MODELLED[capability], Weights(int4=True, cached=cached)
    path = "dense" if cached else "scratch"
    shapes = [(inputs, outputs) for _, inputs, outputs in _LAYER.linears()]
    for tokens in range(1, _MOST + 1):
        fused_s = _MARGIN * sum(fused_seconds(tokens, *shape, card) for shape in shapes)
        if fused_s > sum(linear_seconds(tokens, *shape, weights, card.ceilings)[path] for shape in shapes):
            return (tokens - 1) // 32 * 32
    return _MOST


def fused_seconds(num_tokens: int, inputs: int, outputs: int, card: CardModel) -> float:
    """Seconds of one fused product of a weight in groups of 128, its parts added."""
    tile = next((tile for tile in card.tiles if tile.tokens >= num_tokens), card.tiles[-1])
    clocks_per_s = card.num_multiprocessors * card.clock_hz
    weight_bytes = AWQ.packed_bytes * _BLOCK * tile.outputs
    memory = weight_bytes / (card.ceilings.bytes_per_s * _REACHED.bandwidth / clocks_per_s)
    cached = (weight_bytes + 2 * _BLOCK * tile.tokens) / card.cache_bytes
    issued = tile.instructions * tile.warps / _SCHEDULERS
    # A product of fewer than 32 tokens takes as long as one of 32: its time is that of reading the weights' side.
    products = 2 * _BLOCK * tile.outputs * max(tile.tokens, 32) / (card.ceilings.flops_per_s / clocks_per_s)
    alone = (tile.instructions + products + _WAIT) / tile.programs
    blocks = outputs / tile.outputs * inputs / _BLOCK * -(-num_tokens // tile.tokens)
    parts = min(inputs / (16 * tile.tokens), tile.programs * card.num_multiprocessors * tile.outputs / outputs)
    join_s = 0.0
    if parts > 1:  # 8 bytes a token and output, written and read
        join_s = _JOIN_S + 8 * num_tokens * outputs * parts / (card.cache_bytes * clocks_per_s)
    return blocks * max(memory, cached, issued, products, alone) / clocks_per_s + join_s
