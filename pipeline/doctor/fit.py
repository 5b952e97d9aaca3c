"""Memory of a model, the number of sequences that fit next to it, and its speed, on this machine and on known cards.

Figures are computed from config.json with the engine's own rules (`engine/startup/memory.py`), without reading weights.
A card's memory is the data sheet's (`hardware.yaml`), assumed to be free. A model that does not fit one card is divided
over the fewest that it fits, by tensor parallelism.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pipeline.doctor.check import Setup
from pipeline.doctor.speed import CONTEXT, PredictedSpeed, speed_on
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.batch_limits import gpu_limits
from pipeline.engine.startup.memory import (
    CPU_SHARE,
    SLACK_BYTES,
    cache_before_dense,
    dense_weights_fit,
    free_cpu_bytes,
    layer_bytes_on_gpu,
    offload_plan,
    weight_bytes,
)
from pipeline.errors import ConfigError
from pipeline.formatting import shown_bytes, table
from pipeline.kernels.activations.fp8 import MIN_CAPABILITY
from pipeline.kernels.cache import FP8, head_bytes
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES, ModelConfig
from pipeline.roofline.cards import Card, card_of_device, load_cards
from pipeline.roofline.shares import source

LENGTHS = (512, 2_048, 8_192, 32_768)
BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # of the KV cache, the engine's defaults
STEP_BYTES = 2 << 30  # estimate of the largest step on a GPU; the engine measures it at startup
GROUP_SIZES = (1, 2, 4, 8)  # cards of an engine
GROUP_SIZE = 128  # of the int4 weights whose size is shown


@dataclass(frozen=True)
class DeviceFit:
    """Fit of a model on one device, or on a group of `num_cards` of them.

    memory_bytes: of each device: the sum of weight_bytes (its share of the model), kv_bytes (of the KV cache),
    step_bytes (of the largest step and of libraries) and free_bytes, which is negative if the weights do not fit.
    kv_dtype, kv_bytes_per_token: of each device's share of the KV cache. sequences[i]: number of sequences of
    `MemoryTable.lengths[i]` tokens whose keys and values fit at once; 0 if the weights alone do not fit. speed: None if
    it is not known or no sequence fits. lacks: a feature that the job requires and the device lacks, so that a run
    would fail; else empty. host_bytes: of each device's weights in host memory, which weight_bytes excludes. copy_s:
    seconds in which PCIe copies them, the minimum of a step; None if the card is unknown.
    """

    name: str
    dtype: str
    kv_dtype: str
    memory_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    sequences: tuple[int, ...]
    speed: PredictedSpeed | None = None
    lacks: str = ""
    num_cards: int = 1
    kv_bytes: int = 0
    step_bytes: int = 0
    host_bytes: int = 0
    copy_s: float | None = None

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.weight_bytes - self.kv_bytes - self.step_bytes


@dataclass(frozen=True)
class MemoryTable:
    """Fit of a model on several devices.

    checkpoint_bytes: file size by the format of the linears, with other weights in 16 bit. The devices' weight_bytes
    use the format that the engine loads: the model's own, or the job's quantization.
    """

    checkpoint_bytes: dict[str, int]
    lengths: tuple[int, ...]
    places: tuple[DeviceFit, ...]

    def to_json(self) -> dict[str, Any]:
        places = [asdict(each) | {"free_bytes": each.free_bytes} for each in self.places]
        return asdict(self) | {"places": places}

    def to_text(self, width: int | None = None) -> str:
        files = "; ".join(f"{form} {shown_bytes(size)}" for form, size in self.checkpoint_bytes.items())
        lengths = [f"{length:,}" for length in self.lengths]
        parts = ["memory", "weights", "cache", "step", "free"]
        head = ["device", "cards", *parts, "dtype", "KV", "a token", *lengths, "prompts/s", "out/s"]
        rows = []
        for p in self.places:
            sizes = p.memory_bytes, p.weight_bytes, p.kv_bytes, p.step_bytes, p.free_bytes
            memory = [shown_bytes(size) if size >= 0 else "" for size in sizes]
            fits = ["-" if p.lacks else f"{count:,}" for count in p.sequences]
            speeds = () if p.speed is None else (p.speed.prompt_tokens_per_s, p.speed.output_tokens_per_s)
            shown = [f"{rate:,.0f}" for rate in speeds] or ["", ""]
            kinds = p.dtype, p.kv_dtype, f"{p.kv_bytes_per_token:,}"
            rows.append([p.name, f"{p.num_cards}", *memory, *kinds, *fits, *shown])
        return "\n".join(
            [
                "memory of the model",
                f"  files           {files}",
                "  columns: cards of an engine (engine.tensor_parallel_size); memory of each: weights, KV cache, step,",
                "  free; sequences that fit at once, by length in tokens; prompt and output tokens per second",
                f"  by the cost model, for prompts and for the largest batch of {CONTEXT}-token sequences;",
                f"  {source([p.name for p in self.places], any(p.num_cards > 1 for p in self.places))}:",
                table(rows, head=head, sides="<>", width=width, indent=4),
                *self._lacking(),
                *self._host_memory(),
            ]
        )

    def _lacking(self) -> list[str]:
        """Return one line for each reason why devices cannot run this."""
        names: dict[str, list[str]] = {}
        for p in self.places:
            if p.lacks:
                names.setdefault(p.lacks, []).append(p.name)
        return [f"    {', '.join(lacking)} cannot run this: {reason}" for reason, lacking in names.items()]

    def _host_memory(self) -> list[str]:
        """Return the lines about weights in host memory."""
        offloading = [p for p in self.places if p.host_bytes and not p.lacks]
        if not offloading:
            return []
        floors: dict[float, list[str]] = {}
        for p in offloading:
            if p.copy_s is not None:
                floors.setdefault(p.copy_s, []).append(p.name)
        return [
            f"    {shown_bytes(max(p.host_bytes for p in offloading))} more of each card's weights in host memory "
            "(engine.cpu_offload_gb);",
            "    a step takes at least the time that PCIe needs to copy them, by data sheet:",
            *(f"      {seconds * 1e3:,.3g} ms on {', '.join(names)}" for seconds, names in floors.items()),
        ]


def memory_table(config: ModelConfig, setup: Setup) -> MemoryTable:
    """Return the fit of a model, as the job loads it, on this machine and on every known card."""
    lengths = (*(length for length in LENGTHS if length < config.max_position), config.max_position)
    cards, fit = load_cards(), _Fit(config, setup, lengths)
    return MemoryTable(_checkpoint_bytes(config), lengths, (fit.here(), *map(fit.on_card, cards)))


def kv_type(setup: Setup, dtype: torch.dtype) -> torch.dtype:
    """Return the KV cache's dtype for an engine that computes in `dtype`."""
    return FP8 if setup.kv_cache_dtype == "fp8" else dtype


@dataclass(frozen=True)
class _Fit:
    """Model, as `setup` loads it, to fit on several devices."""

    config: ModelConfig
    setup: Setup
    lengths: tuple[int, ...]

    def here(self) -> DeviceFit:
        device = self.setup.torch_device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            known = card_of_device(properties.name)
            memory, capability = torch.cuda.mem_get_info(device)[1], (properties.major, properties.minor)
            return self.on_gpu("this machine's GPU", memory, capability, known, self.setup.tensor_parallel_size)
        free = free_cpu_bytes()
        dtype = self._dtype(device)
        weights = weight_bytes(self.config, device, dtype, activation_dtype=self.setup.activation_dtype)
        kv = int((free - weights) * CPU_SHARE)
        fit = self._fit_of("this machine (free)", free, device, dtype, weights, kv, self.config, 0)
        return replace(fit, lacks="engine.cpu_offload_gb needs a GPU") if self.setup.cpu_offload_gb else fit

    def on_card(self, card: Card) -> DeviceFit:
        """Return the fit on the job's number of cards; by default on the fewest on which a sequence fits."""
        properties = card.name, card.memory_bytes, card.compute_capability, card
        sizes = GROUP_SIZES if self.setup.tensor_parallel_size == 1 else (self.setup.tensor_parallel_size,)
        found = [self.on_gpu(*properties, sizes[0])]
        for size in sizes[1:]:
            if found[0].lacks or any(found[-1].sequences):
                break
            found.append(self.on_gpu(*properties, size))
        return found[-1] if any(found[-1].sequences) and not found[-1].lacks else found[0]

    def on_gpu(
        self, name: str, memory: int, capability: tuple[int, int], known: Card | None, num_cards: int
    ) -> DeviceFit:
        """Return the fit on GPUs of one kind. known: the card whose data sheet determines the speed, if any."""
        config, undivided = self.config, ""
        try:
            config = config.local(num_cards)
        except ConfigError as error:
            undivided, num_cards = str(error), 1
        gpu, activations = torch.device("cuda"), self.setup.activation_dtype
        dtype = self._dtype(gpu)
        kv_dtype = kv_type(self.setup, dtype)
        share = int(memory * EngineConfig.gpu_memory_utilization)
        offload, lacks = None, _lacking(activations, capability)
        try:
            offload = offload_plan(layer_bytes_on_gpu(config, dtype, activations), self.setup.cpu_offload_gb)
        except ConfigError as error:
            lacks = lacks or str(error)
        freed = 0 if offload is None else offload.freed_bytes
        packed = weight_bytes(config, gpu, dtype, keeps_dense=False, activation_dtype=activations) - freed
        limits = gpu_limits(memory, capability, packed)
        cached_tokens = cache_before_dense(limits.max_num_seqs, config.max_position)
        keeps_dense = offload is None and dense_weights_fit(config, dtype, kv_dtype, share, cached_tokens)
        weights = weight_bytes(config, gpu, dtype, keeps_dense, activations) - freed
        kv = share - STEP_BYTES - SLACK_BYTES - weights
        fit = self._fit_of(name, memory, gpu, dtype, weights, kv, config, STEP_BYTES + SLACK_BYTES)
        fit = replace(fit, num_cards=num_cards)
        if offload is not None:
            copy_s = None if known is None else offload.host_bytes / known.pcie_bytes_per_s
            fit = replace(fit, host_bytes=offload.host_bytes, copy_s=copy_s)
        if lacks := undivided or lacks:
            return replace(fit, lacks=lacks)
        if known is None or dtype.itemsize != 2:  # the cost model covers 16 bit only
            return fit
        value_bytes = head_bytes(config.head_dim, kv_dtype) / config.head_dim
        room = max(0, kv) // fit.kv_bytes_per_token
        speed = speed_on(known, self.config, limits, activations, value_bytes, keeps_dense, room, num_cards, offload)
        return replace(fit, speed=speed)

    def _dtype(self, device: torch.device) -> torch.dtype:
        return DTYPES.get(self.setup.dtype) or default_dtype(device, self.config.dtype)

    def _fit_of(
        self,
        name: str,
        memory: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: int,
        kv_bytes: int,
        config: ModelConfig,
        step_bytes: int,
    ) -> DeviceFit:
        """Return the fit without its speed. config: each device's share of the model."""
        kv_dtype, kv_bytes = kv_type(self.setup, dtype), max(0, kv_bytes)
        per_token, block = config.kv_bytes_per_token(kv_dtype), BLOCK_SIZE[device.type]
        blocks = kv_bytes // (block * per_token)
        sequences = tuple(blocks // -(-length // block) for length in self.lengths)
        computed, kept = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype))
        return DeviceFit(
            name, computed, kept, memory, weights, per_token, sequences, kv_bytes=kv_bytes, step_bytes=step_bytes
        )


def _lacking(activation_dtype: str, capability: tuple[int, int]) -> str:
    """Return the feature that a GPU lacks and that `with_act_quant` would refuse, or an empty string."""
    if activation_dtype == "int8":
        return "engine.activation_dtype: int8 runs on CPUs only"
    if activation_dtype != "auto" and capability < MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        return f"engine.activation_dtype: {activation_dtype} needs compute capability {needed}, this card has {has}"
    return ""


def _checkpoint_bytes(config: ModelConfig) -> dict[str, int]:
    """Return the file size by weight format.

    Scales have 16 bits: one per output of an int8 linear (about one per `hidden_size` weights), and one per int4 group,
    which also has a 4-bit zero.
    """
    linears = config.num_linear_parameters()
    rest = 2 * (config.num_parameters() - linears)
    return {
        "16 bit": 2 * linears + rest,
        "8 bit": linears + 2 * linears // config.hidden_size + rest,
        f"4 bit, groups of {GROUP_SIZE}": int(linears * (0.5 + 2.5 / GROUP_SIZE)) + rest,
    }
