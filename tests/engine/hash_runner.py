"""A model whose next token is a hash of all tokens before it, read back through the paged cache.

Any mix-up of blocks, positions or sequences changes the tokens that follow.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.kernels.delta_shape import MAX_LAG, NUM_INPUTS
from pipeline.kernels.reference import greedy, sample
from pipeline.roofline.kv_pages import KVPages

VOCAB = 97
EOS = 96
_STALE = -7


def next_token(context: list[int], memory: int | None = None) -> int:
    state = 1469598103934665603
    for token in context[-memory:] if memory else context:
        state = ((state ^ (token + 1)) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return (state >> 17) % VOCAB


def expected_tokens(
    prompt: list[int], max_tokens: int, max_len: int, eos: bool, memory: int | None = None
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        tokens.append(next_token(tokens, memory))
        if eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class HashRunner:
    """The runner protocol over an integer cache; `bad_token` makes the logits of every context that holds it NaN.

    The next token depends on the last `memory` tokens only, if given, so that texts repeat themselves. If pages are
    shared by layers with a window, these have a cache of their own, whose last tokens must be those of the other one.
    States, if steps have them, must have the tokens before the step, by the rules of `kernels/delta_net.py`.
    """

    vocab_size = hidden_size = VOCAB
    has_vocabulary_head, class_head_CH = True, None
    is_asynchronous = False
    has_graphs = True
    greedy, sample = staticmethod(greedy), staticmethod(sample)

    def __init__(self, num_pages: int, pages: KVPages, bad_token: int | None = None, memory: int | None = None) -> None:
        self.cache = np.full((num_pages * pages.stride, pages.block_size), _STALE, dtype=np.int64)
        self.window_cache = np.full((num_pages * pages.window_stride, pages.block_size), _STALE, dtype=np.int64)
        self.pages, self.block_size, self.bad_token, self.memory = pages, pages.block_size, bad_token, memory
        self.states: dict[int, tuple[list[int], dict[int, int]]] = {}  # by slot: applied tokens, kept ones by position
        self.tokens_per_step: list[int] = []
        self.zeroed: list[int] = []

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        if future is not None:
            step = _with(step, future)
        assert (step.token_id_T >= 0).all(), "a placeholder was computed as a known token"
        self.tokens_per_step.append(len(step.token_id_T))
        self.cache.reshape(-1)[step.slot_mapping_T] = step.token_id_T
        if step.state_slot_S is not None:
            self._recur(step)
        if step.window_slot_mapping_T is not None:
            self.window_cache.reshape(-1)[step.window_slot_mapping_T] = step.token_id_T
            both = [
                set((slot_T // self.block_size // stride).tolist())
                for slot_T, stride in zip(step.slot_mappings, (self.pages.stride, self.pages.window_stride))
            ]
            assert not both[0] & both[1], "both kinds of layers write to a page"
        logits = torch.zeros(len(step.logit_row_R), VOCAB)
        for r, row in enumerate(step.logit_row_R.tolist()):
            s = int(np.searchsorted(step.query_start_S1, row, side="right")) - 1
            length = int(step.context_len_S[s]) - (int(step.query_start_S1[s + 1]) - 1 - row)
            blocks = step.block_table_SM[s, : -(-length // self.block_size)]
            context = self.cache[blocks].reshape(-1)[:length].tolist()
            assert _STALE not in context, "read a slot that was not written since the block was allocated"
            if step.window_block_table_SM is not None:
                assert self.pages.window is not None
                seen = np.arange(max(length - self.pages.window, 0), length)
                blocks = step.window_block_table_SM[s, seen // self.block_size]
                in_window = self.window_cache[blocks, seen % self.block_size].tolist()
                assert in_window == context[-self.pages.window :], "the window has other tokens"
            if self.bad_token is not None and self.bad_token in context:
                logits[r] = float("nan")
            else:
                logits[r, next_token(context, self.memory)] = 1.0
        return logits

    def _recur(self, step: StepInput) -> None:
        assert step.state_slot_S is not None
        for s, slot in enumerate(step.state_slot_S.tolist()):
            first, stop = step.query_start_S1[s : s + 2].tolist()
            end = int(step.context_len_S[s])
            start = end - (stop - first)
            state, kept = self.states.get(slot, ([], {})) if start else ([], {})
            assert len(state) <= start, "the state contains tokens that the step computes"
            state = state + [kept[position] for position in range(len(state), start)]
            blocks = step.block_table_SM[s, : -(-end // self.block_size)]
            assert state == self.cache[blocks].reshape(-1)[:start].tolist(), "the state has other tokens"
            new = step.token_id_T[first:stop].tolist()
            for position, token in zip(range(start, end), new):
                kept = {p: t for p, t in kept.items() if p % NUM_INPUTS != position % NUM_INPUTS} | {position: token}
            self.states[slot] = (state + new if stop - first > MAX_LAG else state), kept

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.states[target] = self.states[source]

    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states, which are the logits too."""
        both = np.union1d(step.logit_row_R, row_N)
        logits = self.execute(replace(step, logit_row_R=both))
        of_both = (torch.from_numpy(np.searchsorted(both, rows)) for rows in (step.logit_row_R, row_N))
        logits_RV, hidden_NV = (logits[rows] for rows in of_both)
        return logits_RV, hidden_NV

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH

    def close(self) -> None: ...

    def zero_pages(self, page_ids: list[int]) -> None:
        self.zeroed += page_ids
        self.fill(page_ids, 0)

    def fill(self, page_ids: list[int], value: int) -> None:
        page_P = np.array(page_ids, dtype=np.int64)
        self.cache[self.pages.block_ids(page_P, windowed=False)] = value
        self.window_cache[self.pages.block_ids(page_P, windowed=True)] = value


def _with(step: StepInput, future: FutureTokens) -> StepInput:
    """Return the step with the tokens that the device has."""
    token_id_T = torch.from_numpy(step.token_id_T.copy())
    future.put_into(token_id_T, torch.from_numpy(future.index_2F))
    return replace(step, token_id_T=token_id_T.numpy())


def before_each_step(engine: Any, hook: Callable[[StepInput, FutureTokens | None], None]) -> None:
    """Call `hook` with what the runner of an engine or a draft model is about to compute; it may raise."""
    execute = engine.runner.execute

    def execute_hooked(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        hook(step, future)
        return execute(step, future)

    engine.runner.execute = execute_hooked  # type: ignore[method-assign]


def watched(engine: Engine) -> list[tuple[int, int]]:
    """Return a list that receives (tokens, future tokens among them) of each step."""
    seen: list[tuple[int, int]] = []
    before_each_step(
        engine,
        lambda step, future: seen.append((len(step.token_id_T), 0 if future is None else len(future.token_index_F))),
    )
    return seen


def check_tokens(
    done: Mapping[Any, Completion], requests: Iterable[Request], max_len: int = 64, memory: int | None = None
) -> None:
    """Assert that every request has the tokens that the model gives it alone."""
    for request in requests:
        eos, prompt = not request.params.ignore_eos, request.prompt_token_ids
        expected = expected_tokens(prompt, request.params.max_tokens, max_len, eos, memory)
        assert done[request.row_id].token_ids == expected, request.row_id


class PlainTokenizer:
    """Tokenizer of token ids without meaning: a text is the list of their numbers."""

    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)

    def close(self) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def hash_engine(
    num_blocks: int,
    block_size: int = 4,
    window: int | None = None,
    blocks_per_page: int = 1,
    bad_token: int | None = None,
    memory: int | None = None,
    is_asynchronous: bool = False,
    tokenizer: Any = None,
    **options: int,
) -> Engine:
    """Build an engine on a HashRunner whose blocks turn stale whenever they are allocated."""
    pages = KVPages(block_size, 0, window, blocks_per_page, stride=blocks_per_page)
    runner = HashRunner(num_blocks, pages, bad_token, memory)
    runner.is_asynchronous = is_asynchronous
    settings = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 16} | options
    if settings.get("has_states"):
        settings.setdefault("num_snapshots", 2)
    engine = Engine.from_parts(runner, tokenizer or PlainTokenizer(), num_pages=num_blocks, kv_pages=pages, **settings)
    assert (engine.scheduler.pacing is not None) == is_asynchronous
    engine.scheduler.pacing = None  # it measures time, and a test's steps must be reproducible
    allocate = engine.pool.allocate

    def allocate_stale(count: int) -> list[int]:
        page_ids = allocate(count)
        runner.fill(page_ids, _STALE)
        return page_ids

    engine.pool.allocate = allocate_stale  # type: ignore[method-assign]
    return engine


LAYERS = "alike", "window", "states"


def tight_engine(rng: np.random.Generator, max_len: int = 64, layers: str = "alike", **options: Any) -> Engine:
    """Build an engine of random sizes, whose cache holds from one to about four long sequences. layers: some keep only
    the last tokens, of a random number, or a state."""
    size = int(rng.choice([1, 3, 4, 8]))
    of_one = -(-max_len // size)
    if layers == "states":
        options["has_states"] = True
    if layers == "window":
        options |= {"window": int(rng.integers(2, 24)), "blocks_per_page": int(rng.integers(1, 4))}
        of_one = KVPages(size, 0, options["window"], options["blocks_per_page"]).num_pages(max_len)
    return hash_engine(
        of_one + int(rng.integers(0, 3 * of_one)),
        size,
        max_model_len=max_len,
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.integers(9, 60)),
        enable_prefix_caching=bool(rng.random() < 0.8),
        **options,
    )
