"""Samples the next token of each row on the host; on_device.py does the same for an asynchronous device.

Owns the order of the sampling options, which is vLLM's:

    fp32 logits -> masks of grammars and min_tokens -> repetition penalty -> presence and frequency penalties
    -> temperature -> min_p -> top_k -> top_p -> one sample

top_k keeps every token that ties with the k-th best. min_p is relative to the best token's probability. top_p is
relative to the tokens that top_k and min_p kept: it keeps the smallest set of best tokens whose probabilities reach
top_p; of equal ones the lowest ids. Greedy rows (temperature 0) take the best token after masks and penalties, of equal
ones the lowest id. Log-probabilities are those of the raw logits.

Sampling uses one uniform number that depends only on the row's seed and the token's position (`uniforms`), and every
operation works row by row, so a row gets the same token in any batch. Rows that need an option are copied and processed
separately; a batch of plain greedy rows costs one pass over the logits. Options are arrays, so no row costs Python of
its own, except for the masks of grammars and min_tokens, and the reported log-probabilities.

Suffixes: R rows, V vocabulary.
"""

import numpy as np
import torch

from pipeline.engine.grammar.token_mask import TokenMask
from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.logprobs import LogprobsTensors
from pipeline.engine.sampling.penalties import adjusted, on_rows
from pipeline.engine.sampling.random_numbers import PLAIN, draw, uniforms
from pipeline.engine.sampling.rejection import ProposalDistribution, replace_by_accepted
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sampling_options import adjusts_logits

_BLOCK_VALUES = 1 << 20  # logits that are sampled from at a time on CPU: 4 MiB


def greedy(logits_RV: torch.Tensor, mask: TokenMask | None = None) -> SamplerOutput:
    """Return the result of `sample` for greedy rows without options except a mask: one pass over the logits."""
    best, token_ids = _best(logits_RV)
    if mask is not None and len(rows := mask.refused(token_ids)):
        z_RV = logits_RV[on_rows(rows, logits_RV)].to(torch.float32, copy=True)
        mask.apply(z_RV, rows)
        _choose_again(best, token_ids, rows, z_RV)
    finite = np.isfinite(best)
    return SamplerOutput(token_ids if finite.all() else np.where(finite, token_ids, 0), finite, {})


def sample(
    logits_RV: torch.Tensor, batch: SamplingBatch | None, proposal: ProposalDistribution | None = None
) -> SamplerOutput:
    """Return the next token of each row. `logits_RV` may have any float dtype, on any device, and is not changed.

    batch: None if all rows are greedy without other options. proposal: drafts of some rows and their distributions;
    rows with a temperature keep their draft or replace it.
    """
    if batch is None:
        return greedy(logits_RV)
    best, token_ids = _best(logits_RV)
    # A penalty alone always leaves a sampled row a token; only a mask may leave none. If a grammar allows the best
    # token, that stays the best.
    changes = adjusts_logits(batch.options, batch.positions) & ~batch.is_sampled | batch.must_go_on
    if batch.mask is not None:
        changes[batch.mask.refused(token_ids)] = True
    rows = np.flatnonzero(changes)
    if len(rows):
        _choose_again(best, token_ids, rows, adjusted(logits_RV, batch, rows))
    finite, sampled = np.isfinite(best), np.flatnonzero(batch.is_sampled)
    for rows in _blocks(sampled, logits_RV) if len(sampled) else ():
        w_RV = weights(logits_RV, batch, rows)
        u_R = uniforms(batch.seeds[rows], batch.positions[rows], PLAIN)
        ids_R = draw(w_RV, torch.from_numpy(u_R).to(w_RV.device))
        if proposal is not None:
            replace_by_accepted(ids_R, w_RV, batch, rows, proposal)
        token_ids[rows] = ids_R.cpu().numpy()
    token_ids = np.where(finite, token_ids, 0)
    logprobs = LogprobsTensors.compute(logits_RV, batch, torch.from_numpy(token_ids).to(logits_RV.device))
    return SamplerOutput(token_ids, finite, {} if logprobs is None else logprobs.by_row(token_ids, finite))


def _choose_again(best: np.ndarray, token_ids: np.ndarray, rows: np.ndarray, z_RV: torch.Tensor) -> None:
    """Overwrite the results of `rows`; z_RV are their logits with masks and penalties."""
    best_changed, token_ids[rows] = _best(z_RV)
    # a mask or penalty may leave no token, but never makes a non-finite row valid
    best[rows] = np.where(np.isfinite(best[rows]), best_changed, best[rows])


def _blocks(rows: np.ndarray, like: torch.Tensor) -> list[np.ndarray]:
    """Split `rows` into blocks. Some dozen passes over copies of their values follow, and one flat row widens the
    search for all rows of its block. Rows are independent, so blocks change only time and memory."""
    if like.device.type != "cpu":
        return [rows]
    size = max(_BLOCK_VALUES // like.shape[1], 1)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _best(logits_RV: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest value of each row and the lowest id that has it, on the host. NaN counts as the largest, so
    the same pass shows whether a row is finite.

    On CPU torch searches the index of a maximum value by value; numpy's search runs at memory bandwidth.
    """
    if logits_RV.device.type == "cpu":
        logits = logits_RV.float().numpy()
        token_ids = logits.argmax(axis=-1)
        return logits[np.arange(len(token_ids)), token_ids], token_ids
    best_R, token_ids_R = logits_RV.max(dim=-1)
    return best_R.double().cpu().numpy(), token_ids_R.cpu().numpy()


def distribution(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the fp32 probabilities [R, V] that `sample` uses; one-hot for greedy rows, zeros for non-finite rows."""
    p_RV = torch.zeros(logits_RV.shape, dtype=torch.float32, device=logits_RV.device)
    greedy_rows, sampled = np.flatnonzero(~batch.is_sampled), np.flatnonzero(batch.is_sampled)
    if len(greedy_rows):
        z_RV = adjusted(logits_RV, batch, greedy_rows)
        p_RV[on_rows(greedy_rows, logits_RV)] = torch.zeros_like(z_RV).scatter_(1, z_RV.argmax(-1, keepdim=True), 1.0)
    if len(sampled):
        w_RV = weights(logits_RV, batch, sampled)
        p_RV[on_rows(sampled, logits_RV)] = w_RV / w_RV.sum(dim=-1, keepdim=True)
    best_R = adjusted(logits_RV, batch, np.arange(len(batch.options))).amax(dim=-1)  # a mask may leave no token
    finite_R = torch.isfinite(best_R) & torch.isfinite(logits_RV.amax(dim=-1))
    return torch.where(finite_R[:, None], p_RV, 0.0)
