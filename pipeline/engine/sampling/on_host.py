"""From logits to the next token of each row, on the host; on_device.py has the same for a device that works beside it.

Owns the order of the sampling options, which is vLLM's:

    fp32 logits -> min_tokens mask -> repetition penalty -> presence and frequency penalties -> temperature
    -> min_p -> top_k -> top_p -> one draw

top_k keeps every token that ties with the k-th best. min_p is relative to the best token's probability. top_p
is relative to what top_k and min_p left: the fewest best tokens whose probabilities reach top_p; of equal
ones the lowest ids. Greedy rows (temperature 0) take the best token after masks and penalties, of equal ones
the lowest id. Log-probabilities are those of the raw logits.

A draw uses one uniform number that depends on the row's seed and the token's position alone (`uniforms`), and
every step works row by row, so a row draws the same token in any batch. Rows that need a feature are copied
out and worked on; a batch of plain greedy rows costs one pass over the logits. Options come as arrays, so no row costs
Python of its own, but for the masks of min_tokens and the log-probabilities that are reported.

Suffixes: R rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch, tokens_and_finite
from pipeline.engine.sampling.logprobs import AskedLogprobs
from pipeline.engine.sampling.penalties import LateIds, adjusted, counts_output, on_rows
from pipeline.engine.sampling.random_numbers import PLAIN, draw, uniforms
from pipeline.engine.sampling.rejection import DraftLaw, settle_drafts
from pipeline.engine.sampling.top_p import weights

_BLOCK_VALUES = 1 << 20  # of logits that are drawn from at a time on CPU: 4 MiB


def greedy(logits_RV: torch.Tensor) -> SamplerOutput:
    """What `sample` gives where all rows are greedy and want nothing else: one pass and one transfer to the host."""
    if _is_quick_in_numpy(logits_RV):
        best, token_ids = _best_in_numpy(logits_RV.numpy())
        finite = np.isfinite(best)
        return SamplerOutput(token_ids if finite.all() else np.where(finite, token_ids, 0), finite, {})
    best_R, token_ids_R = logits_RV.max(dim=-1)
    return SamplerOutput(*_on_host(token_ids_R, torch.isfinite(best_R)), {})


def sample(logits_RV: torch.Tensor, batch: SamplingBatch, law: DraftLaw | None = None) -> SamplerOutput:
    """The next token of each row. `logits_RV` may have any float dtype, on any device, and is not changed.

    `law`: drafts of some rows and what they were drawn from; drawn rows among them keep their draft or redraw it.
    """
    plan = _Plan.of(batch)
    best_R, token_ids_R = _best(logits_RV)
    if len(plan.changed):
        rows = on_rows(plan.changed, logits_RV)
        z_RV = adjusted(logits_RV, batch, plan.changed)
        best_R, token_ids_R = best_R.float(), token_ids_R.clone()
        best_changed_R, token_ids_R[rows] = _best(z_RV)
        # a mask or penalty may leave nothing, but never makes a broken row good
        best_R[rows] = torch.where(torch.isfinite(best_R[rows]), best_changed_R, best_R[rows])
    finite_R = torch.isfinite(best_R)
    if len(plan.drawn):
        token_ids_R = token_ids_R.clone()
        for drawn in _blocks(plan.drawn, logits_RV):
            w_RV = weights(logits_RV, batch, drawn)
            u_R = uniforms(batch.seeds[drawn], batch.positions[drawn], PLAIN)
            drawn_ids_R = draw(w_RV, torch.from_numpy(u_R).to(w_RV.device))
            if law is not None:
                settle_drafts(drawn_ids_R, w_RV, batch, drawn, law)
            token_ids_R[on_rows(drawn, logits_RV)] = drawn_ids_R
    token_ids, finite = _on_host(token_ids_R, finite_R)
    asked = AskedLogprobs.of(logits_RV, batch, token_ids_R)
    return SamplerOutput(token_ids, finite, {} if asked is None else asked.by_row(token_ids, finite))


def _blocks(rows: np.ndarray, like: torch.Tensor) -> list[np.ndarray]:
    """`rows` in blocks: some dozen passes over copies of their values follow, and a flat row widens what is looked at
    of all rows beside it. A row's draw is its own, so blocks change nothing but time and memory."""
    if like.device.type != "cpu":
        return [rows]
    size = max(_BLOCK_VALUES // like.shape[1], 1)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _best(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and the lowest id that has it. NaN is the largest of all, so one pass also says
    whether a row can be used."""
    if not _is_quick_in_numpy(logits_RV):
        return logits_RV.max(dim=-1)
    best, token_ids = _best_in_numpy(logits_RV.numpy())
    return torch.from_numpy(best), torch.from_numpy(token_ids)


def _is_quick_in_numpy(logits_RV: torch.Tensor) -> bool:
    """On CPU torch looks for the place of a maximum value by value; numpy's search runs at the speed of reading."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32


def _best_in_numpy(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    token_ids = logits.argmax(axis=-1)
    return logits[np.arange(len(token_ids)), token_ids], token_ids


def _on_host(token_ids_R: torch.Tensor, finite_R: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and whether they mean something, as numpy arrays, in one transfer."""
    return tokens_and_finite(torch.stack([token_ids_R, finite_R.to(token_ids_R.dtype)]).cpu().numpy())


def distribution(logits_RV: torch.Tensor, batch: SamplingBatch, late: LateIds | None = None) -> torch.Tensor:
    """The fp32 probabilities [R, V] that `sample` draws from; one-hot for greedy rows, zeros for rows not
    finite. late: see `adjusted`.
    """
    plan = _Plan.of(batch)
    p_RV = torch.zeros(logits_RV.shape, dtype=torch.float32, device=logits_RV.device)
    every = np.arange(len(batch.options))
    undrawn = np.setdiff1d(every, plan.drawn)
    if len(undrawn):
        z_RV = adjusted(logits_RV, batch, undrawn, late)
        p_RV[on_rows(undrawn, logits_RV)] = torch.zeros_like(z_RV).scatter_(1, z_RV.argmax(-1, keepdim=True), 1.0)
    if len(plan.drawn):
        w_RV = weights(logits_RV, batch, plan.drawn, late)
        p_RV[on_rows(plan.drawn, logits_RV)] = w_RV / w_RV.sum(dim=-1, keepdim=True)
    best_R = adjusted(logits_RV, batch, every, late).amax(dim=-1)  # a mask may leave nothing
    usable_R = torch.isfinite(best_R) & torch.isfinite(logits_RV.amax(dim=-1))
    return torch.where(usable_R[:, None], p_RV, 0.0)


@dataclass(frozen=True)
class _Plan:
    """Which rows need what. drawn: those with a temperature. changed: greedy rows with a mask or a penalty,
    and drawn rows with a mask, which may leave them nothing. Both ascending."""

    changed: np.ndarray
    drawn: np.ndarray

    @classmethod
    def of(cls, batch: SamplingBatch) -> "_Plan":
        options = batch.options
        drawn = options["temperature"] > 0.0
        penalised = (options["repetition_penalty"] != 1.0) | counts_output(options)
        changed = (penalised & ~drawn) | (options["min_tokens"] > batch.positions)
        return cls(np.flatnonzero(changed), np.flatnonzero(drawn))
