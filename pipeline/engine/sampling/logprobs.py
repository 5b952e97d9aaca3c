"""Requested log-probabilities: those of the raw logits, before masks, penalties and temperature.

Suffixes: R rows of the step, Q rows that request them, V vocabulary, K maximum number of alternatives.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.penalties import on_rows
from pipeline.engine.tasks import TokenLogprobs
from pipeline.kernels.memory import to_host


@dataclass(frozen=True)
class LogprobsTensors:
    """Log-probabilities of the rows row_Q, with width_Q alternatives. Tensors are on the logits' device or, as a copy,
    on the host."""

    row_Q: np.ndarray
    width_Q: np.ndarray
    chosen_Q: torch.Tensor
    top_QK: torch.Tensor
    top_id_QK: torch.Tensor

    @classmethod
    def compute(
        cls, logits_RV: torch.Tensor, batch: SamplingBatch, token_ids_R: torch.Tensor
    ) -> "LogprobsTensors | None":
        """Compute those of the chosen tokens, whose ids are on the logits' device, without waiting; None if no row
        requests them."""
        row_Q = np.flatnonzero(batch.options["logprobs"] >= 0)
        if not len(row_Q):
            return None
        on = on_rows(row_Q, logits_RV)
        logprobs_QV = logits_RV[on].float().log_softmax(dim=-1)
        chosen_Q = logprobs_QV.gather(1, token_ids_R[on][:, None])[:, 0]
        width_Q = np.minimum(batch.options["logprobs"][row_Q], logprobs_QV.shape[1])
        top = logprobs_QV.topk(int(width_Q.max()), dim=-1)
        return cls(row_Q, width_Q, chosen_Q, top.values, top.indices)

    def copied(self) -> "LogprobsTensors":
        """Start copies into pinned host memory."""
        tensors = (to_host(tensor) for tensor in (self.chosen_Q, self.top_QK, self.top_id_QK))
        return LogprobsTensors(self.row_Q, self.width_Q, *tensors)

    def by_row(self, token_ids: np.ndarray, finite: np.ndarray) -> dict[int, TokenLogprobs]:
        """Return them by row for the finite rows; the tensors must be on the host."""
        chosen, values, ids = self.chosen_Q.tolist(), self.top_QK.tolist(), self.top_id_QK.tolist()
        kept = np.flatnonzero(finite[self.row_Q]).tolist()
        rows, widths, tokens = self.row_Q.tolist(), self.width_Q.tolist(), token_ids[self.row_Q].tolist()
        return {
            rows[q]: TokenLogprobs(tokens[q], chosen[q], tuple(zip(ids[q][: widths[q]], values[q][: widths[q]])))
            for q in kept
        }
