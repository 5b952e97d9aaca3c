"""Fit of a model on a device: the size of its weights, the KV cache that is left, and the limits of a step.

Figures follow from config.json by the engine's own rules (`engine/startup/memory.py`), without reading weights. A
card's memory is the data sheet's (`hardware.yaml`), assumed to be free.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoints.locate import folder_here
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.batch_limits import CPU_LIMITS, BatchLimits, gpu_limits
from pipeline.engine.startup.memory import (
    CPU_SHARE,
    SLACK_BYTES,
    OffloadPlan,
    cache_before_dense,
    dense_weights_fit,
    free_cpu_bytes,
    layer_bytes_on_gpu,
    limit_states,
    max_states,
    num_snapshots,
    offload_plan,
    weight_bytes,
)
from pipeline.engine.startup.resolve import quantized_on_load, resolve_kv_dtype, resolve_kv_pages, with_state_dtype
from pipeline.errors import ConfigError, ModelError
from pipeline.kernels.activations.act_quant import NOT_ROUNDED, Activations, resolve_activations
from pipeline.kernels.activations.fp8 import MIN_CAPABILITY
from pipeline.kernels.select import default_dtype, native_activations
from pipeline.model.config import DTYPES, ModelConfig, read_config
from pipeline.model.load import as_stored
from pipeline.roofline.cards import Card
from pipeline.roofline.kv_pages import KVPages

GROUP_SIZES = (1, 2, 4, 8)  # cards of an engine
STEP_BYTES = 2 << 30  # estimate of the largest step on a GPU; the engine measures it at startup


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fit of a model on one device, or on a group of `num_cards` of them.

    memory_bytes: of each device: the sum of weight_bytes (its share of the model, and the draft model), kv_bytes (of
    the KV cache and of states), step_bytes (of the largest step and of libraries) and free_bytes, which is negative if
    the weights do not fit. activations: as rounded there. kv_bytes_per_token: of each device's share of the KV cache,
    in all layers.
    pages: of that share. state_bytes: of a sequence, in layers that keep no keys and values. keeps_dense: packed
    weights have a 16-bit copy. offload: weights in host memory, which weight_bytes excludes. lacks: a feature
    that the job requires and the device lacks, so that a run would fail; else empty.
    """

    name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    activations: Activations
    memory_bytes: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    pages: KVPages
    limits: BatchLimits
    state_bytes: int = 0
    step_bytes: int = 0
    num_cards: int = 1
    keeps_dense: bool = False
    offload: OffloadPlan | None = None
    lacks: str = ""

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.weight_bytes - self.kv_bytes - self.step_bytes

    @property
    def host_bytes(self) -> int:
        return 0 if self.offload is None else self.offload.host_bytes

    @property
    def kv_tokens(self) -> int:
        """Length of the longest sequence that the KV cache holds."""
        return self.pages.max_tokens(self.num_pages)

    @property
    def num_pages(self) -> int:
        seqs = self.limits.max_num_seqs
        states = self.state_bytes and self.state_bytes * (seqs + num_snapshots(seqs))
        return max(0, self.kv_bytes - states) // self.pages.page_bytes

    def num_sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens whose keys, values and states fit at once."""
        if self.state_bytes:
            return max_states(self.kv_bytes, self.state_bytes, self.pages, length)
        return self.num_pages // self.pages.num_pages(length)

    def with_states(self, model: ModelConfig, engine: EngineConfig) -> "Fit":
        """Return the fit with the states of a model, and their limit of running sequences."""
        length, each = engine.max_model_len or model.max_position, model.state_bytes(self.dtype)
        seqs = engine.max_num_seqs or limit_states(self.kv_bytes, each, self.pages, length, self.limits.max_num_seqs)
        return replace(self, state_bytes=each, limits=replace(self.limits, max_num_seqs=seqs))


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine loads it.

    config: with its quantization on load. draft: its draft model, which one card of a group holds; None: there is none,
    or it is not on this machine.
    """

    config: ModelConfig
    engine: EngineConfig
    draft: ModelConfig | None = None

    @classmethod
    def read(cls, folder: Path, engine: EngineConfig) -> "ServedModel":
        """Read the model in `folder` as `engine` loads it. Raises ConfigError if it does not support the quantization,
        the activations or the type of states."""
        config = with_state_dtype(quantized_on_load(read_config(folder), engine.quantization), engine.state_dtype)
        with suppress(ModelError):  # the weights are in a store, or broken
            config = as_stored(config, folder)
        resolve_activations(engine.activation_dtype, config.quantization, (), engine.deterministic)
        path = engine.speculation_config.model
        draft = None if path is None else folder_here(path)
        return cls(config, engine, None if draft is None else read_config(draft))

    @property
    def form(self) -> str:
        """Description of the weights and activations."""
        stored = self.config.quantization
        bits = 8 * self.config.dtype.itemsize if stored is None else stored.bits
        activations = self.engine.activation_dtype
        return f"{bits} bit" if activations in ("auto", "none") else f"{bits} bit, {activations}"

    def forms(self) -> list["ServedModel"]:
        """Return the model as it is, then the forms that the job file can choose: 4-bit weights, and fp8 products."""
        found: list[ServedModel] = [self]
        if self.config.quantization is None:
            method = "int4-rtn"
            quantized = quantized_on_load(self.config, method)
            found.append(replace(self, config=quantized, engine=replace(self.engine, quantization=method)))
        if self.engine.activation_dtype == "auto" and not self.engine.deterministic:
            found += [
                replace(each, engine=replace(each.engine, activation_dtype="fp8"))
                for each in found
                if Activations.for_all_weights("fp8").cover(each.config.quantization)
                and each._activations(("fp8",)) == NOT_ROUNDED
            ]
        return found

    def on_device(self, device: torch.device) -> Fit:
        """Return the fit on this machine: on its GPUs, or in the free memory of its processors."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            memory, capability = torch.cuda.mem_get_info(device)[1], (properties.major, properties.minor)
            return self._on_gpu("this machine's GPU", memory, capability, self.engine.tensor_parallel_size)
        dtype, kv_dtype = self._dtypes(device)
        activations = self._activations(native_activations(device, self.engine.kernels))
        weights = weight_bytes(self.config, device, dtype, activations=activations)
        if self.draft is not None:
            weights += weight_bytes(self.draft, device, dtype)
        free = free_cpu_bytes()
        return Fit(
            name="this machine (free)",
            dtype=dtype,
            kv_dtype=kv_dtype,
            activations=activations,
            memory_bytes=free,
            weight_bytes=weights,
            kv_bytes=max(0, int((free - weights) * CPU_SHARE)),
            kv_bytes_per_token=self._kv_bytes_per_token(self.config, kv_dtype),
            pages=self._pages(self.config, kv_dtype, "cpu"),
            limits=self._limits(CPU_LIMITS),
            lacks="engine.cpu_offload_gb needs a GPU" if self.engine.cpu_offload_gb else "",
        ).with_states(self.config, self.engine)

    def on_card(self, card: Card, num_cards: int) -> Fit:
        """Return the fit on a group of `num_cards` cards."""
        return self._on_gpu(card.name, card.memory_bytes, card.compute_capability, num_cards)

    def _on_gpu(self, name: str, memory_bytes: int, capability: tuple[int, int], num_cards: int) -> Fit:
        gpu, engine, config, offload = torch.device("cuda"), self.engine, self.config, None
        dtype, kv_dtype = self._dtypes(gpu)
        lacks = _lacking(engine.activation_dtype, capability)
        activations = self._activations(("fp8",) if capability >= MIN_CAPABILITY else ())
        try:
            config = config.local(num_cards)
            layers = layer_bytes_on_gpu(config, dtype, activations)
            offload = offload_plan(layers, engine.cpu_offload_gb)
        except ConfigError as error:
            lacks = lacks or str(error)
        freed = 0 if offload is None else offload.freed_bytes
        packed = weight_bytes(config, gpu, dtype, keeps_dense=False, activations=activations) - freed
        limits = self._limits(gpu_limits(memory_bytes, capability, packed))
        cached_tokens = cache_before_dense(limits.max_num_seqs, engine.max_model_len or config.max_position)
        draft = draft_cache = 0
        if self.draft is not None:
            draft = weight_bytes(self.draft, gpu, dtype, keeps_dense=False)
            draft_cache = cached_tokens * self.draft.kv_bytes_per_token(kv_dtype)
        budget = int(memory_bytes * engine.gpu_memory_utilization) - draft
        keeps_dense = offload is None and dense_weights_fit(
            config, dtype, kv_dtype, budget - draft_cache, cached_tokens
        )
        weights = weight_bytes(config, gpu, dtype, keeps_dense, activations) - freed
        return Fit(
            name=name,
            dtype=dtype,
            kv_dtype=kv_dtype,
            activations=activations,
            memory_bytes=memory_bytes,
            weight_bytes=weights + draft,
            kv_bytes=max(0, budget - STEP_BYTES - SLACK_BYTES - weights),
            kv_bytes_per_token=self._kv_bytes_per_token(config, kv_dtype),
            pages=self._pages(config, kv_dtype, "cuda"),
            limits=limits,
            step_bytes=STEP_BYTES + SLACK_BYTES,
            num_cards=num_cards,
            keeps_dense=keeps_dense,
            offload=offload,
            lacks=lacks,
        ).with_states(config, engine)

    def _dtypes(self, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of computing and that of the KV cache."""
        dtype = DTYPES.get(self.engine.dtype) or default_dtype(device, self.config.dtype)
        return dtype, resolve_kv_dtype(self.engine.kv_cache_dtype, self.config, dtype)

    def _activations(self, native: Collection[str]) -> Activations:
        """Return the rounding of activations on a device that multiplies the types `native`."""
        engine = self.engine
        return resolve_activations(engine.activation_dtype, self.config.quantization, native, engine.deterministic)

    def _kv_bytes_per_token(self, share: ModelConfig, kv_dtype: torch.dtype) -> int:
        draft = 0 if self.draft is None else self.draft.kv_bytes_per_token(kv_dtype)
        return share.kv_bytes_per_token(kv_dtype) + draft

    def _pages(self, share: ModelConfig, kv_dtype: torch.dtype, device_type: str) -> KVPages:
        """Return the pages of a share of the target's cache, with the draft model's part of them."""
        max_model_len = self.engine.max_model_len or self.config.max_position
        pages = resolve_kv_pages(self.engine, share, kv_dtype, device_type, max_model_len)
        draft = 0 if self.draft is None else self.draft.kv_bytes_per_token(kv_dtype)
        return replace(pages, page_bytes=pages.page_bytes + pages.block_size * draft)

    def _limits(self, default: BatchLimits) -> BatchLimits:
        """Return the engine's own limits of a step, else the defaults."""
        tokens = self.engine.max_num_batched_tokens
        seqs = self.engine.max_num_seqs or min(default.max_num_seqs, tokens or default.max_num_seqs)
        return BatchLimits(seqs, max(tokens or default.max_num_batched_tokens, seqs))


def _lacking(activation_dtype: str, capability: tuple[int, int]) -> str:
    """Return the feature that a GPU lacks and that `with_act_quant` would refuse, or an empty string."""
    if activation_dtype == "int8":
        return "engine.activation_dtype: int8 runs on CPUs only"
    if activation_dtype == "fp8" and capability < MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        return f"engine.activation_dtype: fp8 needs compute capability {needed}, this card has {has}"
    return ""
