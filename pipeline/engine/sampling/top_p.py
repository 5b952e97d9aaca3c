"""Sampling weights from logits: temperature, then min_p, top_k and top_p.

Shapes: R rows, V vocabulary, C best values of a row, G groups of tokens.
"""

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.penalties import LARGE, adjusted, column, on_rows
from pipeline.engine.sampling.random_numbers import sums
from pipeline.kernels.memory import on_device

_FEW = 64  # best values examined for top_p first; flatter rows are examined again
_GROUPS = 256  # of tokens, whose maxima give a lower bound of the best values


def weights(logits_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    """Return unnormalised fp32 probabilities of `rows`: 1 for the best token, exactly 0 for excluded ones."""
    options = batch.options[rows]
    z_RV = adjusted(logits_RV, batch, rows)
    z_RV -= z_RV.amax(dim=-1, keepdim=True)
    # The best token is now at 0 and stays there, however small the temperature is.
    z_RV /= column(np.maximum(options["temperature"], 1 / LARGE), z_RV)

    with_top_k = np.flatnonzero((options["top_k"] > 0) & (options["top_k"] < z_RV.shape[1]))
    if len(with_top_k):
        picked, top_k = on_rows(with_top_k, z_RV), options["top_k"][with_top_k]
        best_RC, _ = best_values(z_RV[picked], int(top_k.max()), torch.finfo(torch.float32).min)
        kth_R1 = best_RC.gather(1, on_device(top_k, z_RV.device)[:, None] - 1)
        z_RV[picked] = z_RV[picked].masked_fill(z_RV[picked] < kth_R1, float("-inf"))

    w_RV = z_RV.exp_()
    if (options["min_p"] > 0.0).any():
        w_RV.masked_fill_(w_RV < column(options["min_p"], w_RV), 0.0)
    with_top_p = np.flatnonzero(options["top_p"] < 1.0)
    if len(with_top_p):
        picked = on_rows(with_top_p, w_RV)
        cut_RV = w_RV[picked]
        cut_top_p(cut_RV, column(options["top_p"][with_top_p], w_RV).double())
        if not isinstance(picked, slice):  # a slice is a view, which is already updated
            w_RV[picked] = cut_RV
    return w_RV


def cut_top_p(w_RV: torch.Tensor, top_p_R1: torch.Tensor) -> None:
    """Set weights to 0 where the better tokens alone reach top_p of the row's sum; of equal ones the lowest ids stay.

    Usually a few tokens reach it. Other rows are examined again with every token that can matter: V tokens that each
    have less than a V-th of the remaining mass cannot reach into the kept part; a factor of one half covers rounding.
    """
    total_R1 = sums(w_RV)[:, None]
    wanted_R1 = top_p_R1 * total_R1
    few = best_values(w_RV, min(_FEW, w_RV.shape[1]), torch.finfo(torch.float32).tiny)
    last_R1, num_equal_R1, is_tied_R, reached_R = _last_kept(*few, wanted_R1)
    flat = np.flatnonzero(~reached_R.cpu().numpy())
    if len(flat):
        index = on_rows(flat, w_RV)
        unlikely_R1 = 0.5 * (1.0 - top_p_R1[index]) * total_R1[index] / w_RV.shape[1]
        likely = _values_from(w_RV[index], unlikely_R1.float())
        last_R1[index], num_equal_R1[index], is_tied_R[index], _ = _last_kept(*likely, wanted_R1[index])
    w_RV.masked_fill_(w_RV < last_R1, 0.0)
    tied = np.flatnonzero(is_tied_R.cpu().numpy())
    if len(tied):
        index = on_rows(tied, w_RV)
        equal_RV = w_RV[index] == last_R1[index]
        w_RV[index] = w_RV[index].masked_fill(equal_RV & (equal_RV.cumsum(dim=-1) > num_equal_R1[index]), 0.0)


def _last_kept(best_RC: torch.Tensor, num_best_R: torch.Tensor, wanted_R1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return for each row the value of the last token needed to reach `wanted`, how many tokens of that value are
    needed, whether there are more of them, and whether the row's `num_best_R` values reach `wanted` at all."""
    best_RC = best_RC.clamp(min=0.0)
    sum_RC = best_RC.double().cumsum(dim=-1)
    num_kept_R1 = (sum_RC - best_RC < wanted_R1).sum(dim=-1, keepdim=True).clamp_(min=1)
    last_R1 = best_RC.gather(1, num_kept_R1 - 1)
    num_equal_R1 = num_kept_R1 - (best_RC > last_R1).sum(dim=-1, keepdim=True)
    is_tied_R = (best_RC == last_R1).sum(dim=-1) > num_equal_R1[:, 0]
    reached_R = (sum_RC[:, -1] >= wanted_R1[:, 0]) & (num_kept_R1[:, 0] <= num_best_R)
    return last_R1, num_equal_R1, is_tied_R, reached_R


def best_values(x_RV: torch.Tensor, num: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `_values_from` a value that at least `num` tokens of each row reach: the num-th largest of the maxima of
    groups of tokens. Values below `floor` are left out."""
    width = max(x_RV.shape[1] // _GROUPS, 1)
    num_groups = x_RV.shape[1] // width
    if num <= num_groups:
        best_RG = x_RV[:, : num_groups * width].unflatten(1, (num_groups, width)).amax(dim=-1)
    else:
        best_RG = x_RV
    min_R1 = best_RG.topk(num, dim=-1).values[:, -1:].clamp(min=floor)
    return _values_from(x_RV, min_R1, num)


def _values_from(x_RV: torch.Tensor, min_R1: torch.Tensor, num: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's values of at least `least`, in descending order, and their number. There are at least `num`
    columns, of which the last ones may hold smaller values or -inf."""
    if x_RV.device.type != "cpu":
        count_R = (x_RV >= min_R1).sum(dim=-1)
        return x_RV.topk(max(int(count_R.max()), num), dim=-1).values, count_R
    x, num_tokens = x_RV.numpy(), x_RV.shape[1]
    index_N = np.flatnonzero(x >= min_R1.numpy())
    row_N = index_N // num_tokens
    count_R = np.bincount(row_N, minlength=len(x))
    best_RC = np.full((len(x), max(int(count_R.max()), num)), -np.inf, dtype=np.float32)
    best_RC[row_N, np.arange(len(index_N)) - (np.cumsum(count_R) - count_R)[row_N]] = x.ravel()[index_N]
    best_RC.sort(axis=-1)
    return torch.from_numpy(best_RC[:, ::-1].copy()), torch.from_numpy(count_R)
