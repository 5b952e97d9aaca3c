"""The least time of a step that a card's memory and matrix units allow.

A step's weights have to be read once, the keys and values of its contexts once, and its products computed; each
operation takes the longer of its reading and its computing, one operation after the other. Not in it: norms, rotations
and gating (their tensors may stay in the card's cache), the embedding's rows, the choice of tokens. With all shares of
`Reached` 1 the result is a bound that nothing beats; with shares measured on the card it is a prediction.

S: sequences of a step.
"""

from dataclasses import dataclass, field, fields

import numpy as np

DENSE_BYTES = 2.0  # of a weight or activation in 16 bit


@dataclass(frozen=True)
class DecoderSize:
    """The sizes of a decoder that its cost follows from."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def linears(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of a layer's linears as they are run: q, k and v are one, gate and up are one."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", self.hidden, q + 2 * kv),
            ("o", q, self.hidden),
            ("gate_up", self.hidden, 2 * self.intermediate),
            ("down", self.intermediate, self.hidden),
        ]

    @property
    def linear_parameters(self) -> int:
        """Of all layers; embeddings, norms and biases left out."""
        return self.layers * sum(inputs * outputs for _, inputs, outputs in self.linears())

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    def kv_bytes_per_token(self, value_bytes: float = DENSE_BYTES) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


@dataclass(frozen=True)
class Weights:
    """How the layers' linears are kept. The head stays in 16 bit.

    int4: 4-bit integers in groups of `group_size`, each with a 16-bit scale and a 4-bit zero point. A step then takes,
    linear by linear, the fused int4 product or the product of 16-bit weights, whichever is faster; those are kept
    beside the int4 ones where `cached`, else made anew for each use.
    """

    int4: bool
    group_size: int = 128
    cached: bool = True

    @property
    def packed_bytes(self) -> float:
        """Of one int4 weight with its part of the scale and of the zero point."""
        return 0.5 + (2.0 + 0.5) / self.group_size

    def resident_bytes(self, size: DecoderSize) -> float:
        """What the linears, the embedding and the head take of the card's memory (tied ones counted once each)."""
        each = DENSE_BYTES if not self.int4 else self.packed_bytes + (DENSE_BYTES if self.cached else 0.0)
        return size.linear_parameters * each + 2 * size.head_parameters * DENSE_BYTES


DENSE = Weights(int4=False)
AWQ = Weights(int4=True)


@dataclass(frozen=True)
class Reached:
    """Shares of the card's figures that kernels reach, and what starts them costs. The default is the bound.

    bandwidth: of reading weights and of dequantizing. kv: of the bandwidth, reading keys and values. gemm, int4,
    attention: of the matrix rate, by 16-bit products, fused int4 products, and attention. step_s: of each step, in
    which the card waits for the host or for kernels to start.
    """

    bandwidth: float = 1.0
    kv: float = 1.0
    gemm: float = 1.0
    int4: float = 1.0
    attention: float = 1.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Ceilings:
    """What a card can do. bytes_per_s: memory read or written; flops_per_s: dense 16-bit products with wide sums."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    reached: Reached = field(default_factory=Reached)


@dataclass(frozen=True)
class StepTokens:
    """Sequence s computes the last count_S[s] tokens of its context of context_S[s]; num_rows of all want logits."""

    count_S: np.ndarray
    context_S: np.ndarray
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return int(self.count_S.sum())

    @property
    def seen_keys(self) -> float:
        """Pairs of a query and a key it sees, which are as many in every head and layer."""
        count_S, context_S = self.count_S.astype(np.float64), self.context_S.astype(np.float64)
        return float((count_S * context_S - count_S * (count_S - 1) / 2).sum())


@dataclass(frozen=True)
class StepSeconds:
    """Where a step's time goes. attention_s is its products, kv_s reading its keys and values; they overlap."""

    linears_s: float = 0.0
    attention_s: float = 0.0
    kv_s: float = 0.0
    head_s: float = 0.0
    launch_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.linears_s + max(self.attention_s, self.kv_s) + self.head_s + self.launch_s

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        return StepSeconds(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def linear_seconds(num_tokens: int, inputs: int, outputs: int, weights: Weights, card: Ceilings) -> dict[str, float]:
    """Seconds of one linear by each path that its weights allow: `dense`, `int4` or `scratch`.

    scratch: the 16-bit weights are written from the int4 ones and read again.
    """
    parameters, reached = inputs * outputs, card.reached
    flops, bytes_per_s = 2.0 * num_tokens * parameters, card.bytes_per_s * reached.bandwidth
    dense_s = max(DENSE_BYTES * parameters / bytes_per_s, flops / (card.flops_per_s * reached.gemm))
    if not weights.int4:
        return {"dense": dense_s}
    packed = weights.packed_bytes * parameters
    int4_s = max(packed / bytes_per_s, flops / (card.flops_per_s * reached.int4))
    if weights.cached:
        return {"int4": int4_s, "dense": dense_s}
    return {"int4": int4_s, "scratch": dense_s + (packed + DENSE_BYTES * parameters) / bytes_per_s}


def step_seconds(
    step: StepTokens, size: DecoderSize, weights: Weights, card: Ceilings, kv_value_bytes: float = DENSE_BYTES
) -> StepSeconds:
    """The least time of a step on a card; kv_value_bytes: of one number in the KV cache (1 in fp8).

    Of a layer's keys and values, each context's are read once, whatever the number of its queries, and those of the
    step's tokens written.
    """
    reached, num_tokens = card.reached, step.num_tokens
    linears_s = size.layers * sum(
        min(linear_seconds(num_tokens, inputs, outputs, weights, card).values())
        for _, inputs, outputs in size.linears()
    )
    attention_flops = 4.0 * size.layers * size.heads * size.head_dim * step.seen_keys
    kv_bytes = size.kv_bytes_per_token(kv_value_bytes) * (float(step.context_S.sum()) + num_tokens)
    head_s = 0.0
    if step.num_rows:
        head_s = linear_seconds(step.num_rows, size.hidden, size.vocab, DENSE, card)["dense"]
    return StepSeconds(
        linears_s=linears_s,
        attention_s=attention_flops / (card.flops_per_s * reached.attention),
        kv_s=kv_bytes / (card.bytes_per_s * reached.kv),
        head_s=head_s,
        launch_s=reached.step_s,
    )


def crossover(size: DecoderSize, weights: Weights, card: Ceilings, most: int = 8192) -> int | None:
    """The fewest tokens at which a layer's 16-bit products are faster than its int4 ones; None: not up to `most`."""

    def dense_wins(num_tokens: int) -> bool:
        paths = [linear_seconds(num_tokens, k, n, weights, card) for _, k, n in size.linears()]
        other = "dense" if weights.cached else "scratch"
        return sum(path[other] for path in paths) < sum(path["int4"] for path in paths)

    if not weights.int4 or not dense_wins(most):
        return None
    low, high = 0, most  # int4's lead falls from the fewest tokens on
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if dense_wins(middle) else (middle, high)
    return high
