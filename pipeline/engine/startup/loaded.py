"""A checkpoint's weights on a device. A runner is made from them once the size of the KV cache is known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoints.adapters import locate_adapter
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.startup.dummy_steps import (
    CapturedShape,
    compute_step_kinds,
    forward_bytes,
    largest_step_bytes,
    step_input_shape,
)
from pipeline.engine.startup.memory import cache_before_dense, dense_weights_fit, gpu_share_bytes
from pipeline.engine.startup.resolve import Resolved
from pipeline.errors import ModelError
from pipeline.formatting import shown_bytes
from pipeline.kernels.activations.act_quant import NOT_ROUNDED, ActQuantLinears, with_act_quant
from pipeline.kernels.contract import Kernels
from pipeline.kernels.ranks import ONE_RANK, OneRank
from pipeline.kernels.select import select_kernels
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import KVCache, single_kv_pages
from pipeline.model.load import as_stored
from pipeline.model.lora import Adapters, read_adapter
from pipeline.model.offload import CudaCopies, LayerOffload
from pipeline.model.sharding import Share
from pipeline.roofline.kv_pages import KVPages
from pipeline.tokenization.tokenizer import Tokenizer
from pipeline.weights.formats import has_small_blocks


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model. kv_dtype: dtype of its KV cache."""

    config: ModelConfig
    decoder: Decoder
    kernels: Kernels
    kv_dtype: torch.dtype

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        resolved: Resolved,
        adapters: Mapping[str, str] | None = None,
        ranks: OneRank = ONE_RANK,
        reserved_bytes: int = 0,
    ) -> "LoadedModel":
        """Load this rank's share of the weights. config: of the whole model. adapters: see `EngineConfig`.
        reserved_bytes: of a GPU, for what takes precedence over 16-bit copies of 4-bit weights besides this model's own
        cache. Raises ModelError when the tensors of the checkpoint or of an adapter do not match its config,
        ConfigError when activations are to be quantized and the device does not support it."""
        share = Share(config, ranks.rank, ranks.size)
        updates = [
            share.updates(read_adapter(locate_adapter(path, f"adapter {name}"), config))
            for name, path in (adapters or {}).items()
        ]
        plan = resolved.offload
        keeps_dense = resolved.device.type == "cpu" or (
            plan is None
            and dense_weights_fit(
                config.local(ranks.size),
                resolved.dtype,
                resolved.kv_dtype,
                gpu_share_bytes(resolved.device, resolved.gpu_memory_utilization) - reserved_bytes,
                cache_before_dense(resolved.max_num_seqs, resolved.max_model_len),
            )
        )
        keeps_dense = bool(ranks.least(int(keeps_dense)))  # all ranks round alike
        kernels = select_kernels(resolved.device, resolved.dtype, resolved.kernels, keeps_dense, resolved.deterministic)
        if resolved.activations != NOT_ROUNDED:
            kernels = with_act_quant(kernels, resolved.activations, resolved.device)
        if ranks.size > 1:
            kernels = replace(kernels, fused_layer_loop=None)  # it computes whole layers
        config = config.for_length(resolved.max_model_len)
        offload = plan and LayerOffload(plan.layers, CudaCopies(resolved.device), resolved.device)
        decoder = Decoder(folder, config, kernels, resolved.dtype, resolved.device, offload, ranks)
        decoder.adapters = Adapters(updates, kernels, resolved.device) if updates else None
        return cls(decoder.config, decoder, kernels, resolved.kv_dtype)

    @classmethod
    def load_draft(cls, path: str, target: Tokenizer, resolved: Resolved, reserved_bytes: int) -> "LoadedModel":
        """Load the draft model in `path`. reserved_bytes: see `load`. Raises ModelError when its token ids differ from
        the target's."""
        folder = locate_model(path)
        if read_config(folder).state_bytes(resolved.dtype):
            raise ModelError(
                f"speculation.model {path}: a draft model with states (Gated DeltaNet) is not supported; use another, "
                "or speculation.method: lookup"
            )
        differs = Tokenizer.from_folder(str(folder)).differs_from(target)
        if differs is not None:
            raise ModelError(
                f"speculation.model {path}: its tokens differ from those of model.path ({differs}), so it cannot draft "
                "for it; use a draft model of the same family, or remove the key"
            )
        # Drafts need no exactness.
        ordinary = replace(resolved, activations=NOT_ROUNDED, deterministic=False, offload=None)
        return cls.load(folder, as_stored(read_config(folder), folder), ordinary, reserved_bytes=reserved_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(self.kv_dtype)

    @property
    def weights(self) -> str:
        """Description of its weights for the log."""
        stored = self.config.quantization
        kind = "dense" if stored is None else str(stored)
        adapters = self.decoder.adapters
        if adapters is not None:
            kind += f"; adapters of {shown_bytes(adapters.num_bytes)}"
        linears = self.kernels.prepare_linear
        if stored is not None and stored.has_activations and not isinstance(linears, ActQuantLinears):
            kind += ", activations not quantized"
        offload = self.decoder.offload
        if offload is not None:
            kind += f"; {offload.num_layers} of {self.config.num_layers} layers in host memory"
            kind += f" ({shown_bytes(offload.host_bytes)})"
        shares = [each.experts.width for each in self.config.layers if each.experts and each.experts.is_share]
        if shares and self.decoder.device.type != "cpu" and has_small_blocks(stored, shares[0]):
            kind += "; down of experts dequantized, because the ranks' shares cut its blocks"
        if isinstance(linears, ActQuantLinears):
            kind += f"; inputs of {linears.num_rounded} of {linears.num_all} linears in {linears.activations.dtype}"
        return kind

    def compile_kernels(
        self,
        resolved: Resolved,
        captured: CapturedShape,
        pages: KVPages,
        num_threads: int,
        log: Callable[[str], None],
    ) -> None:
        """Compile all kernels that steps may launch; see `compute_step_kinds`. Nothing is run. pages: of its cache."""
        if self.kernels.compile_ahead is None:
            return
        runner, compile_ahead = self._small_runner(resolved, pages), self.kernels.compile_ahead
        offload = self.decoder.offload
        self.decoder.offload = None  # no weights are read
        self.decoder.ranks.leader_first(  # the others find the kernels in its cache
            lambda: compile_ahead(lambda: compute_step_kinds(runner, resolved, captured), log, num_threads)
        )
        self.decoder.offload = offload

    def step_bytes(self, resolved: Resolved) -> int:
        """Return the memory of the largest step on a GPU besides weights and KV cache."""
        return largest_step_bytes(self._small_runner(resolved), resolved)

    def captured_bytes(self, resolved: Resolved, max_tokens: int) -> int:
        """Return an upper bound of the memory that captured steps of up to `max_tokens` tokens keep on a GPU: that of
        the largest one, in which the others fit. Logits are not included."""
        if self.kernels.graph_attention is None:
            return 0
        return forward_bytes(self._small_runner(resolved), resolved, max_tokens)

    def _small_runner(self, resolved: Resolved, pages: KVPages | None = None) -> ModelRunner:
        """Return a runner for the largest step, whose sequences all read and write the same blocks. pages: by default,
        of a block of each layer."""
        num_tokens, num_sequences, _ = step_input_shape(resolved)
        num_pages = -(-num_tokens // num_sequences // resolved.block_size) + 1
        pages = pages or single_kv_pages(self.config, resolved.block_size, self.kv_dtype)
        return self.runner(num_pages, pages, resolved.max_model_len)

    def runner(self, num_pages: int, pages: KVPages, max_model_len: int, num_states: int = 1) -> ModelRunner:
        """Return a runner with a KV cache of this size. num_states: sequences that have states at once."""
        device, dtype = self.decoder.device, self.decoder.dtype
        spare = self.decoder.kernels.graph_attention is not None
        kv = KVCache.allocate(self.config, num_pages, pages, self.kv_dtype, device, spare, num_states, dtype)
        return ModelRunner(self.decoder, kv, max_model_len)
