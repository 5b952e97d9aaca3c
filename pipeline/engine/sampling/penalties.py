"""Masks and penalties: changes of a row's logits before its temperature.

Nothing here waits for the device: data of the host is queued after the device's work, and tokens that only the device
knows (`FutureIds`) are counted there.

Suffixes: R rows, V vocabulary, N pairs of a row and a token, F future tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.schedule.sampling_options import counts_output
from pipeline.engine.schedule.slot_table import ranges
from pipeline.kernels.memory import on_device

LARGE = 1e30  # bound of options and penalised logits: far from fp32's maximum, and 1 / LARGE is no denormal


@dataclass(frozen=True)
class FutureIds:
    """Last tokens of some rows, for which the table of known tokens holds placeholders."""

    row_F: np.ndarray  # int64, ascending, each row once
    token_id_F: torch.Tensor  # int64, on the logits' device

    def among(self, rows: np.ndarray) -> "FutureIds":
        """Return those of `rows` (ascending), with row_F as indices into `rows`."""
        kept = np.flatnonzero(np.isin(self.row_F, rows))
        index = on_device(kept, self.token_id_F.device)
        return FutureIds(np.searchsorted(rows, self.row_F[kept]), self.token_id_F[index])


def adjusted(
    logits_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, future: FutureIds | None = None
) -> torch.Tensor:
    """Return an fp32 copy of the logits of `rows` (ascending) with masks and penalties applied."""
    z_RV = logits_RV[on_rows(rows, logits_RV)].to(torch.float32, copy=True)
    options = batch.options[rows]

    if batch.mask is not None:
        batch.mask.apply(z_RV, rows)
    masked = np.flatnonzero(batch.must_go_on[rows])
    if len(masked):
        ids_of_rows = batch.ending_ids[rows[masked]].tolist()
        row_N = np.repeat(masked, [len(ids) for ids in ids_of_rows])
        z_RV[_token_index(row_N, np.concatenate(ids_of_rows), z_RV)] = float("-inf")

    repeating = np.flatnonzero(options["repetition_penalty"] != 1.0)
    if len(repeating):
        _penalise_repetition(z_RV, batch, rows, repeating, future)
    counted = np.flatnonzero(counts_output(options))
    if len(counted):
        _penalise_counts(z_RV, batch, rows, counted, future)
    return z_RV


def _penalise_repetition(
    z_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, repeating: np.ndarray, future: FutureIds | None
) -> None:
    row_N, id_N = _known_tokens(batch, rows[repeating], with_prompt=True)
    index = _token_index(repeating[row_N], id_N, z_RV)
    if future is not None:
        future = future.among(rows[repeating])
        row_F = on_device(repeating[future.row_F], z_RV.device)
        index = torch.cat([index[0], row_F]), torch.cat([index[1], future.token_id_F])
    penalty = column(np.maximum(batch.options["repetition_penalty"][rows], 1 / LARGE), z_RV)[index[0], 0]
    z = z_RV[index]
    # a token that occurs twice is written twice with the same value
    z_RV[index] = torch.where(z < 0, z * penalty, z / penalty).clamp_(max=LARGE)


def _penalise_counts(
    z_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, counted: np.ndarray, future: FutureIds | None
) -> None:
    num_tokens = z_RV.shape[1]
    row_N, id_N = _known_tokens(batch, rows[counted], with_prompt=False)
    inside = (id_N >= 0) & (id_N < num_tokens)
    key_N, num_N = np.unique(row_N[inside] * num_tokens + id_N[inside], return_counts=True)
    row_N = key_N // num_tokens
    index = _token_index(counted[row_N], key_N % num_tokens, z_RV)
    count_N = on_device(num_N, z_RV.device)
    if future is not None:
        future = future.among(rows[counted])
        index, count_N = _with_future(future, on_device(counted[future.row_F], z_RV.device), row_N, index, count_N)
    frequency = column(batch.options["frequency_penalty"][rows], z_RV)[index[0], 0]
    presence = column(batch.options["presence_penalty"][rows], z_RV)[index[0], 0]
    z_RV[index] = z_RV[index] - (frequency * count_N.to(z_RV) + presence)


def _with_future(
    future: FutureIds,
    row_F: torch.Tensor,
    row_N: np.ndarray,
    index: tuple[torch.Tensor, torch.Tensor],
    count_N: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Append the future tokens to the pairs, counting them. A future token that its row has generated before is then in
    two pairs, both with its full count: it is written twice with the same value."""
    if not len(future.row_F):
        return index, count_N
    nearest_N = np.minimum(np.searchsorted(future.row_F, row_N), len(future.row_F) - 1)
    nearest = on_device(nearest_N, count_N.device)
    again_N = on_device(future.row_F[nearest_N] == row_N, count_N.device) & (future.token_id_F[nearest] == index[1])
    count_F = torch.ones_like(future.token_id_F).index_add_(0, nearest, torch.where(again_N, count_N, 0))
    index = torch.cat([index[0], row_F]), torch.cat([index[1], future.token_id_F])
    return index, torch.cat([count_N + again_N, count_F])


def _known_tokens(batch: SamplingBatch, rows: np.ndarray, with_prompt: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return every known token of `rows`, or every generated one, as its index into `rows` and its id."""
    begin_R = np.zeros(len(rows), dtype=np.int64) if with_prompt else batch.num_prompt[rows]
    count_R = batch.num_known[rows] - begin_R
    row_N = np.repeat(np.arange(len(rows)), count_R)
    return row_N, batch.token_ids[batch.slots[rows][row_N], ranges(begin_R, count_R)].astype(np.int64)


def on_rows(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor | slice:
    """Return an index of ascending `rows`; a slice if it is all of them, which avoids a copy."""
    if len(rows) == like.shape[0]:
        return slice(None)
    return on_device(rows, like.device)


def column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return one fp32 number per row, [R, 1], clipped well inside fp32, because inf * 0 would give NaN."""
    inside = np.clip(values, -LARGE, LARGE).astype(np.float32)
    return on_device(inside, like.device)[:, None]


def _token_index(row_N: np.ndarray, id_N: np.ndarray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of every id in its row, without ids outside the vocabulary, which have no logit."""
    inside = (id_N >= 0) & (id_N < like.shape[1])
    return on_device(row_N[inside], like.device), on_device(id_N[inside], like.device)
