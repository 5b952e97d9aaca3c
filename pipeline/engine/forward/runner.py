"""Runs a step on the device: host arrays in, logits of the rows that sample out.

Owns the tensors of the KV cache and of the rotary positions, and the torch settings of an engine.
"""

import os
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from pipeline.engine.forward.graphs import Capture, SayProgress, StepGraphs
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.sampling.on_device import SamplingKernels
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import ConfigError
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.memory import on_device
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import KVCache
from pipeline.model.rotation import RotationTables


class Runner(SamplingKernels, Protocol):
    """Interface of a model for the engine: `ModelRunner`, or a test's model that checks the scheduler. Its sampling
    kernels are called only if `is_asynchronous`."""

    vocab_size: int
    hidden_size: int
    has_vocabulary_head: bool
    class_head_CH: np.ndarray | None
    """Weights of a sequence classification head, in float32 on the host."""

    is_asynchronous: bool
    """Whether `execute` returns before the device is done."""

    @property
    def has_graphs(self) -> bool:
        """True if steps of few tokens are captured as graphs."""
        ...

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor: ...
    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]: ...
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor: ...
    def zero_pages(self, page_ids: list[int]) -> None: ...
    def copy_states(self, copies: list[tuple[int, int]]) -> None: ...
    def close(self) -> None: ...


class ModelRunner:
    """Runner of a decoder. All tokens are computed by `execute`, which overwrites the KV slots of the step."""

    def __init__(self, decoder: Decoder, kv: KVCache, max_model_len: int) -> None:
        self.decoder, self.kv, self.block_size = decoder, kv, kv.block_size
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.config.hidden_size
        self.class_head_CH = decoder.class_head_CH
        self.has_vocabulary_head = decoder.lm_head is not None
        self.is_asynchronous = decoder.device.type == "cuda"
        self.greedy, self.sample = decoder.kernels.greedy, decoder.kernels.sample
        self._graphs: StepGraphs | None = None
        # Sized for this engine's maximum length, which is below the checkpoint's if the cache is smaller.
        config = decoder.config
        self.rotations = RotationTables(config.ropes, config.head_dim, max_model_len, decoder.device)

    @torch.inference_mode()
    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        """Compute the logits (R, vocabulary), in the model's dtype, of the rows `step.logit_row_R`. future: tokens for
        which the step has placeholders."""
        if self._graphs is not None and self.is_captured(step):
            attn_metadata = attention_input(step, torch.from_numpy(np.stack(step.slot_mappings)), self.block_size)
            return self.decoder.logits(self._graphs.run(step, attn_metadata, future))
        numbers_NT = self._numbers(step)
        if future is not None:
            future.put_into(numbers_NT[0], on_device(future.index_2F, self.decoder.device))
        attn_metadata = attention_input(step, numbers_NT[2:], self.block_size)
        adapter_T = self._adapters_of(step)
        hidden_RH = self._forward(numbers_NT[0], numbers_NT[1], attn_metadata, step.logit_row_R, adapter_T)
        return self.decoder.logits(hidden_RH)

    def is_captured(self, step: StepInput) -> bool:
        """Return whether `execute` replays a captured step."""
        has_adapters = step.adapter_S is not None and self.decoder.adapters is not None
        return self._graphs is not None and not has_adapters and self._graphs.supports(step)

    def computed_rows(self, step: StepInput, row_N: np.ndarray) -> np.ndarray:
        """Return the tokens for which the last layer of `execute_and_read` computes more than keys and values."""
        row_M = np.union1d(step.logit_row_R, row_N)
        # For few tokens the last layer computes only those, each as its own sequence; for many that is slower.
        return row_M if 2 * len(row_M) <= len(step.token_id_T) else np.arange(len(step.token_id_T))

    @torch.inference_mode()
    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits as `execute`, and the last hidden states (N, H) of the step's tokens row_N, ascending."""
        computed_M = self.computed_rows(step, row_N)
        numbers_NT = self._numbers(step)
        attn_metadata = attention_input(step, numbers_NT[2:], self.block_size)
        hidden_MH = self._forward(numbers_NT[0], numbers_NT[1], attn_metadata, computed_M, self._adapters_of(step))
        row_sets = (np.searchsorted(computed_M, rows) for rows in (step.logit_row_R, row_N))
        hidden_RH, hidden_NH = (hidden_MH[on_device(rows, hidden_MH.device)] for rows in row_sets)
        return self.decoder.logits(hidden_RH), hidden_NH

    @torch.inference_mode()
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return logits (R, vocabulary), in the model's dtype, of hidden states from `execute_and_read`, on any
        device."""
        return self.decoder.logits(hidden_RH.to(self.decoder.device, self.decoder.dtype))

    def _numbers(self, step: StepInput) -> torch.Tensor:
        """Return the token ids, positions and slots of each token, on the device."""
        return on_device(np.stack([step.token_id_T, step.position_T, *step.slot_mappings]), self.decoder.device)

    def _forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attn_metadata: AttentionInput,
        row_R: np.ndarray,
        adapter_T: np.ndarray | None = None,
    ) -> torch.Tensor:
        rotations = self.rotations.at(positions_T)
        return self.decoder.forward(token_ids_T, positions_T, rotations, attn_metadata, row_R, self.kv, adapter_T)

    def _adapters_of(self, step: StepInput) -> np.ndarray | None:
        """Return the adapter of each token; None if no token has one, or the model has none, as a draft model."""
        if step.adapter_S is None or self.decoder.adapters is None:
            return None
        return np.repeat(step.adapter_S, np.diff(step.query_start_S1))

    @torch.inference_mode()
    def capture_steps(
        self,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_queries: int,
        max_tokens: int,
        log: SayProgress,
        max_mixed_tokens: int = 0,
    ) -> None:
        """Capture steps in which each sequence computes at most `max_queries` tokens, and mixed steps of up to
        `max_mixed_tokens` tokens.

        The KV cache must have a spare page that no sequence uses.
        """
        assert self.kv.has_spare_page
        max_blocks = -(-self.rotations.num_positions // self.block_size)
        self._graphs = StepGraphs(
            self.decoder,
            self.kv,
            lambda ids, positions, attn_metadata: self._forward(ids, positions, attn_metadata, np.arange(len(ids))),
            capture,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            max_queries=max_queries,
            max_tokens=max_tokens,
            max_mixed_tokens=max_mixed_tokens,
            log=log,
        )

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    def zero_pages(self, page_ids: list[int]) -> None:
        self.kv.fill(page_ids, 0.0)

    @torch.inference_mode()
    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        """Copy states from one slot to another, in this order. Takes no memory, so that it cannot fail."""
        for state in self.kv.states:
            for tensor in () if state is None else state.tensors:
                for source, target in copies:
                    tensor[target].copy_(tensor[source])

    def close(self) -> None:
        """Nothing to end: weights and cache are freed with this object."""


def attention_input(step: StepInput, slot_GT: torch.Tensor, block_size: int) -> AttentionInput:
    """Return the layout of a step's queries and keys. slot_GT: `step.slot_mappings`."""
    sequences, windowed = (step.query_start_S1, step.context_len_S), None
    if step.window_block_table_SM is not None:
        windowed = AttentionInput(*sequences, step.window_block_table_SM, slot_GT[1], block_size)
    full = AttentionInput(*sequences, step.block_table_SM, slot_GT[0], block_size, windowed=windowed)
    return full if step.state_slot_S is None else replace(full, state_slot_S=step.state_slot_S)


class DeviceContext:
    """Context manager that sets torch's CUDA device and number of CPU threads for this engine, and restores both. They
    are settings of the process, which several engines and their caller share. Reentrant. Takes about half a microsecond
    on a CPU."""

    def __init__(self, num_threads: int | None, device: torch.device) -> None:
        """num_threads: None keeps the caller's. A GPU `device` has an index.

        Raises ConfigError for less than one thread.
        """
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads = {num_threads}: expected at least 1")
        self._num_threads = None if num_threads is None else min(num_threads, os.cpu_count() or 1)
        self._cuda: int | None = None
        if device.type == "cuda":
            self._cuda = device.index
        self._before: list[tuple[int, torch.cuda.device | None]] = []

    @property
    def num_threads(self) -> int:
        return self._num_threads or torch.get_num_threads()

    def __enter__(self) -> None:
        before = torch.get_num_threads()
        if self._num_threads is not None and self._num_threads != before:
            torch.set_num_threads(self._num_threads)
        on_device = None
        if self._cuda is not None:
            on_device = torch.cuda.device(self._cuda)  # Triton launches on the current device, and events record there
            on_device.__enter__()
        self._before.append((before, on_device))

    def __exit__(self, *_: object) -> None:
        before, on_device = self._before.pop()
        if on_device is not None:
            on_device.__exit__(None, None, None)
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
