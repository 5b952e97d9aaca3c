"""Which drafts that were drawn from a known law stand, and what takes the place of those that do not.

Rejection sampling (Leviathan, Kalman, Matias 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a draft drawn
from q stands with probability min(1, p / q); one that does not is replaced by a draw from (p - q)+, normalised. The
token that comes out has the law p, whatever q is; p and q are what is left after penalties, temperature and cuts.

Shapes: D rows with a draft of known law, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.random_numbers import ACCEPT, RESIDUAL, draw, uniforms
from pipeline.kernels.transfer import on_device


@dataclass(frozen=True)
class DraftLaw:
    """The drafts of some rows of a step, drawn from known distributions with numbers of other streams than PLAIN,
    ACCEPT and RESIDUAL (see random_numbers.py)."""

    rows: np.ndarray  # int64 [D], ascending, of the step's rows
    token_ids: np.ndarray | torch.Tensor  # int64 [D]; on the device where they were drawn there
    q_DV: torch.Tensor  # probabilities

    def of(self, chosen: np.ndarray) -> "DraftLaw":
        """Some of the drafts alone, by their places."""
        on = on_device(chosen, self.q_DV.device)
        return DraftLaw(self.rows[chosen], self.on_device()[on], self.q_DV[on])

    def on_device(self) -> torch.Tensor:
        """The drafts where the probabilities are."""
        return (
            self.token_ids if isinstance(self.token_ids, torch.Tensor) else on_device(self.token_ids, self.q_DV.device)
        )


def settle_drafts(
    drawn_ids_R: torch.Tensor, w_RV: torch.Tensor, batch: SamplingBatch, drawn: np.ndarray, law: DraftLaw
) -> None:
    """Replace the plain draws of those of the rows `drawn` that have a draft of known law."""
    law = law.of(np.flatnonzero(np.isin(law.rows, drawn)))
    if not len(law.rows):
        return
    at = on_device(np.searchsorted(drawn, law.rows), w_RV.device)
    seeds, positions = batch.seeds[law.rows], batch.positions[law.rows]
    drawn_ids_R[at] = settle(w_RV[at], law, seeds, positions, drawn_ids_R[at])


def settle(
    w_DV: torch.Tensor, law: DraftLaw, seeds: np.ndarray, positions: np.ndarray, otherwise_D: torch.Tensor
) -> torch.Tensor:
    """The token of each row: its draft where that stands, else a draw from the residual.

    w_DV: unnormalised probabilities of the model. otherwise_D: draws from it, made without looking at the draft; they
    are taken where q is no distribution that the draft can come from (not finite, or 0 at the draft), and where
    rounding leaves no residual. Which drafts fall is not asked of the device: every row gets what would take its place.
    """
    p_DV = w_DV / w_DV.sum(dim=-1, keepdim=True)
    q_DV = law.q_DV.to(p_DV)
    draft_D = law.on_device()
    p_D, q_D = (x_DV.gather(1, draft_D[:, None])[:, 0].double() for x_DV in (p_DV, q_DV))
    usable_D = torch.isfinite(q_DV.sum(dim=-1)) & (q_D > 0)
    stands_D = on_device(uniforms(seeds, positions, ACCEPT), q_D.device) * q_D < p_D
    residual_DV = residual(p_DV, q_DV)
    instead_D = draw(residual_DV, on_device(uniforms(seeds, positions, RESIDUAL), q_D.device))
    instead_D = torch.where(residual_DV.sum(dim=-1) > 0, instead_D, otherwise_D)
    return torch.where(usable_D, torch.where(stands_D, draft_D, instead_D), otherwise_D)


def residual(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """Weights, not normalised, of what takes the place of a rejected draft: (p - q)+."""
    return (p_RV - q_RV).clamp_(min=0.0)
