"""Samples the next tokens of a step's rows on an asynchronous device; nothing here waits for it.

All inputs of a token are known before its logits: options, masks, and the uniform number of each row's seed and
position. So the host queues the work after the step, and `Kernels.greedy` and `Kernels.sample` choose. A row gets the
same token as from `on_host.sample` for the same logits, except where its number is within rounding of the boundary
between two tokens. One case does wait: for a row whose draft was sampled from a known distribution, with top_k or
top_p, the number of remaining tokens is read from the device.

Suffixes: R rows, V vocabulary, C rows with a mask or a penalty.
"""

from typing import Protocol

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch, tokens_and_finite
from pipeline.engine.sampling.logprobs import LogprobsTensors
from pipeline.engine.sampling.penalties import LARGE, FutureIds, adjusted, on_rows
from pipeline.engine.sampling.random_numbers import PLAIN, uniforms
from pipeline.engine.sampling.rejection import ProposalDistribution, replace_by_accepted
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sampling_options import adjusts_logits
from pipeline.kernels.memory import on_device, to_host


class SamplingKernels(Protocol):
    """Kernels that sample tokens on the device; see `Kernels`."""

    def greedy(self, logits_RV: torch.Tensor, /) -> torch.Tensor: ...
    def sample(self, logits_RV: torch.Tensor, params_5R: torch.Tensor, /) -> torch.Tensor: ...


class PendingOutput:
    """A `SamplerOutput` that the device is computing. `token_ids_R` can be used on the device at once; the copies to
    the host are in progress."""

    def __init__(self, token_and_finite_2R: torch.Tensor, logprobs: LogprobsTensors | None) -> None:
        self.token_ids_R = token_and_finite_2R[0]
        self._token_and_finite_2R = to_host(token_and_finite_2R)
        self._logprobs = None if logprobs is None else logprobs.copied()
        self._copied: torch.cuda.Event | None = None
        if self.token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.token_ids_R.device))

    def output(self) -> SamplerOutput:
        """Return the tokens on the host; waits for them and for all work queued before them."""
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
    """Start sampling the next token of each row. `batch` None: every row is greedy without other options.

    future: tokens of the rows that the host does not know yet. proposal: see `on_host.sample`; drafts are sampled only
    after all tokens are known, so at most one of the two is set.
    """
    assert future is None or proposal is None
    if batch is None:
        return PendingOutput(kernels.greedy(logits_RV), None)
    token_and_finite_2R = _choose(kernels, logits_RV, batch, future)
    token_R = token_and_finite_2R[0]
    if proposal is not None:
        rows = proposal.rows[batch.is_sampled[proposal.rows]]
        if len(rows):
            index_D = on_device(rows, logits_RV.device)
            token_D = token_R[index_D]
            replace_by_accepted(token_D, weights(logits_RV, batch, rows), batch, rows, proposal)
            token_R[index_D] = token_D
    return PendingOutput(token_and_finite_2R, LogprobsTensors.compute(logits_RV, batch, token_R))


def _choose(
    kernels: SamplingKernels, logits_RV: torch.Tensor, batch: SamplingBatch, future: FutureIds | None
) -> torch.Tensor:
    """Return the tokens of plain steps, and whether they are valid (2, R), on the device."""
    params_5R = _pack_params(batch, logits_RV.shape[1])
    changed = np.flatnonzero(adjusts_logits(batch.options, batch.positions) | batch.is_masked)
    if len(changed) == len(batch.options):
        return _choose_changed(kernels, logits_RV, batch, changed, params_5R, future)
    token_and_finite_2R = kernels.sample(logits_RV, on_device(params_5R, logits_RV.device))
    if len(changed):
        index_C = on_device(changed, logits_RV.device)
        token_and_finite_2R[:, index_C] = _choose_changed(kernels, logits_RV, batch, changed, params_5R, future)
    return token_and_finite_2R


def _choose_changed(
    kernels: SamplingKernels,
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    changed: np.ndarray,
    params_5R: np.ndarray,
    future: FutureIds | None,
) -> torch.Tensor:
    z_CV = adjusted(logits_RV, batch, changed, future)
    token_and_finite_2C = kernels.sample(z_CV, on_device(np.ascontiguousarray(params_5R[:, changed]), z_CV.device))
    # a mask or penalty may leave no token, but never makes a non-finite row valid
    token_and_finite_2C[1] &= torch.isfinite(logits_RV[on_rows(changed, logits_RV)].amax(dim=-1))
    return token_and_finite_2C


def _pack_params(batch: SamplingBatch, vocab_size: int) -> np.ndarray:
    """Pack the sampling parameters for `Kernels.sample`, rounded as on the host."""
    options = batch.options
    temperature_R = np.clip(options["temperature"], 1 / LARGE, LARGE).astype(np.float32)
    top_k_R = np.where(options["top_k"] > 0, np.minimum(options["top_k"], vocab_size), vocab_size)
    top_p_R, min_p_R = options["top_p"].astype(np.float32), options["min_p"].astype(np.float32)
    u_R = uniforms(batch.seeds, batch.positions, PLAIN)
    return np.stack([np.where(batch.is_sampled, temperature_R, 0.0), top_k_R, top_p_R, min_p_R, u_R]).astype(np.float64)
