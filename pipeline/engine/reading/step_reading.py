"""Feeds one step's hidden states to the readers of its sequences, as numbers on the host.

Logits of a large vocabulary are never in memory for a whole step: blocks of rows are multiplied with the output
embedding, and only the requested log-probabilities of each row are kept.

Suffixes: N tokens of the step whose hidden states are needed, P pairs of such a token and a token whose log-probability
is needed there, R readers, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pipeline.engine.forward.runner import Runner
from pipeline.engine.reading.readers import LogprobReader, PoolingReader, StatesReader
from pipeline.engine.schedule.slot_table import SlotTable, ranges
from pipeline.engine.schedule.step_plan import StepPlan

LOGIT_VALUES = 1 << 25  # 128 MiB of logits at once, plus some copies: 1,048 rows of a vocabulary of 32,000


@dataclass(frozen=True)
class StepReading:
    """row_N: rows of the step, ascending. Sequence s of those with a reader has the hidden states of positions
    start_S[s] to stop_S[s], which start at index first_S[s] of N."""

    row_N: np.ndarray
    slot_S: np.ndarray
    start_S: np.ndarray
    stop_S: np.ndarray
    first_S: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        count_S = self.stop_S - self.start_S
        object.__setattr__(self, "first_S", np.cumsum(count_S) - count_S)

    @classmethod
    def of_plan(cls, plan: StepPlan, table: SlotTable) -> "StepReading | None":
        """Build the reading of a step; None if no reader needs any of it."""
        start_S = np.maximum(plan.start_S, table.read_from[plan.slot_S])
        stop_S = np.minimum(plan.start_S + plan.count_S, table.read_to[plan.slot_S])
        read = np.flatnonzero(start_S < stop_S)
        if not len(read):
            return None
        row_S = np.cumsum(plan.count_S) - plan.count_S + start_S - plan.start_S
        start_S, stop_S = start_S[read], stop_S[read]
        return cls(ranges(row_S[read], stop_S - start_S), plan.slot_S[read], start_S, stop_S)

    def read_outputs(self, hidden_NH: torch.Tensor, model: Runner, table: SlotTable) -> None:
        """Pass the step's hidden states to the readers: to all of them, or to none if memory runs out."""
        updates = self._logprobs(hidden_NH, model, table) + self._vectors(hidden_NH, table)
        updates += self._states(hidden_NH, table)
        for update in updates:
            update()
        for slot in self.slot_S[self.stop_S == table.read_to[self.slot_S]].tolist():
            table.has_been_read(slot)

    def _logprobs(self, hidden_NH: torch.Tensor, model: Runner, table: SlotTable) -> list[Callable[[], None]]:
        readers: list[tuple[LogprobReader, slice]] = []
        indices, tokens = [], []
        for slot, start, stop, first in self._sequences():
            reader = table.at(slot).reader
            if isinstance(reader, LogprobReader):
                wanted = reader.wanted(start, stop)
                readers.append((reader, wanted))
                indices.append(reader.position_P[wanted] - start + first)
                tokens.append(reader.token_P[wanted])
        if not readers:
            return []
        num_top = max(reader.num_top for reader, _ in readers)
        logprob_P, top_P = token_logprobs(hidden_NH, model, np.concatenate(indices), np.concatenate(tokens), num_top)
        begin, updates = 0, []
        for reader, wanted in readers:
            end = begin + wanted.stop - wanted.start
            top = None
            if reader.num_top:
                top = [pairs[: reader.num_top] for pairs in top_P[begin:end]]
            updates.append(partial(reader.put, wanted, logprob_P[begin:end], top))
            begin = end
        return updates

    def _vectors(self, hidden_NH: torch.Tensor, table: SlotTable) -> list[Callable[[], None]]:
        readers: list[tuple[PoolingReader, int]] = []
        alone: list[tuple[PoolingReader, int, int]] = []
        sums: list[torch.Tensor] = []
        for slot, start, stop, first in self._sequences():
            reader = table.at(slot).reader
            if not isinstance(reader, PoolingReader):
                continue
            if stop - start == 1:
                alone.append((reader, start, first))
            else:
                readers.append((reader, start))
                sums.append(hidden_NH[first : first + stop - start].float().sum(0))
        updates = []
        if alone:  # usually all: gathered and copied at once
            one_RH = hidden_NH[[first for *_, first in alone]].float().cpu().numpy()
            updates += [partial(reader.put, start, one_H) for (reader, start, _), one_H in zip(alone, one_RH)]
        if readers:
            sum_RH = torch.stack(sums).cpu().numpy()
            updates += [partial(reader.put, start, sum_H) for (reader, start), sum_H in zip(readers, sum_RH)]
        return updates

    def _states(self, hidden_NH: torch.Tensor, table: SlotTable) -> list[Callable[[], None]]:
        updates = []
        for slot, start, stop, first in self._sequences():
            reader = table.at(slot).reader
            if isinstance(reader, StatesReader):
                states_NH = hidden_NH[first : first + stop - start].float().cpu().numpy()
                updates.append(partial(reader.put, start, states_NH))
        return updates

    def _sequences(self) -> list[tuple[int, int, int, int]]:
        return list(zip(self.slot_S.tolist(), self.start_S.tolist(), self.stop_S.tolist(), self.first_S.tolist()))


@torch.inference_mode()
def token_logprobs(
    hidden_NH: torch.Tensor, model: Runner, index_P: np.ndarray, token_P: np.ndarray, num_top: int = 0
) -> tuple[np.ndarray, list[tuple[tuple[int, float], ...]]]:
    """Return the log-probability of token_P[p] after the hidden state with index place_P[p] (ascending), and, with
    num_top, the most likely tokens there; in float32, of the raw logits. NaN where logits are not finite."""
    row_U, pair_P = np.unique(index_P, return_inverse=True)
    logprob_P, top_U = np.zeros(len(index_P)), []
    num_top = min(num_top, model.vocab_size)
    size = max(LOGIT_VALUES // model.vocab_size, 1)
    for begin in range(0, len(row_U), size):
        end = min(begin + size, len(row_U))
        logits_UV = model.logits(hidden_NH[torch.from_numpy(row_U[begin:end]).to(hidden_NH.device)])
        # log_softmax computes each row independently of the others; torch's logsumexp of a single row does not.
        logprob_UV = logits_UV.float().log_softmax(-1)
        lo, hi = np.searchsorted(pair_P, (begin, end))
        row_p, token_p = (
            torch.from_numpy(index).to(logits_UV.device) for index in (pair_P[lo:hi] - begin, token_P[lo:hi])
        )
        logprob_P[lo:hi] = logprob_UV[row_p, token_p].cpu().numpy()
        if num_top:
            top = logprob_UV.topk(num_top, dim=-1)
            top_U += [tuple(zip(ids, row)) for ids, row in zip(top.indices.tolist(), top.values.tolist())]
    return logprob_P, [top_U[row] for row in pair_P.tolist()] if num_top else []
