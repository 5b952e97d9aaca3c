"""The next tokens of a step's rows where a device works beside the host: nothing here waits for it.

What a token depends on is known before the logits are: options, masks, and the uniform number of each row's seed and
position. So the host queues all that after the step, and `Kernels.greedy` and `Kernels.sample` choose. A row gets the
token that `on_host.sample` gives it for the same logits, but where its number lies within rounding of the border
between two tokens. The exception is a row whose draft was sampled from a known distribution, with top_k or top_p: how
many tokens are left to it is asked of the device.

Suffixes: R rows, V vocabulary, C rows with a mask or a penalty.
"""

from typing import Protocol

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch, tokens_and_finite
from pipeline.engine.sampling.logprobs import AskedLogprobs
from pipeline.engine.sampling.penalties import LARGE, FutureIds, adjusted, on_rows
from pipeline.engine.sampling.random_numbers import PLAIN, uniforms
from pipeline.engine.sampling.rejection import ProposalDistribution, replace_by_accepted
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sequence import adjusts_logits
from pipeline.kernels.memory import on_device, to_host


class SamplingKernels(Protocol):
    """Who chooses tokens on its device; see `Kernels`."""

    def greedy(self, logits_RV: torch.Tensor, /) -> torch.Tensor: ...
    def sample(self, logits_RV: torch.Tensor, how_5R: torch.Tensor, /) -> torch.Tensor: ...


class PendingOutput:
    """A `SamplerOutput` that the device is working on. `token_ids_R` can be used on the device at once; the copies for
    the host are under way."""

    def __init__(self, token_and_finite_2R: torch.Tensor, logprobs: AskedLogprobs | None) -> None:
        self.token_ids_R = token_and_finite_2R[0]
        self._token_and_finite_2R = to_host(token_and_finite_2R)
        self._logprobs = None if logprobs is None else logprobs.copied()
        self._copied: torch.cuda.Event | None = None
        if self.token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.token_ids_R.device))

    def output(self) -> SamplerOutput:
        """The tokens on the host; waits for them, and for all that was queued before them."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, finite = tokens_and_finite(self._token_and_finite_2R.numpy())
        return SamplerOutput(
            token_ids, finite, {} if self._logprobs is None else self._logprobs.by_row(token_ids, finite)
        )


@torch.inference_mode()
def sample_on_device(
    kernels: SamplingKernels,
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    future: FutureIds | None = None,
    proposal: ProposalDistribution | None = None,
) -> PendingOutput:
    """Begin to choose the next token of each row. `batch` None: every row is greedy and wants nothing else.

    future: tokens of the rows themselves that the host does not know yet. proposal: see `on_host.sample`; drafts are
    sampled after all tokens are known, so there is only one of the two.
    """
    assert future is None or proposal is None
    if batch is None:
        return PendingOutput(kernels.greedy(logits_RV), None)
    token_and_finite_2R = _choose(kernels, logits_RV, batch, future)
    token_R = token_and_finite_2R[0]
    if proposal is not None:
        rows = proposal.rows[batch.is_sampled[proposal.rows]]
        if len(rows):
            at = on_device(rows, logits_RV.device)
            token_D = token_R[at]
            replace_by_accepted(token_D, weights(logits_RV, batch, rows), batch, rows, proposal)
            token_R[at] = token_D
    return PendingOutput(token_and_finite_2R, AskedLogprobs.of(logits_RV, batch, token_R))


def _choose(
    kernels: SamplingKernels, logits_RV: torch.Tensor, batch: SamplingBatch, future: FutureIds | None
) -> torch.Tensor:
    """The tokens of plain steps, and whether they mean anything (2, R), on the device."""
    how_5R = _how(batch, logits_RV.shape[1])
    changed = np.flatnonzero(adjusts_logits(batch.options, batch.positions) | batch.is_masked)
    if len(changed) == len(batch.options):
        return _choose_changed(kernels, logits_RV, batch, changed, how_5R, future)
    token_and_finite_2R = kernels.sample(logits_RV, on_device(how_5R, logits_RV.device))
    if len(changed):
        on = on_device(changed, logits_RV.device)
        token_and_finite_2R[:, on] = _choose_changed(kernels, logits_RV, batch, changed, how_5R, future)
    return token_and_finite_2R


def _choose_changed(
    kernels: SamplingKernels,
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    changed: np.ndarray,
    how_5R: np.ndarray,
    future: FutureIds | None,
) -> torch.Tensor:
    z_CV = adjusted(logits_RV, batch, changed, future)
    token_and_finite_2C = kernels.sample(z_CV, on_device(np.ascontiguousarray(how_5R[:, changed]), z_CV.device))
    # a mask or penalty may leave nothing, but never makes a broken row good
    token_and_finite_2C[1] &= torch.isfinite(logits_RV[on_rows(changed, logits_RV)].amax(dim=-1))
    return token_and_finite_2C


def _how(batch: SamplingBatch, vocab_size: int) -> np.ndarray:
    """See `Kernels.sample`; rounded as on the host."""
    options = batch.options
    temperature_R = np.clip(options["temperature"], 1 / LARGE, LARGE).astype(np.float32)
    top_k_R = np.where(options["top_k"] > 0, np.minimum(options["top_k"], vocab_size), vocab_size)
    top_p_R, min_p_R = options["top_p"].astype(np.float32), options["min_p"].astype(np.float32)
    u_R = uniforms(batch.seeds, batch.positions, PLAIN)
    return np.stack([np.where(batch.is_sampled, temperature_R, 0.0), top_k_R, top_p_R, min_p_R, u_R]).astype(np.float64)
