"""GPTQ: integers for a linear that preserve its outputs on calibration inputs.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323,
algorithm 1: inputs are quantized one after another, and the error of each is spread over the remaining ones, weighted
by the inverse of the inputs' second moments.

Shape suffixes: N outputs, K inputs, G groups, b inputs of a block, T tokens.
"""

import torch

from pipeline.errors import ModelError
from pipeline.quantize.grid import IntLinear, group_grid, to_grid

DAMPING = 0.01  # added to each second moment, relative to their mean; increased tenfold until it suffices
MAX_DAMPING = 1.0
BLOCK = 128  # inputs whose errors are spread over later ones in one product


class SecondMoments:
    """Sum over tokens of x x^T (K, K) of a linear's inputs x, in float32."""

    def __init__(self) -> None:
        self.sum_KK: torch.Tensor | None = None

    def add(self, x_TK: torch.Tensor) -> None:
        x_TK = x_TK.float()
        new_KK = x_TK.T @ x_TK
        self.sum_KK = new_KK if self.sum_KK is None else self.sum_KK.add_(new_KK)


def gptq(
    weight_NK: torch.Tensor, moments_KK: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> IntLinear:
    """Return integers in groups of `group_size` inputs, with scales in `dtype`.

    Inputs are quantized in descending order of their second moments ("act-order"), so that the most important ones are
    rounded before errors accumulate. Groups are still of consecutive inputs, so their scales and zeros are chosen
    before. Raises ModelError for inputs that are not finite.
    """
    n, k = weight_NK.shape
    weight_NK = weight_NK.float()
    scales_NG, zeros_NG = group_grid(weight_NK, group_size, bits, dtype)
    order_K = torch.argsort(moments_KK.diagonal(), descending=True, stable=True)
    weight_NK, spread_KK = weight_NK[:, order_K], _spread(moments_KK[order_K][:, order_K])
    q_NK = torch.empty((n, k), dtype=torch.uint8, device=weight_NK.device)
    for start in range(0, k, BLOCK):
        order_b = order_K[start : start + BLOCK]
        stop, group_b = start + len(order_b), order_b // group_size
        scale_Nb, zero_Nb = scales_NG[:, group_b].float(), zeros_NG[:, group_b].float()
        block_Nb, spread_bb = weight_NK[:, start:stop], spread_KK[start:stop, start:stop]
        q_Nb, errors_Nb = torch.empty_like(block_Nb, dtype=torch.uint8), torch.empty_like(block_Nb)
        for j in range(len(order_b)):
            q_Nb[:, j] = to_grid(block_Nb[:, j], scale_Nb[:, j], zero_Nb[:, j], bits)
            value_N = (q_Nb[:, j] - zero_Nb[:, j]) * scale_Nb[:, j]
            errors_Nb[:, j] = (block_Nb[:, j] - value_N) / spread_bb[j, j]
            block_Nb[:, j + 1 :] -= errors_Nb[:, j : j + 1] * spread_bb[j, j + 1 :]
        weight_NK[:, stop:] -= errors_Nb @ spread_KK[start:stop, stop:]
        q_NK[:, order_b] = q_Nb
    return IntLinear(q_NK, scales_NG, zeros_NG, bits)


def _spread(moments_KK: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments.

    An input that is always 0 is independent of the others: its weights are rounded to the nearest.
    """
    diagonal_K = moments_KK.diagonal()
    if not bool(moments_KK.isfinite().all()):
        raise ModelError("calibration: inputs of a linear are NaN or infinite; does the model work in 16 bits?")
    mean = float(diagonal_K.mean()) or 1.0
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped_KK = moments_KK + torch.diag(torch.full_like(diagonal_K, damping * mean))
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if int(failed) == 0:
            upper_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_KK), upper=True)
            if int(failed) == 0:
                return upper_KK
        damping *= 10
    raise ModelError("calibration: the inputs of a linear are too similar for GPTQ; use more and longer texts")
