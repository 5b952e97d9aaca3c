"""From an `EngineConfig` with "auto" in it to the numbers an engine runs with."""

import os
from dataclasses import dataclass

import torch

from pipeline.engine.params import EngineConfig
from pipeline.errors import ConfigError
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES, ModelConfig

DEFAULT_DRAFT_TOKENS = 4
MOST_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class Speculation:
    """Who drafts, and how many tokens at most for one sequence in one step."""

    proposer: str
    max_draft_tokens: int

    def __str__(self) -> str:
        return f"{self.proposer}, at most {self.max_draft_tokens} draft tokens"


@dataclass(frozen=True)
class Resolved:
    """What every `auto` became, except the KV cache's size, which is known once the weights are loaded."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    speculation: Speculation | None  # None: off


def resolve(config: EngineConfig, model: ModelConfig) -> Resolved:
    """Fill in what `config` leaves open. Raises ConfigError for what this machine or model cannot do."""
    _refuse_unserved(config)
    device = _device(config.device)
    on_gpu = device.type == "cuda"
    max_num_seqs = _positive("max_num_seqs", config.max_num_seqs, 512 if on_gpu else 64)
    batched = _positive("max_num_batched_tokens", config.max_num_batched_tokens, 8192 if on_gpu else 2048)
    if batched < max_num_seqs:
        raise ConfigError(
            f"engine.max_num_batched_tokens = {batched}: expected at least engine.max_num_seqs = {max_num_seqs}, since "
            "each running sequence computes one token a step"
        )
    max_model_len = _positive("max_model_len", config.max_model_len, model.max_position)
    if max_model_len > model.max_position:
        raise ConfigError(
            f"engine.max_model_len = {max_model_len}: the model was made for at most {model.max_position} positions"
        )
    return Resolved(
        device=device,
        dtype=_dtype(config.dtype, device, model),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=_positive("block_size", config.block_size, 64 if on_gpu else 16),
        speculation=_speculation(config),
    )


def set_threads(num_threads: int | None) -> int:
    """Give torch the cores an engine owns; returns how many it uses."""
    if num_threads is not None:
        if num_threads < 1:
            raise ConfigError(f"num_threads = {num_threads}: expected at least 1")
        torch.set_num_threads(min(num_threads, os.cpu_count() or 1))
    return torch.get_num_threads()


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"engine.{name} = {value!r}: expected an integer of at least 1")
    return value


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device = {name!r}: expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device = {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device = {name!r}: torch {torch.__version__} sees no CUDA device; use cpu or auto")
    return device


def _dtype(name: str, device: torch.device, model: ModelConfig) -> torch.dtype:
    if name == "auto":
        return default_dtype(device, model.dtype)
    if name not in DTYPES:
        raise ConfigError(f"engine.dtype = {name!r}: expected auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ConfigError("engine.dtype = 'float16' is slow and unserved on cpu; use auto, bfloat16 or float32")
    return DTYPES[name]


def _speculation(config: EngineConfig) -> Speculation | None:
    wanted = config.speculation
    if wanted in ("off", "auto", False):  # auto: on with a draft model, which is refused yet
        return None
    expected = f'engine.speculation = {wanted!r}: expected off, auto or {{"proposer": "ngram", "max_draft_tokens": n}}'
    if not isinstance(wanted, dict) or not set(wanted) <= {"proposer", "max_draft_tokens"}:
        raise ConfigError(expected)
    proposer, most = wanted.get("proposer"), wanted.get("max_draft_tokens", DEFAULT_DRAFT_TOKENS)
    if proposer != "ngram":
        raise ConfigError(expected)
    if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_DRAFT_TOKENS:
        raise ConfigError(
            f"engine.speculation.max_draft_tokens = {most!r}: expected an integer from 1 to {MOST_DRAFT_TOKENS}"
        )
    return Speculation("ngram", most)


def _refuse_unserved(config: EngineConfig) -> None:
    if config.draft is not None:
        raise ConfigError(
            f"draft = {config.draft!r}: speculative decoding with a draft model is not available yet; leave it out"
        )
    for name in ("kv_cache_dtype", "activation_dtype"):
        if getattr(config, name) != "auto":
            raise ConfigError(f"engine.{name} = {getattr(config, name)!r}: only auto is available yet")
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"engine.gpu_memory_utilization = {config.gpu_memory_utilization}: expected a number in (0, 1]"
        )
