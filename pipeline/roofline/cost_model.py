"""Minimum time of a step that a card's memory and matrix units allow.

A step must read its weights once and the keys and values of its contexts once, and compute its products. Each operation
takes the longer of reading and computing, one operation after the other. Not included: norms, rotations and gating
(their tensors may stay in the card's cache), the embedding's rows, and sampling. If all shares of `Reached` are 1, the
result is a lower bound; with the shares of `shares.py` it is a prediction.

The cards of a group compute each layer together: each reads and computes its share (`DecoderSize.local`). The exchanges
of `exchanges.py` are added.

S: sequences of a step.
"""

from collections import Counter
from dataclasses import dataclass, field, fields, replace

import numpy as np

from pipeline.errors import ConfigError
from pipeline.roofline.cards import Card
from pipeline.roofline.exchanges import Link, exchange_seconds, step_exchanges

DENSE_BYTES = 2.0  # per weight or activation in 16 bits
SCALE_BYTES = 4.0  # per vector in an fp8 KV cache, or per group of fp8 weights


@dataclass(frozen=True)
class ExpertSize:
    """Experts of `layers` of a decoder's layers: feed-forwards of `width`, `top_k` of them for each token.

    shared_width: of an expert that computes all tokens; 0: none.
    """

    layers: int
    num_experts: int
    top_k: int
    width: int
    shared_width: int = 0

    def used(self, num_tokens: float) -> float:
        """Return the expected number of experts of a layer that compute some of these tokens, if all are equally
        likely."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True)
class DeltaSize:
    """Gated DeltaNet layers of a decoder. qkvz, ba: outputs of their input linears. state_bytes: of a sequence, in each
    of them."""

    layers: int
    qkvz: int
    ba: int
    outputs: int
    state_bytes: int


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder that determine its cost. windows: keys that a query of each layer sees; None: all.
    kv_heads_and_dims: of each layer, if they differ from `kv_heads` and `head_dim` in some. experts: None: all layers
    have one feed-forward of `intermediate`. delta: layers in which a state replaces attention. output_gate: q's linear
    also computes a gate of attention."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_gated: bool = True
    windows: tuple[int | None, ...] = ()
    kv_heads_and_dims: tuple[tuple[int, int], ...] = ()
    experts: ExpertSize | None = None
    delta: DeltaSize | None = None
    output_gate: bool = False

    def local(self, num_cards: int) -> "DecoderSize":
        """Return the share of each card of a group: heads, widths of feed-forwards and experts, and vocabulary are
        divided, rounded up. Fewer KV heads than cards are replicated."""
        if num_cards == 1:
            return self

        def share(whole: int) -> int:
            return -(-whole // num_cards)

        experts = self.experts
        if experts is not None:
            experts = replace(experts, width=share(experts.width), shared_width=share(experts.shared_width))
        return replace(
            self,
            intermediate=share(self.intermediate),
            heads=share(self.heads),
            kv_heads=share(self.kv_heads),
            vocab=share(self.vocab),
            kv_heads_and_dims=tuple((share(kv_heads), head_dim) for kv_heads, head_dim in self.kv_heads_and_dims),
            experts=experts,
        )

    def linears(self) -> list[tuple[str, int, int]]:
        """Return name, inputs and outputs of the linears of a layer without experts as they are run: q, k, v fused, and
        gate, up fused."""
        return [*self._around_attention(self.kv_heads, self.head_dim), *self.feed_forward(self.intermediate)]

    def _around_attention(self, kv_heads: int, head_dim: int) -> list[tuple[str, int, int]]:
        q, kv = self.heads * head_dim, kv_heads * head_dim
        return [("qkv", self.hidden, q * (1 + self.output_gate) + 2 * kv), ("o", q, self.hidden)]

    @property
    def attention_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and size of the heads of each layer with attention."""
        layers = self.layers - (0 if self.delta is None else self.delta.layers)
        return self.kv_heads_and_dims or ((self.kv_heads, self.head_dim),) * layers

    def feed_forward(self, width: int) -> list[tuple[str, int, int]]:
        """Return the linears of a feed-forward."""
        return [("gate_up", self.hidden, (1 + self.is_gated) * width), ("down", width, self.hidden)]

    def linear_counts(self) -> list[tuple[int, int, int]]:
        """Return inputs, outputs and number of the linears that compute all tokens: all but those of experts."""
        shapes = Counter(self.attention_shapes)
        counted = [(each, layers) for shape, layers in shapes.items() for each in self._around_attention(*shape)]
        if (delta := self.delta) is not None:
            around = ("qkvz", self.hidden, delta.qkvz), ("ba", self.hidden, delta.ba), ("o", delta.outputs, self.hidden)
            counted += [(each, delta.layers) for each in around]
        feed_forward, experts = self.feed_forward(self.intermediate), self.experts
        if experts is None:
            counted += [(each, self.layers) for each in feed_forward]
        else:
            shared = self.feed_forward(experts.shared_width) if experts.shared_width else []
            counted += [(each, self.layers - experts.layers) for each in feed_forward]
            counted += [(each, experts.layers) for each in (*shared, ("router", self.hidden, experts.num_experts))]
        return [(inputs, outputs, count) for (_, inputs, outputs), count in counted]

    @property
    def expert_parameters(self) -> int:
        """Parameters of all layers' experts, without shared ones."""
        return 0 if self.experts is None else int(self._expert_parameters(self.experts.num_experts))

    @property
    def active_expert_parameters(self) -> int:
        """Parameters of experts that compute a token, without shared ones."""
        return 0 if self.experts is None else int(self._expert_parameters(self.experts.top_k))

    def read_parameters(self, num_tokens: float) -> tuple[float, float]:
        """Return the parameters of linears that a step reads: those that compute all tokens, and the experts'."""
        read = 0.0 if self.experts is None else self._expert_parameters(self.experts.used(num_tokens))
        return float(self.linear_parameters - self.expert_parameters), read

    def _expert_parameters(self, num_experts: float) -> float:
        assert self.experts is not None
        each = sum(inputs * outputs for _, inputs, outputs in self.feed_forward(self.experts.width))
        return self.experts.layers * num_experts * each

    def kv_widths(self) -> dict[int | None, tuple[int, int]]:
        """Return for each window, over all of its layers, the sums of their head sizes and of their keys' values."""
        shapes = self.attention_shapes
        windows = self.windows or (None,) * len(shapes)
        sums: dict[int | None, tuple[int, int]] = {}
        for window, (kv_heads, head_dim) in zip(windows, shapes, strict=True):
            dims, values = sums.get(window, (0, 0))
            sums[window] = dims + head_dim, values + kv_heads * head_dim
        return sums

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers' linears, without embeddings, norms and biases."""
        for_all_tokens = sum(inputs * outputs * count for inputs, outputs, count in self.linear_counts())
        return for_all_tokens + self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    def kv_bytes_per_token(self, value_bytes: float = DENSE_BYTES) -> float:
        return 2 * sum(values for _, values in self.kv_widths().values()) * value_bytes


@dataclass(frozen=True)
class Weights:
    """Storage of the layers' linears. The head stays in 16 bits.

    packed_bits: 4 are integers in groups of `group_size`, each with a 16-bit scale and a 4-bit zero point; 8 are fp8
    with a float32 scale per group; None is 16 bits. A step uses the fused product of packed weights up to
    `fused_tokens` tokens (None: for each linear, if it is faster), else the product of 16-bit weights, which are kept
    in addition to the packed ones if `cached`, else written again for each use.

    fp8: weights for fp8 activations, one byte each and a float32 scale per group; there is one product for any number
    of tokens. The cost of rounding activations is ignored, like other elementwise work.

    expert_bytes: bytes of one weight of an expert. Products of experts widen them in registers at any number of tokens.
    host_bytes: weights in host memory, which each step copies to the card.
    """

    packed_bits: int | None = None
    group_size: int = 128
    cached: bool = True
    fused_tokens: int | None = None
    fp8: bool = False
    expert_bytes: float = DENSE_BYTES
    host_bytes: float = 0.0

    @property
    def packed_bytes(self) -> float:
        """Bytes of one packed weight, including its share of the scale and of the zero point."""
        return 0.5 + (2.0 + 0.5) / self.group_size if self.packed_bits == 4 else 1.0 + SCALE_BYTES / self.group_size

    @property
    def read_bytes(self) -> float:
        """Minimum bytes that a product reads per weight."""
        if self.fp8:
            return 1.0 + SCALE_BYTES / self.group_size
        return DENSE_BYTES if self.packed_bits is None else self.packed_bytes


DENSE = Weights()
AWQ = Weights(packed_bits=4, expert_bytes=0.5 + 4 / 128)


@dataclass(frozen=True)
class Reached:
    """Shares of the card's peak rates that kernels reach, and launch costs. The default is the lower bound.

    bandwidth: for reading weights and for dequantizing. kv, int4_read: share of the bandwidth for keys and values, and
    for weights in the fused int4 product. gemm, int4, attention: share of the matrix rate for 16-bit products, fused
    int4 products, and attention. fp8: share of the fp8 rate for products of fp8 activations. host_copy: share of the
    PCIe rate for copies of weights from host memory. step_s, layer_s: time per step and per layer in which the card
    waits for the host or for kernels to start.
    """

    bandwidth: float = 1.0
    kv: float = 1.0
    gemm: float = 1.0
    int4: float = 1.0
    attention: float = 1.0
    fp8: float = 1.0
    int4_read: float = 1.0
    step_s: float = 0.0
    layer_s: float = 0.0
    nvlink: float = 1.0
    pcie: float = 1.0
    host_copy: float = 1.0
    exchange_s: float = 0.0
    nvlink_hop_s: float = 0.0
    pcie_hop_s: float = 0.0


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of a card, or of each card of a group that computes each layer together.

    bytes_per_s: memory read or written. flops_per_s: dense 16-bit products with float32 sums. fp8_flops_per_s: the same
    for e4m3; None if the card has none. nvlink_bytes_per_s, pcie_bytes_per_s: to other cards, in one direction.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    reached: Reached = field(default_factory=Reached)
    fp8_flops_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float = 0.0
    num_cards: int = 1

    @classmethod
    def of_card(cls, card: Card, reached: Reached, num_cards: int = 1) -> "Ceilings":
        """Return the rates that the card's vendor states."""
        rates = card.bandwidth_bytes_per_s, card.bf16_flops
        links = card.nvlink_bytes_per_s, card.pcie_bytes_per_s
        return cls(card.name, *rates, card.memory_bytes, reached, card.fp8_flops, *links, num_cards)

    @property
    def link(self) -> Link:
        """Link between the cards: NVLink if they have it, else PCIe."""
        reached = self.reached
        if self.nvlink_bytes_per_s is not None:
            return Link(self.nvlink_bytes_per_s * reached.nvlink, reached.exchange_s, reached.nvlink_hop_s)
        return Link(self.pcie_bytes_per_s * reached.pcie, reached.exchange_s, reached.pcie_hop_s)


@dataclass(frozen=True)
class StepLoad:
    """Tokens of a step: sequence s computes the last count_S[s] tokens of its context of context_S[s].

    num_rows: tokens that need logits. spared_tokens: context tokens, over all sequences, whose keys and values are not
    read, because they are shared with another sequence and read once for both.
    """

    count_S: np.ndarray
    context_S: np.ndarray
    num_rows: int
    spared_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.count_S.sum())

    def seen_keys(self, window: int | None = None) -> float:
        """Return the number of pairs of a query and a key that it sees, the same in every head of a layer."""
        return float((seen_keys(self.context_S, window) - seen_keys(self.context_S - self.count_S, window)).sum())

    def read_tokens(self, window: int | None = None) -> float:
        """Return the tokens whose keys and values a layer reads. Layers with a window read shared ones repeatedly."""
        if window is None:
            return float(self.context_S.sum()) - self.spared_tokens
        return float(np.minimum(self.context_S, window + self.count_S - 1).sum())


def seen_keys(num_tokens: np.ndarray, window: int | None = None) -> np.ndarray:
    """Return the number of pairs of a query and a key that it sees, for the first `num_tokens` tokens of a sequence."""
    tokens = num_tokens.astype(np.float64)
    inside = tokens if window is None else np.minimum(tokens, window)
    return inside * (inside + 1) / 2 + (tokens - inside) * inside


@dataclass(frozen=True)
class StepSeconds:
    """Parts of a step's time. attention_s is its products, kv_s reading its keys and values; the two overlap. copy_s is
    copies of weights from host memory, which overlap with all other parts."""

    linears_s: float = 0.0
    attention_s: float = 0.0
    kv_s: float = 0.0
    head_s: float = 0.0
    launch_s: float = 0.0
    exchange_s: float = 0.0
    copy_s: float = 0.0

    @property
    def total_s(self) -> float:
        computed_s = self.linears_s + max(self.attention_s, self.kv_s) + self.head_s + self.launch_s + self.exchange_s
        return max(computed_s, self.copy_s)

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        return StepSeconds(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def linear_seconds(num_tokens: int, inputs: int, outputs: int, weights: Weights, card: Ceilings) -> dict[str, float]:
    """Return the seconds of one linear by each path that its weights allow: `dense`, `packed`, `scratch` or `fp8`.

    scratch: the 16-bit weights are written from the packed ones and read again. Raises ConfigError for fp8 on a card
    without fp8 products.
    """
    parameters, reached = inputs * outputs, card.reached
    flops, bytes_per_s = 2.0 * num_tokens * parameters, card.bytes_per_s * reached.bandwidth
    if weights.fp8:
        if card.fp8_flops_per_s is None:
            raise ConfigError(f"{card.name}: does not support products of fp8 activations")
        return {"fp8": max(weights.read_bytes * parameters / bytes_per_s, flops / (card.fp8_flops_per_s * reached.fp8))}
    dense_s = max(DENSE_BYTES * parameters / bytes_per_s, flops / (card.flops_per_s * reached.gemm))
    if weights.packed_bits is None:
        return {"dense": dense_s}
    packed = weights.packed_bytes * parameters
    packed_s = max(packed / (card.bytes_per_s * reached.int4_read), flops / (card.flops_per_s * reached.int4))
    paths = {"packed": packed_s, "dense": dense_s}
    if not weights.cached:
        paths = {"packed": packed_s, "scratch": dense_s + (packed + DENSE_BYTES * parameters) / bytes_per_s}
    if weights.fused_tokens is None:
        return paths
    return {name: s for name, s in paths.items() if (name == "packed") == (num_tokens <= weights.fused_tokens)}


def expert_seconds(num_tokens: int, size: DecoderSize, weights: Weights, card: Ceilings) -> float:
    """Return the seconds of all layers' experts, without shared ones."""
    flops = 2.0 * num_tokens * size.active_expert_parameters
    read_s = size.read_parameters(num_tokens)[1] * weights.expert_bytes / (card.bytes_per_s * card.reached.bandwidth)
    return max(read_s, flops / (card.flops_per_s * card.reached.gemm))


def step_seconds(
    step: StepLoad, size: DecoderSize, weights: Weights, card: Ceilings, kv_value_bytes: float = DENSE_BYTES
) -> StepSeconds:
    """Return the minimum time of a step on a card, or on a group of them. size: of the whole model. kv_value_bytes:
    bytes of one number in the KV cache (1 in fp8).

    The keys and values that a context's queries see are read once per layer, whatever the number of queries, except
    spared ones; those of the step's tokens are written. States are read and written once per layer; their products
    are not counted.
    """
    reached, num_tokens, exchange_s = card.reached, step.num_tokens, 0.0
    if card.num_cards > 1:
        counts = size.layers, size.hidden, size.vocab, card.num_cards, num_tokens, step.num_rows
        exchange_s = exchange_seconds(step_exchanges(*counts), card.num_cards, card.link)
        size = size.local(card.num_cards)
    linears_s = sum(
        count * min(linear_seconds(num_tokens, inputs, outputs, weights, card).values())
        for inputs, outputs, count in size.linear_counts()
    )
    linears_s += expert_seconds(num_tokens, size, weights, card)
    widths = size.kv_widths().items()
    attention_flops = 4.0 * size.heads * sum(dims * step.seen_keys(window) for window, (dims, _) in widths)
    moved = sum(values * (step.read_tokens(window) + num_tokens) for window, (_, values) in widths)
    kv_bytes = 2 * moved * kv_value_bytes
    if size.delta is not None:
        kv_bytes += 2 * size.delta.layers * size.delta.state_bytes * len(step.count_S)
    head_s = 0.0
    if step.num_rows:
        head_s = linear_seconds(step.num_rows, size.hidden, size.vocab, DENSE, card)["dense"]
    return StepSeconds(
        linears_s=linears_s,
        attention_s=attention_flops / (card.flops_per_s * reached.attention),
        kv_s=kv_bytes / (card.bytes_per_s * reached.kv),
        head_s=head_s,
        launch_s=reached.step_s + size.layers * reached.layer_s,
        exchange_s=exchange_s,
        copy_s=weights.host_bytes / (card.pcie_bytes_per_s * reached.host_copy) if weights.host_bytes else 0.0,
    )
