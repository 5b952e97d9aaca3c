"""The next tokens of a step's rows where a device works beside the host: nothing here waits for it.

What decides a draw is known before the logits are: options, masks, and the uniform number of each row's seed and
position. So the host queues all that behind the step, and kernels choose (`Kernels.greedy`, `Kernels.draw`). A row
draws the token that `sampler.sample` draws for the same logits, but where its number lies within rounding of the
border between two tokens. The exception is a row whose draft was drawn from a known law, with top_k or top_p: how many
tokens are left to it is asked of the device.

Suffixes: R rows, V vocabulary, C rows with a mask or a penalty.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch, tokens_and_finite
from pipeline.engine.sampling.logprobs import AskedLogprobs
from pipeline.engine.sampling.penalties import LARGE, LateIds, adjusted, counts_output, on_rows
from pipeline.engine.sampling.random_numbers import PLAIN, uniforms
from pipeline.engine.sampling.rejection import DraftLaw, settle_drafts
from pipeline.engine.sampling.top_p import weights
from pipeline.kernels.transfer import on_device


class Chooser(Protocol):
    """Who chooses tokens on its device; see `Kernels`."""

    def greedy(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def draw(self, logits_RV: torch.Tensor, how_5R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


Besides = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of token_ids_R and finite_R


class Drawn:
    """What a sampler gives, being worked out by a device that the host does not wait for.

    `token_ids_R` can be used on the device at once, as can `besides_S`, if any, which is worked out from the tokens;
    the copies for the host are under way.
    """

    def __init__(
        self,
        token_ids_R: torch.Tensor,
        finite_R: torch.Tensor,
        logprobs: AskedLogprobs | None = None,
        besides_S: torch.Tensor | None = None,
    ) -> None:
        self.token_ids_R, self.besides_S = token_ids_R, besides_S
        self._besides_S = None if besides_S is None else besides_S.to("cpu", non_blocking=True)
        both_2R = torch.stack([token_ids_R, finite_R.to(token_ids_R.dtype)])
        self._both_2R = both_2R.to("cpu", non_blocking=True)  # into pinned memory
        self._logprobs = None if logprobs is None else logprobs.copied()
        self._copied: torch.cuda.Event | None = None
        if token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids_R.device))

    def output(self) -> SamplerOutput:
        """The tokens on the host; waits for them."""
        self._wait()
        token_ids, finite = tokens_and_finite(self._both_2R.numpy())
        return SamplerOutput(
            token_ids, finite, {} if self._logprobs is None else self._logprobs.by_row(token_ids, finite)
        )

    def besides(self) -> np.ndarray:
        """`besides_S` on the host; waits for it."""
        assert self._besides_S is not None
        self._wait()
        return self._besides_S.numpy()

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


@torch.inference_mode()
def draw_on_device(
    chooser: Chooser,
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    late: LateIds | None = None,
    law: DraftLaw | None = None,
    besides: Besides | None = None,
) -> Drawn:
    """Begin to choose the next token of each row. `batch` None: every row is greedy and wants nothing else.

    late: tokens of the rows themselves that the host does not know yet. law: see `sampler.sample`. besides: what else
    is to be worked out from the tokens and whether they are finite.
    """
    if batch is None:
        token_R, finite_R = chooser.greedy(logits_RV)
        return Drawn(token_R, finite_R, None, None if besides is None else besides(token_R, finite_R))
    token_R, finite_R = choose(chooser, logits_RV, batch, late)
    if law is not None:
        _settle(token_R, logits_RV, batch, law, late)
    logprobs = AskedLogprobs.of(logits_RV, batch, token_R)
    return Drawn(token_R, finite_R, logprobs, None if besides is None else besides(token_R, finite_R))


def choose(
    chooser: Chooser, logits_RV: torch.Tensor, batch: SamplingBatch, late: LateIds | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of plain steps, and whether they mean anything, on the device."""
    how_5R = _how(batch, logits_RV.shape[1])
    changed = _changed(batch)
    if len(changed) == len(batch.options):
        token_R, finite_R = _choose_changed(chooser, logits_RV, batch, changed, how_5R, late)
    else:
        token_R, finite_R = chooser.draw(logits_RV, on_device(how_5R, logits_RV.device))
        if len(changed):
            on = on_device(changed, logits_RV.device)
            token_R[on], finite_R[on] = _choose_changed(chooser, logits_RV, batch, changed, how_5R, late)
    return token_R, finite_R


def _choose_changed(
    chooser: Chooser,
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    changed: np.ndarray,
    how_5R: np.ndarray,
    late: LateIds | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    z_CV = adjusted(logits_RV, batch, changed, late)
    token_C, finite_C = chooser.draw(z_CV, on_device(np.ascontiguousarray(how_5R[:, changed]), z_CV.device))
    # a mask or penalty may leave nothing, but never makes a broken row good
    return token_C, finite_C & torch.isfinite(logits_RV[on_rows(changed, logits_RV)].amax(dim=-1))


def _settle(
    token_R: torch.Tensor, logits_RV: torch.Tensor, batch: SamplingBatch, law: DraftLaw, late: LateIds | None
) -> None:
    """Drawn rows that have a draft of known law keep it or draw in its place."""
    rows = law.rows[batch.options["temperature"][law.rows] > 0.0]
    if len(rows):
        at = on_device(rows, logits_RV.device)
        drawn_R = token_R[at]
        settle_drafts(drawn_R, weights(logits_RV, batch, rows, late), batch, rows, law)
        token_R[at] = drawn_R


def _changed(batch: SamplingBatch) -> np.ndarray:
    """Rows whose logits have to be changed before anything is chosen by them."""
    options = batch.options
    penalised = (options["repetition_penalty"] != 1.0) | counts_output(options)
    return np.flatnonzero(penalised | (options["min_tokens"] > batch.positions))


def _how(batch: SamplingBatch, vocab_size: int) -> np.ndarray:
    """See `Kernels.draw`; rounded as the host's sampler rounds."""
    options = batch.options
    is_drawn_R = options["temperature"] > 0.0
    temperature_R = np.clip(options["temperature"], 1 / LARGE, LARGE).astype(np.float32)
    top_k_R = np.where(options["top_k"] > 0, np.minimum(options["top_k"], vocab_size), vocab_size)
    top_p_R, min_p_R = options["top_p"].astype(np.float32), options["min_p"].astype(np.float32)
    u_R = uniforms(batch.seeds, batch.positions, PLAIN)
    return np.stack([np.where(is_drawn_R, temperature_R, 0.0), top_k_R, top_p_R, min_p_R, u_R]).astype(np.float64)
