"""Rejection sampling of drafts whose distribution is known.

Leviathan, Kalman, Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318): a draft sampled from q is
accepted with probability min(1, p / q), otherwise replaced by a sample of (p - q)+, normalised. The resulting token has
the distribution p, whatever q is; p and q are the distributions after penalties, temperature, top_k, top_p and min_p.

Shapes: D rows with a draft of known distribution, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.random_numbers import ACCEPT, RESIDUAL, draw, uniforms
from pipeline.kernels.memory import on_device


@dataclass(frozen=True)
class ProposalDistribution:
    """Drafts of some rows of a step, sampled from known distributions with numbers of streams other than PLAIN, ACCEPT
    and RESIDUAL (see random_numbers.py)."""

    rows: np.ndarray  # int64 [D], ascending, of the step's rows
    token_ids: np.ndarray  # int64 [D]
    q_DV: torch.Tensor  # probabilities

    def select(self, chosen: np.ndarray) -> "ProposalDistribution":
        """Return only the drafts with these indices."""
        q_DV = self.q_DV[on_device(chosen, self.q_DV.device)]
        return ProposalDistribution(self.rows[chosen], self.token_ids[chosen], q_DV)


def replace_by_accepted(
    token_id_R: torch.Tensor,
    w_RV: torch.Tensor,
    batch: SamplingBatch,
    rows: np.ndarray,
    proposal: ProposalDistribution,
) -> None:
    """Overwrite the plain tokens of those `rows` that have a draft of known distribution by it or its replacement."""
    proposal = proposal.select(np.flatnonzero(np.isin(proposal.rows, rows)))
    if not len(proposal.rows):
        return
    index_D = on_device(np.searchsorted(rows, proposal.rows), w_RV.device)
    seeds, positions = batch.seeds[proposal.rows], batch.positions[proposal.rows]
    token_id_R[index_D] = accept_or_replace(w_RV[index_D], proposal, seeds, positions, token_id_R[index_D])


def accept_or_replace(
    w_DV: torch.Tensor,
    proposal: ProposalDistribution,
    seeds: np.ndarray,
    positions: np.ndarray,
    otherwise_D: torch.Tensor,
) -> torch.Tensor:
    """Return the token of each row: its draft if accepted, otherwise a sample of the residual.

    w_DV: unnormalised probabilities of the model. otherwise_D: samples from them, drawn independently of the draft,
    and used where q cannot have produced the draft (not finite, or 0 at the draft), and where rounding leaves no
    residual. It never waits for the device: every row gets a replacement, needed or not.
    """
    p_DV = w_DV / w_DV.sum(dim=-1, keepdim=True)
    q_DV = proposal.q_DV.to(p_DV)
    draft_D = on_device(proposal.token_ids, proposal.q_DV.device)
    p_D, q_D = (x_DV.gather(1, draft_D[:, None])[:, 0].double() for x_DV in (p_DV, q_DV))
    usable_D = torch.isfinite(q_DV.sum(dim=-1)) & (q_D > 0)
    accepted_D = on_device(uniforms(seeds, positions, ACCEPT), q_D.device) * q_D < p_D
    residual_DV = residual(p_DV, q_DV)
    replacement_D = draw(residual_DV, on_device(uniforms(seeds, positions, RESIDUAL), q_D.device))
    replacement_D = torch.where(residual_DV.sum(dim=-1) > 0, replacement_D, otherwise_D)
    return torch.where(usable_D, torch.where(accepted_D, draft_D, replacement_D), otherwise_D)


def residual(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """Return the unnormalised weights of a rejected draft's replacement: (p - q)+."""
    return (p_RV - q_RV).clamp_(min=0.0)
