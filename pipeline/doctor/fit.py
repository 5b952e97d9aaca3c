"""What a model takes in memory, how many sequences of which length fit beside it, and how fast it would be: here and on
known cards, as a job asks for it.

Figures come from config.json and from the engine's own rules (`engine/startup/memory.py`); no weights are read. A
card's memory is its data sheet's (`hardware.yaml`), all of it free.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pipeline.doctor.check import Setup
from pipeline.doctor.speed import CONTEXT, Speed, speed_on
from pipeline.engine.params import EngineConfig
from pipeline.engine.startup.batch_limits import gpu_limits
from pipeline.engine.startup.memory import (
    CPU_SHARE,
    SLACK_BYTES,
    cache_before_dense,
    dense_weights_fit,
    free_cpu_bytes,
    weight_bytes,
)
from pipeline.formatting import shown_bytes, table
from pipeline.kernels.activations.fp8 import MIN_CAPABILITY
from pipeline.kernels.cache import FP8, head_bytes
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES, ModelConfig
from pipeline.roofline.cards import Card, card_of_device, load_cards
from pipeline.roofline.shares import source

LENGTHS = (512, 2_048, 8_192, 32_768)
BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # of the KV cache, as the engine has it when nothing else is asked for
STEP_BYTES = 2 << 30  # about what the largest step takes on a GPU; the engine measures it when it starts
GROUP_SIZE = 128  # of the int4 weights whose size is told


@dataclass(frozen=True)
class Place:
    """One device. kv_dtype: of the KV cache. `sequences[i]`: how many of `MemoryTable.lengths[i]` tokens have room for
    their keys and values at once; none where the weights alone do not fit. speed: None where it is not known, or none
    fit. lacks: what the job asks for and the device has not, which a run refuses; else empty."""

    name: str
    dtype: str
    kv_dtype: str
    memory_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    sequences: tuple[int, ...]
    speed: Speed | None = None
    lacks: str = ""


@dataclass(frozen=True)
class MemoryTable:
    """checkpoint_bytes: files of the model by the form of its linears, the rest in 16 bit. The places' weights are of
    the form that the engine loads there: the model's own, or what the job makes of it."""

    checkpoint_bytes: dict[str, int]
    lengths: tuple[int, ...]
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self, width: int | None = None) -> str:
        files = "; ".join(f"{form} {shown_bytes(size)}" for form, size in self.checkpoint_bytes.items())
        lengths = [f"{length:,}" for length in self.lengths]
        head = ["device", "memory", "dtype", "weights", "KV", "a token", *lengths, "prompts/s", "out/s"]
        rows = []
        for p in self.places:
            memory, weights = shown_bytes(p.memory_bytes), shown_bytes(p.weight_bytes)
            fits = ["-" if p.lacks else f"{count:,}" for count in p.sequences]
            speeds = () if p.speed is None else (p.speed.prompt_tokens_per_s, p.speed.output_tokens_per_s)
            shown = [f"{rate:,.0f}" for rate in speeds] or ["", ""]
            rows.append([p.name, memory, p.dtype, weights, p.kv_dtype, f"{p.kv_bytes_per_token:,}", *fits, *shown])
        return "\n".join(
            [
                "memory of the model",
                f"  files           {files}",
                "  sequences that fit at once, by their length in tokens; tokens a second by the cost model: of",
                f"  prompts, and out by as many sequences of {CONTEXT} as run there at once;",
                f"  {source([p.name for p in self.places])}:",
                table(rows, head=head, sides="<>", width=width, indent=4),
                *(f"    {p.name} cannot run this: {p.lacks}" for p in self.places if p.lacks),
            ]
        )


def memory_table(config: ModelConfig, setup: Setup) -> MemoryTable:
    """Of a model, as it is loaded, on this machine and on every known card."""
    lengths = (*(length for length in LENGTHS if length < config.max_position), config.max_position)
    cards, fit = load_cards(), _Fit(config, setup, lengths)
    places = [fit.on_gpu(card.name, card.memory_bytes, card.compute_capability, card) for card in cards]
    return MemoryTable(_checkpoint_bytes(config), lengths, (fit.here(), *places))


def kv_type(setup: Setup, dtype: torch.dtype) -> torch.dtype:
    """Of the KV cache, where the engine computes in `dtype`."""
    return FP8 if setup.kv_cache_dtype == "fp8" else dtype


@dataclass(frozen=True)
class _Fit:
    """A model, as `setup` loads it, on one device after another."""

    config: ModelConfig
    setup: Setup
    lengths: tuple[int, ...]

    def here(self) -> Place:
        device = self.setup.torch_device
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            known = card_of_device(about.name)
            memory, capability = torch.cuda.mem_get_info(device)[1], (about.major, about.minor)
            return self.on_gpu("this machine's GPU", memory, capability, known)
        free = free_cpu_bytes()
        dtype = self._dtype(device)
        weights = weight_bytes(self.config, device, dtype, activation_dtype=self.setup.activation_dtype)
        return self._place("this machine (free)", free, device, dtype, weights, int((free - weights) * CPU_SHARE))

    def on_gpu(self, name: str, memory: int, capability: tuple[int, int], known: Card | None) -> Place:
        """known: the card whose data sheet says how fast it is."""
        config, gpu, activations = self.config, torch.device("cuda"), self.setup.activation_dtype
        dtype = self._dtype(gpu)
        kv_dtype = kv_type(self.setup, dtype)
        share = int(memory * EngineConfig.gpu_memory_utilization)
        packed = weight_bytes(config, gpu, dtype, keeps_dense=False, activation_dtype=activations)
        limits = gpu_limits(memory, capability, packed)
        cached_tokens = cache_before_dense(limits.max_num_seqs, config.max_position)
        keeps_dense = dense_weights_fit(config, dtype, kv_dtype, share, cached_tokens)
        weights = weight_bytes(config, gpu, dtype, keeps_dense, activations)
        kv = share - STEP_BYTES - SLACK_BYTES - weights
        place = self._place(name, memory, gpu, dtype, weights, kv)
        if lacks := _lacking(activations, capability):
            return replace(place, lacks=lacks)
        if known is None or dtype.itemsize != 2:  # the cost model is of 16 bit
            return place
        value_bytes = head_bytes(config.head_dim, kv_dtype) / config.head_dim
        room = max(0, kv) // place.kv_bytes_per_token
        return replace(place, speed=speed_on(known, config, limits, activations, value_bytes, keeps_dense, room))

    def _dtype(self, device: torch.device) -> torch.dtype:
        return DTYPES.get(self.setup.dtype) or default_dtype(device, self.config.dtype)

    def _place(
        self, name: str, memory: int, device: torch.device, dtype: torch.dtype, weights: int, kv_bytes: int
    ) -> Place:
        kv_dtype = kv_type(self.setup, dtype)
        per_token, block = self.config.kv_bytes_per_token(kv_dtype), BLOCK_SIZE[device.type]
        blocks = max(0, kv_bytes) // (block * per_token)
        sequences = tuple(blocks // -(-length // block) for length in self.lengths)
        computed, kept = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype))
        return Place(name, computed, kept, memory, weights, per_token, sequences)


def _lacking(activation_dtype: str, capability: tuple[int, int]) -> str:
    """What a GPU has not, which `with_rounded_activations` refuses."""
    if activation_dtype == "int8":
        return "engine.activation_dtype: int8 is for processors"
    if activation_dtype != "auto" and capability < MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        return f"engine.activation_dtype: {activation_dtype} needs compute capability {needed}, and this card has {has}"
    return ""


def _checkpoint_bytes(config: ModelConfig) -> dict[str, int]:
    """Scales of 16 bit: one for each output of an int8 linear (about one for each `hidden_size` weights), of int4 one
    and a zero of 4 bit for each group."""
    linears = config.num_linear_parameters()
    rest = 2 * (config.num_parameters() - linears)
    return {
        "16 bit": 2 * linears + rest,
        "8 bit": linears + 2 * linears // config.hidden_size + rest,
        f"4 bit, groups of {GROUP_SIZE}": int(linears * (0.5 + 2.5 / GROUP_SIZE)) + rest,
    }
