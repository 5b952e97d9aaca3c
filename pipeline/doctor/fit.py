"""What a model takes in memory, and how many sequences of which length fit beside it: here and on known cards.

Figures come from config.json and from the engine's own rules (`engine.memory`); no weights are read. A card's memory
is its data sheet's (`hardware.yaml`), all of it free.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipeline.doctor.check import Subject, shown_bytes
from pipeline.engine.memory import (
    CPU_SHARE,
    EXPECTED_TOKENS,
    SLACK_BYTES,
    dense_weights_fit,
    free_cpu_bytes,
    weight_bytes,
)
from pipeline.engine.params import EngineConfig
from pipeline.engine.resolve import GPU_MAX_NUM_SEQS
from pipeline.hardware import load_cards
from pipeline.kernels.cache import FP8
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES, ModelConfig

LENGTHS = (512, 2_048, 8_192, 32_768)
BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # of the KV cache, as the engine has it when nothing else is asked for
STEP_BYTES = 2 << 30  # about what the largest step takes on a GPU; the engine measures it when it starts
GROUP_SIZE = 128  # of the int4 weights whose size is told


@dataclass(frozen=True)
class Place:
    """One device. kv_dtype: of the KV cache. `sequences[i]`: how many of `MemoryTable.lengths[i]` tokens have room for
    their keys and values at once; none where the weights alone do not fit."""

    name: str
    dtype: str
    kv_dtype: str
    memory_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class MemoryTable:
    """checkpoint_bytes: files of the model by the form of its linears, the rest in 16 bit. The places' weights are of
    the form that the model has now, as the engine loads it there."""

    checkpoint_bytes: dict[str, int]
    lengths: tuple[int, ...]
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        files = "; ".join(f"{form} {shown_bytes(size)}" for form, size in self.checkpoint_bytes.items())
        head = ["device", "memory", "dtype", "weights", "KV", "a token", *(f"{length:,}" for length in self.lengths)]
        rows = [head]
        for p in self.places:
            sizes = [
                shown_bytes(p.memory_bytes),
                p.dtype,
                shown_bytes(p.weight_bytes),
                p.kv_dtype,
                f"{p.kv_bytes_per_token:,}",
            ]
            rows.append([p.name, *sizes, *(f"{count:,}" for count in p.sequences)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(f"{cell:{'<' if i == 0 else '>'}{w}}" for i, (cell, w) in enumerate(zip(row, widths)))
                 for row in rows]  # fmt: skip
        return "\n".join(
            [
                "memory of the model",
                f"  files           {files}",
                "  sequences that fit at once, by their length in tokens:",
                *(f"    {line.rstrip()}" for line in lines),
            ]
        )


def memory_table(config: ModelConfig, subject: Subject) -> MemoryTable:
    """Of a model on this machine and on every known card."""
    lengths = (*(length for length in LENGTHS if length < config.max_position), config.max_position)
    gpu = torch.device("cuda")
    on_gpu = DTYPES.get(subject.dtype) or default_dtype(gpu, config.dtype)
    kv = kv_type(subject, on_gpu)
    places = [_here(config, subject, lengths)]
    places += [_card(card.name, card.memory_bytes, config, gpu, on_gpu, kv, lengths) for card in load_cards()]
    return MemoryTable(_checkpoint_bytes(config), lengths, tuple(places))


def kv_type(subject: Subject, dtype: torch.dtype) -> torch.dtype:
    """Of the KV cache, where the engine computes in `dtype`."""
    return FP8 if subject.kv_cache_dtype == "fp8" else dtype


def _here(config: ModelConfig, subject: Subject, lengths: tuple[int, ...]) -> Place:
    if torch.cuda.is_available() and subject.device != "cpu":
        device = torch.device("cuda")
        dtype = DTYPES.get(subject.dtype) or default_dtype(device, config.dtype)
        memory, kv_dtype = torch.cuda.mem_get_info()[1], kv_type(subject, dtype)
        return _card("this machine's GPU", memory, config, device, dtype, kv_dtype, lengths)
    device, free = torch.device("cpu"), free_cpu_bytes()
    dtype = DTYPES.get(subject.dtype) or default_dtype(device, config.dtype)
    weights = weight_bytes(config, device, dtype)
    kv = int((free - weights) * CPU_SHARE)
    return _place("this machine (free)", free, config, device, dtype, kv_type(subject, dtype), weights, kv, lengths)


def _card(
    name: str,
    memory: int,
    config: ModelConfig,
    gpu: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    lengths: tuple[int, ...],
) -> Place:
    share = int(memory * EngineConfig.gpu_memory_utilization)
    cached_tokens = GPU_MAX_NUM_SEQS * min(EXPECTED_TOKENS, config.max_position)
    weights = weight_bytes(config, gpu, dtype, dense_weights_fit(config, dtype, kv_dtype, share, cached_tokens))
    kv = share - STEP_BYTES - SLACK_BYTES - weights
    return _place(name, memory, config, gpu, dtype, kv_dtype, weights, kv, lengths)


def _place(
    name: str,
    memory: int,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    weights: int,
    kv_bytes: int,
    lengths: tuple[int, ...],
) -> Place:
    per_token, block = config.kv_bytes_per_token(kv_dtype), BLOCK_SIZE[device.type]
    blocks = max(0, kv_bytes) // (block * per_token)
    sequences = tuple(blocks // -(-length // block) for length in lengths)
    computed, kept = str(dtype).removeprefix("torch."), str(kv_dtype).removeprefix("torch.")
    return Place(name, computed, kept, memory, weights, per_token, sequences)


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
