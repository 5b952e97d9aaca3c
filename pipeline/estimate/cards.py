"""Estimate a job's speed on the cards of `hardware.yaml` with the cost model.

A sample of the job's requests runs through the simulated schedule of one engine, once with kernels at the card's data
sheet and once at the engine's measured share of it (`roofline/shares.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config import JobConfig
from pipeline.engine.startup.batch_limits import BatchLimits, gpu_limits
from pipeline.engine.startup.memory import offload_plan, usable_kv_room, weight_layout
from pipeline.errors import ConfigError
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import AWQ, DENSE, DENSE_BYTES, Ceilings, DecoderSize, Weights
from pipeline.roofline.job_simulation import Batching, JobSeconds, RequestTokens, simulate_job
from pipeline.roofline.shares import BOUND, MEASURED

BLOCK_SIZE = 64  # tokens per KV block on a GPU
LOAD_BYTES_PER_S = 1e9  # assumed speed of reading the checkpoint
STARTUP_S = 40.0  # assumed start of a process with CUDA and its kernels


@dataclass(frozen=True)
class OnCard:
    """Simulation of a sample of requests on one engine of `num_cards` cards. best: kernels at the data sheet. expected:
    kernels at the engine's share of it. Both are None if the job does not fit; `lacks` holds the reason."""

    card: str
    weights: str
    kv_tokens: int
    max_num_seqs: int
    best: JobSeconds | None = None
    expected: JobSeconds | None = None
    load_s: float = 0.0
    lacks: str = ""
    num_cards: int = 1


@dataclass(frozen=True)
class CardServing:
    """Engine settings of the job on a card. None: the engine's default."""

    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    cpu_offload_gb: float = 0.0

    @classmethod
    def from_job(cls, job: JobConfig) -> "CardServing":
        engine = job.engine
        return cls(
            activation_dtype=engine.activation_dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            tensor_parallel_size=engine.tensor_parallel_size,
            cpu_offload_gb=engine.cpu_offload_gb,
        )

    def offloaded(self, weights: Weights, size: DecoderSize) -> Weights:
        """Return the weights with those of each card in host memory. Raises ConfigError as `offload_plan`."""
        size = size.local(self.tensor_parallel_size)
        linears = replace(weights, cached=False).resident_bytes(size) - 2 * size.head_parameters * DENSE_BYTES
        plan = offload_plan([int(linears / size.layers)] * size.layers, self.cpu_offload_gb)
        if plan is None:
            return weights
        return replace(weights, host_bytes=plan.host_bytes, staging_bytes=plan.staging_bytes)


def kinds_of_weights(config: ModelConfig) -> dict[str, Weights]:
    """Return the forms of the linear weights by name; the checkpoint's own form comes first."""
    own = config.weights_on_card()
    forms = {"16 bit": DENSE, "AWQ int4": AWQ, "fp8": Weights(int4=False, fp8=True)}
    stored_name = "AWQ int4" if own.int4 else "16 bit"
    return {stored_name: own, **{name: form for name, form in forms.items() if name != stored_name}}


def limits_on(card: Card, config: ModelConfig, serving: CardServing, weights_name: str | None = None) -> BatchLimits:
    """Return the rows and tokens of a step: the job's, else the engine's defaults. weights_name: see `on_card`."""
    forms = kinds_of_weights(config)
    weights = serving.offloaded(forms[weights_name or _default_form(forms, serving)], config.size)
    packed = replace(weights, cached=False).resident_bytes(config.size.local(serving.tensor_parallel_size))
    default = gpu_limits(card.memory_bytes, card.compute_capability, int(packed))
    seqs, tokens = serving.max_num_seqs, serving.max_num_batched_tokens
    if seqs is None:
        seqs = min(default.max_num_seqs, tokens or default.max_num_seqs)
    return BatchLimits(seqs, max(tokens or default.max_num_batched_tokens, seqs))


def _default_form(forms: Mapping[str, Weights], serving: CardServing) -> str:
    return "fp8" if serving.activation_dtype == "fp8" else next(iter(forms))


def on_card(
    card: Card,
    config: ModelConfig,
    serving: CardServing,
    requests: Sequence[RequestTokens],
    weights_name: str | None = None,
) -> OnCard:
    """Simulate `requests` on one engine over cards of this kind, or return what it lacks. weights_name: a key of
    `kinds_of_weights`; by default the checkpoint's own form, or fp8 if activations are fp8."""
    forms = kinds_of_weights(config)
    name = weights_name or _default_form(forms, serving)
    weights, size = forms[name], config.size
    try:
        limits = limits_on(card, config, serving, name)
        weights = serving.offloaded(weights, size)
    except ConfigError as error:
        return OnCard(card.name, name, 0, 0, lacks=str(error))
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    value_bytes = size.fp8_value_bytes if serving.kv_cache_dtype == "fp8" else DENSE_BYTES
    num_cards = serving.tensor_parallel_size
    base = OnCard(card.name, name, 0, seqs, num_cards=num_cards)
    try:
        config.local(num_cards)
    except ConfigError as error:
        return replace(base, lacks=str(error))
    if weights.fp8 and card.fp8_flops is None:
        return replace(base, lacks="has no fp8 products")
    ceilings = Ceilings.of_card(card, BOUND, num_cards)
    form = weight_layout(weights, size, ceilings, crossover_of(card.compute_capability), seqs, value_bytes)
    room = usable_kv_room(size, form, ceilings, value_bytes)
    longest = max(request.prompt + request.output for request in requests)
    if room < longest + BLOCK_SIZE:
        cards = "its memory" if num_cards == 1 else f"the memory of {num_cards} cards"
        return replace(base, lacks=f"the weights and one request do not fit {cards}")
    batching = Batching(seqs, tokens, room, BLOCK_SIZE)
    try:
        best, expected = (
            simulate_job(requests, size, form, replace(ceilings, reached=reached), batching, 0, value_bytes)
            for reached in (BOUND, MEASURED)
        )
    except ConfigError as error:
        return replace(base, lacks=str(error))
    load_s = (size.linear_parameters * form.read_bytes + 2 * size.head_parameters * DENSE_BYTES) / LOAD_BYTES_PER_S
    return replace(base, kv_tokens=room, best=best, expected=expected, load_s=load_s)
