"""Steps captured once as CUDA graphs and replayed: launching some hundred kernels one by one takes longer than running
them.

A step can be replayed if each sequence computes few tokens: plain decoding, verifying drafts, a draft model's passes.
So can a mixed step, in which sequences compute prompts, up to some number of tokens. Steps are padded to one of a few
sizes, each of which has a graph. Padding tokens read token 0 at position 0, write their key and value into a page that
no sequence has, and attend to nothing. Everything that changes from step to step is in tensors at fixed addresses:
token ids, positions and slots here, the attention metadata in `kernels.graph_attention.GraphAttention`. Each size has
a graph for each kind of step that the attention kernels distinguish. Other steps are launched kernel by kernel.

All numbers of a step reach the device in one copy, including those that are read after the graph, and the first kernel
of the graph distributes them: each copy takes some 2 us of the device, and more of the host.

Suffixes: those of `kernels/contract.py`; P tokens of a padded step, H hidden.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import PipelineError
from pipeline.kernels.attention_input import AttentionInput, CapturedStates
from pipeline.kernels.cache import FP8
from pipeline.kernels.graph_attention import FutureNumbers, GraphAttention, GraphShape, LayerKind
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import KVCache

SayProgress = Callable[[int, int], None]  # number captured, total
Forward = Callable[
    [torch.Tensor, torch.Tensor, AttentionInput], torch.Tensor
]  # token ids, positions -> last hidden states
Capture = Callable[[Callable[[], None]], Callable[[], None]]  # runs a function, and returns one that repeats its work


class CudaCapture:
    """Capture as CUDA graphs that share one memory pool: only one of them runs at a time.

    Raises PipelineError with the reason if a function cannot be captured. torch is usable afterwards: the previous
    stream is restored, its default generator works again, and the next capture gets a new pool.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        function()  # compilation and allocation at the first call must not be captured
        graph, before, reason = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            # NCCL's watchdog thread queries events meanwhile, which must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    function()
                except Exception as error:
                    reason = error  # the end of the capture fails then too, with a less specific error
                    raise
        except Exception as error:
            reason = reason or error
            # `torch.cuda.graph` restores none of this if the end of the capture fails too.
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # the old state is still marked as being captured
            self._pool = torch.cuda.graph_pool_handle()
            raise PipelineError(f"CUDA graph capture failed: {type(reason).__name__}: {reason}") from reason
        return graph.replay


@dataclass(frozen=True)
class _Graph:
    of_kind: tuple[Callable[[], None], ...]  # replays of each kind of step in which sequences compute few tokens
    mixed: Callable[[], None] | None


def graph_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens that steps are padded to, up to `max_tokens`: padding adds at most an eighth above
    64 tokens, and a sixteenth above 256, where a step's time grows with its tokens."""
    return _sizes(1, max_tokens, 16)


def mixed_sizes(max_tokens: int) -> list[int]:
    """Return the sizes of mixed steps; none if `max_tokens` is 0. Padding adds at most an eighth above 64 tokens:
    finer sizes would lengthen startup, and mixed steps are captured where the device has time to spare."""
    return _sizes(16, max_tokens, 8) if max_tokens else []


def _sizes(size: int, max_tokens: int, parts: int) -> list[int]:
    """Return sizes from `size` on. Padding adds at most an eighth above 64 tokens, 1 / parts above 256."""
    sizes = []
    while size < max_tokens:
        sizes.append(size)
        size = 2 * size if size < 8 else size + max(8, (1 << size.bit_length() - 1) // (parts if size >= 256 else 8))
    return [*sizes, max_tokens]


class StepGraphs:
    """All graphs of one runner, captured at startup when nothing is running."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        forward: Forward,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_blocks: int,
        max_queries: int,
        max_tokens: int,
        max_mixed_tokens: int,
        log: SayProgress,
    ) -> None:
        """Capture steps of up to `max_tokens` tokens: at most `max_num_seqs` sequences of at most `max_blocks` blocks,
        each with at most `max_queries` tokens, or the maximum of the kernels if that is less. Also capture mixed steps
        of up to `max_mixed_tokens` tokens (0: none). The last page of `kv` must belong to no sequence."""
        config, self._device, block_size = decoder.config, decoder.device, kv.block_size
        spare, kinds = np.array([kv.num_pages - 1]), (False, True) if any(kv.is_windowed) else (False,)
        padding_slots = [int(kv.pages.block_ids(spare, windowed)[0]) * block_size for windowed in kinds]
        self._num_kinds, self._spare_state = len(kinds), kv.spare_state
        of_states = [] if self._spare_state is None else [self._spare_state, 0, 0, 0]
        self._padding = np.array([0, 0, *padding_slots, *of_states])[:, None]
        self._num_rows = len(self._padding)
        assert decoder.kernels.graph_attention is not None
        with_attention = [index for index, layer in enumerate(config.layers) if layer.mixer is None]
        kinds_of_layers = [LayerKind(config.layers[index].window, *config.heads(index)) for index in with_attention]
        shape = GraphShape(
            max_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
            num_heads=config.num_heads,
            kinds=tuple(dict.fromkeys(kinds_of_layers)),
            max_queries=max_queries,
            max_tokens=max_tokens,
            max_mixed_tokens=max_mixed_tokens,
            # Token ids, positions, slots, and of each sequence what `CapturedStates` has; then targets and sources of
            # future tokens, at most one per sequence; then the rows whose logits are computed.
            num_numbers=(self._num_rows + 1) * max(max_tokens, max_mixed_tokens) + 2 * max_num_seqs,
            with_fp8_cache=kv.layers[0].k_CBKD.dtype == FP8,
            has_window_blocks=len(kinds) > 1,
        )
        self.max_num_seqs = max_num_seqs
        self._attention: GraphAttention = decoder.kernels.graph_attention(shape, self._device)
        self._sizes = np.array(graph_sizes(min(max_tokens, max_num_seqs * self._attention.max_queries)))
        self._mixed_sizes = np.array(mixed_sizes(self._attention.max_mixed_tokens), dtype=np.int64)
        sizes = np.union1d(self._sizes, self._mixed_sizes).tolist()
        # All graphs write here: only one runs at a time, and otherwise each would keep its own output.
        self._hidden_PH = torch.empty(sizes[-1], config.hidden_size, dtype=decoder.dtype, device=self._device)
        self._graphs: dict[int, _Graph] = {}
        for done, size in enumerate(reversed(sizes)):  # the largest first: the others fit in its memory
            log(done, len(sizes))
            self._graphs[size] = self._capture_size(size, block_size, forward, capture)

    def _capture_size(self, size: int, block_size: int, forward: Forward, capture: Capture) -> _Graph:
        rows, hidden_PH = self._num_rows, self._hidden_PH[:size]
        numbers_NP = self._attention.numbers[: rows * size].view(rows, size)
        padding_NP = np.repeat(self._padding, size)
        dummy = AttentionInput.one_sequence(1, block_size)
        self._attention.prepare_replay(replace(dummy, windowed=dummy), padding_NP)

        def captured(plans: dict[Hashable, Any], max_count: int) -> Callable[[], None]:
            each_token = (
                np.arange(size + 1, dtype=np.int32),
                np.ones(size, dtype=np.int32),
                np.zeros((size, 1), dtype=np.int32),
            )
            slot_mappings = numbers_NP[2 : 2 + self._num_kinds]
            of_kind = [AttentionInput(*each_token, slot_P, block_size, plans) for slot_P in slot_mappings]
            attn_metadata = replace(of_kind[0], windowed=of_kind[-1])
            if self._spare_state is not None:
                states = CapturedStates(numbers_NP[2 + self._num_kinds :], max_count)
                attn_metadata = replace(attn_metadata, captured_states=states)

            def step() -> None:
                self._attention.unpack()
                hidden_PH.copy_(forward(numbers_NP[0], numbers_NP[1], attn_metadata))

            return capture(step)

        kinds = self._attention.plans[: None if size > 1 else 1] if size in self._sizes else ()
        mixed = captured(self._attention.mixed_plans(size), size) if size in self._mixed_sizes else None
        return _Graph(tuple(captured(plans, self._attention.max_queries) for plans in kinds), mixed)

    def supports(self, step: StepInput) -> bool:
        num_tokens, num_seqs = len(step.token_id_T), len(step.context_len_S)
        if num_seqs > self.max_num_seqs:
            return False
        if not self._is_mixed(step):
            return num_tokens <= self._sizes[-1]
        index = int(np.searchsorted(self._mixed_sizes, num_tokens))
        if index == len(self._mixed_sizes):
            return False
        return self._attention.fits_mixed(np.diff(step.query_start_S1), int(self._mixed_sizes[index]))

    def _is_mixed(self, step: StepInput) -> bool:
        if len(step.token_id_T) == len(step.context_len_S):
            return False
        return int(np.diff(step.query_start_S1).max()) > self._attention.max_queries

    def run(self, step: StepInput, attn_metadata: AttentionInput, future: FutureTokens | None) -> torch.Tensor:
        """Return the last hidden states of the step's rows that need logits; the next run overwrites them.

        Logits are not part of a graph: each graph would keep its own, and they are the largest tensor.
        """
        num_tokens, is_mixed = len(step.token_id_T), self._is_mixed(step)
        sizes = self._mixed_sizes if is_mixed else self._sizes
        size = int(sizes[np.searchsorted(sizes, num_tokens)])
        graph = self._graphs[size]
        wants_all = len(step.logit_row_R) == num_tokens
        index_F2 = np.zeros(0, dtype=np.int64) if future is None else future.index_2F.ravel()
        row_R = np.zeros(0, dtype=np.int64) if wants_all else step.logit_row_R
        future_at = self._num_rows * size
        staged = np.empty(future_at + len(index_F2) + len(row_R), dtype=np.int64)
        padded_NP = staged[:future_at].reshape(self._num_rows, size)
        padded_NP[:] = self._padding
        of_tokens = step.token_id_T, step.position_T, *step.slot_mappings
        padded_NP[: len(of_tokens), :num_tokens] = of_tokens
        if step.state_slot_S is not None and self._spare_state is not None:
            starts_S1, contexts_S = step.query_start_S1, step.context_len_S
            of_sequences = step.state_slot_S, starts_S1[:-1], np.diff(starts_S1), contexts_S
            padded_NP[len(of_tokens) :, : len(contexts_S)] = of_sequences
        rows_at = future_at + len(index_F2)
        staged[future_at:rows_at] = index_F2
        staged[rows_at:] = row_R
        future_numbers = (
            None if future is None else FutureNumbers(future_at, len(future.token_index_F), future.token_ids_R)
        )
        if is_mixed:
            assert graph.mixed is not None
            self._attention.prepare_mixed_replay(attn_metadata, staged, future_numbers)
            replay = graph.mixed
        else:
            replay = graph.of_kind[self._attention.prepare_replay(attn_metadata, staged, future_numbers)]
        replay()
        if wants_all:
            return self._hidden_PH[:num_tokens]
        return self._hidden_PH[self._attention.numbers[rows_at : len(staged)]]
