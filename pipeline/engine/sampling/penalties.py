"""Masks and penalties: what changes a row's logits before its temperature.

Nothing here waits for the device: what the host knows is queued behind the device's work, and where the last known
token of a row is still being drawn there (`LateIds`), it is counted there.

Suffixes: R rows, V vocabulary, N pairs of a row and a token, L rows whose last token is late, P rows with a penalty.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.kernels.transfer import on_device

LARGE = 1e30  # options and penalised logits stay below: far from fp32's end, and 1 / LARGE is no denormal


@dataclass(frozen=True)
class LateIds:
    """The last tokens of some rows, in whose place the table of known tokens holds no token yet."""

    row_L: np.ndarray  # int64, ascending; a row may have several
    token_id_L: torch.Tensor  # int64, on the logits' device

    def among(self, rows: np.ndarray) -> "LateIds":
        """Those of `rows`, which ascend, by their places there."""
        kept = np.flatnonzero(np.isin(self.row_L, rows))
        on = on_device(kept, self.token_id_L.device)
        return LateIds(np.searchsorted(rows, self.row_L[kept]), self.token_id_L[on])


def counts_output(options: np.ndarray) -> np.ndarray:
    """Which rows have a penalty that counts output tokens."""
    return (options["presence_penalty"] != 0.0) | (options["frequency_penalty"] != 0.0)


def takes_best(options: np.ndarray) -> np.ndarray:
    """Which rows take the best token of their logits as they are, wherever they stand and whatever was before."""
    changed = (options["repetition_penalty"] != 1.0) | counts_output(options) | (options["min_tokens"] > 0)
    return (options["temperature"] == 0.0) & ~changed


def adjusted(
    logits_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, late: LateIds | None = None
) -> torch.Tensor:
    """fp32 copy of `rows`, which ascend, of the logits with masks and penalties applied."""
    z_RV = logits_RV[on_rows(rows, logits_RV)].to(torch.float32, copy=True)
    options = batch.options[rows]

    early = np.flatnonzero(options["min_tokens"] > batch.positions[rows])
    if len(early):
        ids_of_rows = batch.ending_ids[rows[early]].tolist()
        row_N = np.repeat(early, [len(ids) for ids in ids_of_rows])
        z_RV[_places(row_N, np.concatenate(ids_of_rows), z_RV)] = float("-inf")

    repeating = np.flatnonzero(options["repetition_penalty"] != 1.0)
    if len(repeating):
        _penalise_repetition(z_RV, batch, rows, repeating, late)
    counted = np.flatnonzero(counts_output(options))
    if len(counted):
        _penalise_counts(z_RV, batch, rows, counted, late)
    return z_RV


def _penalise_repetition(
    z_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, repeating: np.ndarray, late: LateIds | None
) -> None:
    row_N, id_N = _known_tokens(batch, rows[repeating], with_prompt=True)
    places = _places(repeating[row_N], id_N, z_RV)
    if late is not None:
        late = late.among(rows[repeating])
        at_L = on_device(repeating[late.row_L], z_RV.device)
        places = torch.cat([places[0], at_L]), torch.cat([places[1], late.token_id_L])
    penalty = column(np.maximum(batch.options["repetition_penalty"][rows], 1 / LARGE), z_RV)[places[0], 0]
    z = z_RV[places]
    # a token seen twice is written twice with the same value
    z_RV[places] = torch.where(z < 0, z * penalty, z / penalty).clamp_(max=LARGE)


def _penalise_counts(
    z_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, counted: np.ndarray, late: LateIds | None
) -> None:
    num_tokens = z_RV.shape[1]
    row_N, id_N = _known_tokens(batch, rows[counted], with_prompt=False)
    inside = (id_N >= 0) & (id_N < num_tokens)
    key_N, num_N = np.unique(row_N[inside] * num_tokens + id_N[inside], return_counts=True)
    row_N = key_N // num_tokens
    places = _places(counted[row_N], key_N % num_tokens, z_RV)
    count_N = on_device(num_N, z_RV.device)
    if late is not None:
        late = late.among(rows[counted])
        places, count_N = _with_late(late, on_device(counted[late.row_L], z_RV.device), row_N, places, count_N)
    frequency = column(batch.options["frequency_penalty"][rows], z_RV)[places[0], 0]
    presence = column(batch.options["presence_penalty"][rows], z_RV)[places[0], 0]
    z_RV[places] = z_RV[places] - (frequency * count_N.to(z_RV) + presence)


def _with_late(
    late: LateIds,
    at_L: torch.Tensor,
    row_N: np.ndarray,
    places: tuple[torch.Tensor, torch.Tensor],
    count_N: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The pairs with the late tokens, which are counted too. A late token that its row has generated before, or that is
    late twice, is in several pairs then, all with its whole count: it is written several times with the same value.

    U rows with late tokens, W most late tokens of one.
    """
    if not len(late.row_L):
        return places, count_N
    device = count_N.device
    row_U, first_U, of_L, num_U = np.unique(late.row_L, return_index=True, return_inverse=True, return_counts=True)
    place_W = np.arange(num_U.max())
    is_late_UW = on_device(place_W < num_U[:, None], device)
    id_UW = late.token_id_L[on_device(first_U[:, None] + np.minimum(place_W, num_U[:, None] - 1), device)]
    nearest_N = np.minimum(np.searchsorted(row_U, row_N), len(row_U) - 1)
    of_N = on_device(nearest_N, device)
    again_NW = on_device(row_U[nearest_N] == row_N, device)[:, None] & is_late_UW[of_N]
    again_NW &= id_UW[of_N] == places[1][:, None]
    count_UW = ((id_UW[:, :, None] == id_UW[:, None, :]) & is_late_UW[:, None, :]).sum(dim=-1)
    count_UW.index_add_(0, of_N, torch.where(again_NW, count_N[:, None], 0))
    count_L = count_UW[on_device(of_L, device), on_device(np.arange(len(of_L)) - first_U[of_L], device)]
    both = torch.cat([places[0], at_L]), torch.cat([places[1], late.token_id_L])
    return both, torch.cat([count_N + again_NW.sum(dim=-1), count_L])


def _known_tokens(batch: SamplingBatch, rows: np.ndarray, with_prompt: bool) -> tuple[np.ndarray, np.ndarray]:
    """Every known token of `rows`, or every generated one: its place among `rows`, and its id."""
    begin_R = np.zeros(len(rows), dtype=np.int64) if with_prompt else batch.num_prompt[rows]
    count_R = batch.num_known[rows] - begin_R
    row_N = np.repeat(np.arange(len(rows)), count_R)
    column_N = np.arange(len(row_N)) + np.repeat(begin_R - np.cumsum(count_R) + count_R, count_R)
    return row_N, batch.token_ids[batch.slots[rows][row_N], column_N].astype(np.int64)


def on_rows(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor | slice:
    """Index of ascending `rows`: all of them cost no copy."""
    if len(rows) == like.shape[0]:
        return slice(None)
    return on_device(rows, like.device)


def column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """One fp32 number per row, [R, 1]; kept far from the ends of fp32, where inf * 0 would make NaN."""
    inside = np.clip(values, -LARGE, LARGE).astype(np.float32)
    return on_device(inside, like.device)[:, None]


def _places(row_N: np.ndarray, id_N: np.ndarray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of every id in its row; ids outside the vocabulary have no logit and are left out."""
    inside = (id_N >= 0) & (id_N < like.shape[1])
    return on_device(row_N[inside], like.device), on_device(id_N[inside], like.device)
