"""From logits to the next token of each row, and whether drafted tokens are those.

Owns the order of the sampling options, which is vLLM's:

    fp32 logits -> min_tokens mask -> repetition penalty -> presence and frequency penalties -> temperature
    -> min_p -> top_k -> top_p -> one draw

top_k keeps every token that ties with the k-th best. min_p is relative to the best token's probability. top_p
is relative to what top_k and min_p left: the fewest best tokens whose probabilities reach top_p; of equal
ones the lowest ids. Greedy rows (temperature 0) take the best token after masks and penalties, of equal ones
the lowest id. Log-probabilities are those of the raw logits.

A draw uses one uniform number that depends on the row's seed and the token's position alone (`uniforms`), and
every step works row by row, so a row draws the same token in any batch. Rows that need a feature are copied
out and worked on; a batch of plain greedy rows costs one pass over the logits. Options come as arrays, so no row costs
Python of its own, but for the masks of min_tokens and the log-probabilities that are reported.

Shapes: R rows, S sequences, V vocabulary, K best values.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.draws import PLAIN, draw, sums, uniforms
from pipeline.engine.params import TokenLogprobs
from pipeline.engine.rejection import DraftLaw, settle
from pipeline.engine.sequence import SlotTable

_FEW = 64  # best values looked at for top_p; rows that are flatter are looked at again
_BLOCK_VALUES = 1 << 20  # of logits that are drawn from at a time on CPU: 4 MiB
_GROUPS = 256  # of tokens, whose maxima tell how large the best values are at least


@dataclass(frozen=True)
class SamplingBatch:
    """The rows of one step that need a token, in the order of the logits.

    options: of SAMPLING_OPTIONS. seeds (uint64) and positions (int64; how many tokens the row has generated so far)
    key the draw. ending_ids (object): the tokens that would end the row (int64), masked before its min_tokens, or None.
    token_ids is a table of known tokens, read only for rows with penalties: row r has the first num_known[r] of
    token_ids[slots[r]], and the first num_prompt[r] of those are its prompt.
    """

    options: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    ending_ids: np.ndarray
    token_ids: np.ndarray
    slots: np.ndarray
    num_prompt: np.ndarray
    num_known: np.ndarray

    @classmethod
    def of(cls, table: SlotTable, slot_R: np.ndarray, known_R: np.ndarray) -> "SamplingBatch":
        """Rows whose next token follows the first known_R tokens of the sequences in these slots."""
        return cls(
            options=table.sampling[slot_R],
            seeds=table.seed[slot_R],
            positions=known_R - table.num_prompt[slot_R],
            ending_ids=table.ending_ids[slot_R],
            token_ids=table.token_ids,
            slots=slot_R,
            num_prompt=table.num_prompt[slot_R],
            num_known=known_R,
        )


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row, and log-probabilities by row where they were asked for. Where `finite` is False the row's
    logits hold NaN or +inf, or nothing above -inf; its token id is then 0 and means nothing."""

    token_ids: np.ndarray  # int64 [R]
    finite: np.ndarray  # bool [R]
    logprobs: dict[int, TokenLogprobs]

    def of_rows(self, rows: np.ndarray) -> "SamplerOutput":
        """Of these rows alone, in their order."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs:
            logprobs = {r: self.logprobs[row] for r, row in enumerate(rows.tolist()) if row in self.logprobs}
        return SamplerOutput(self.token_ids[rows], self.finite[rows], logprobs)


class Drawn:
    """What `greedy` gives, being worked out by a device that the host does not wait for.

    `token_ids_R` can be used on the device at once; the copy for the host is under way.
    """

    def __init__(self, token_ids_R: torch.Tensor, finite_R: torch.Tensor) -> None:
        self.token_ids_R = token_ids_R
        both_2R = torch.stack([token_ids_R, finite_R.to(token_ids_R.dtype)])
        self._both_2R = both_2R.to("cpu", non_blocking=True)  # into pinned memory
        self._copied: torch.cuda.Event | None = None
        if token_ids_R.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids_R.device))

    def output(self) -> SamplerOutput:
        """The tokens on the host; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return SamplerOutput(*_tokens_and_finite(self._both_2R.numpy()), {})


@dataclass(frozen=True)
class Verified:
    """What a step with drafts came to. Sequence s has the rows from first_S[s] to those of the next one: one for each
    of its drafts and one behind them. Its first num_accepted_S[s] drafts were confirmed, and its next tokens are those
    of its first num_accepted_S[s] + 1 rows; only the last of these may be not finite."""

    output: SamplerOutput
    first_S: np.ndarray
    num_accepted_S: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The most tokens that a sequence gets."""
        return int(self.num_accepted_S.max()) + 1

    def tokens(self, sequences: np.ndarray, number: int) -> SamplerOutput:
        """Their tokens number `number`, from 0, in the form that a plain step gives them."""
        return self.output.of_rows(self.first_S[sequences] + number)


def greedy(logits_RV: torch.Tensor) -> SamplerOutput:
    """What `sample` gives where all rows are greedy and want nothing else: one pass and one transfer to the host."""
    if _is_quick_in_numpy(logits_RV):
        best, token_ids = _best_in_numpy(logits_RV.numpy())
        finite = np.isfinite(best)
        return SamplerOutput(token_ids if finite.all() else np.where(finite, token_ids, 0), finite, {})
    best_R, token_ids_R = logits_RV.max(dim=-1)
    return SamplerOutput(*_on_host(token_ids_R, torch.isfinite(best_R)), {})


def sample(logits_RV: torch.Tensor, batch: SamplingBatch, law: DraftLaw | None = None) -> SamplerOutput:
    """The next token of each row. `logits_RV` may have any float dtype, on any device, and is not changed.

    `law`: drafts of some rows and what they were drawn from; drawn rows among them keep their draft or redraw it.
    """
    plan = _Plan.of(batch)
    best_R, token_ids_R = _best(logits_RV)
    if len(plan.changed):
        rows = _on(plan.changed, logits_RV)
        z_RV = _adjusted(logits_RV, batch, plan.changed)
        best_R, token_ids_R = best_R.float(), token_ids_R.clone()
        best_changed_R, token_ids_R[rows] = _best(z_RV)
        # a mask or penalty may leave nothing, but never makes a broken row good
        best_R[rows] = torch.where(torch.isfinite(best_R[rows]), best_changed_R, best_R[rows])
    finite_R = torch.isfinite(best_R)
    if len(plan.drawn):
        token_ids_R = token_ids_R.clone()
        for drawn in _blocks(plan.drawn, logits_RV):
            w_RV = _weights(logits_RV, batch, drawn)
            u_R = uniforms(batch.seeds[drawn], batch.positions[drawn], PLAIN)
            drawn_ids_R = draw(w_RV, torch.from_numpy(u_R).to(w_RV.device))
            if law is not None:
                _settle_drafts(drawn_ids_R, w_RV, batch, drawn, law)
            token_ids_R[_on(drawn, logits_RV)] = drawn_ids_R
    token_ids, finite = _on_host(token_ids_R, finite_R)
    return SamplerOutput(token_ids, finite, _logprobs(logits_RV, batch, plan, token_ids, finite))


def verify(
    logits_RV: torch.Tensor, batch: SamplingBatch | None, draft_R: np.ndarray, law: DraftLaw | None = None
) -> Verified:
    """How many drafts of each sequence the model confirms, and the tokens that this makes.

    Row r is computed from the known tokens and the drafts before it, and draft_R[r] (int64) is what was drafted for its
    place; -1 marks the last row of each sequence, for whose place nothing was. `batch` None: every row is greedy and
    wants nothing else.

    Each row takes the token that it would take in a plain step, and a draft is accepted where it is that token. So the
    tokens are those of plain steps, drawn ones too: a draft x is accepted with probability p(x), the most that is
    possible for a draft whose law is not known. Only where the law of the drafts is given, rejection sampling accepts
    more of them; then the tokens have the same law, but depend on the drafts.
    """
    output = greedy(logits_RV) if batch is None else sample(logits_RV, batch, law)
    differs = np.flatnonzero((output.token_ids != draft_R) | ~output.finite)
    first_S = np.flatnonzero(draft_R < 0) + 1
    first_S[1:], first_S[0] = first_S[:-1].copy(), 0
    return Verified(output, first_S, differs[np.searchsorted(differs, first_S)] - first_S)


def _blocks(rows: np.ndarray, like: torch.Tensor) -> list[np.ndarray]:
    """`rows` in blocks: some dozen passes over copies of their values follow, and a flat row widens what is looked at
    of all rows beside it. A row's draw is its own, so blocks change nothing but time and memory."""
    if like.device.type != "cpu":
        return [rows]
    size = max(_BLOCK_VALUES // like.shape[1], 1)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _settle_drafts(
    drawn_ids_R: torch.Tensor, w_RV: torch.Tensor, batch: SamplingBatch, drawn: np.ndarray, law: DraftLaw
) -> None:
    """Replace the plain draws of rows that have a draft of known law."""
    law = law.of(np.flatnonzero(np.isin(law.rows, drawn)))
    if not len(law.rows):
        return
    at = torch.from_numpy(np.searchsorted(drawn, law.rows)).to(w_RV.device)
    seeds, positions = batch.seeds[law.rows], batch.positions[law.rows]
    drawn_ids_R[at] = settle(w_RV[at], law, seeds, positions, drawn_ids_R[at])


def _best(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and the lowest id that has it. NaN is the largest of all, so one pass also says
    whether a row can be used."""
    if not _is_quick_in_numpy(logits_RV):
        return logits_RV.max(dim=-1)
    best, token_ids = _best_in_numpy(logits_RV.numpy())
    return torch.from_numpy(best), torch.from_numpy(token_ids)


def _is_quick_in_numpy(logits_RV: torch.Tensor) -> bool:
    """On CPU torch looks for the place of a maximum value by value; numpy's search runs at the speed of reading."""
    return logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32


def _best_in_numpy(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    token_ids = logits.argmax(axis=-1)
    return logits[np.arange(len(token_ids)), token_ids], token_ids


def _on_host(token_ids_R: torch.Tensor, finite_R: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and whether they mean something, as numpy arrays, in one transfer."""
    return _tokens_and_finite(torch.stack([token_ids_R, finite_R.to(token_ids_R.dtype)]).cpu().numpy())


def _tokens_and_finite(both_2R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    finite = both_2R[1].astype(bool)
    return np.where(finite, both_2R[0], 0), finite


def distribution(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The fp32 probabilities [R, V] that `sample` draws from; one-hot for greedy rows, zeros for rows not
    finite.
    """
    plan = _Plan.of(batch)
    p_RV = torch.zeros(logits_RV.shape, dtype=torch.float32, device=logits_RV.device)
    every = np.arange(len(batch.options))
    undrawn = np.setdiff1d(every, plan.drawn)
    if len(undrawn):
        z_RV = _adjusted(logits_RV, batch, undrawn)
        p_RV[_on(undrawn, logits_RV)] = torch.zeros_like(z_RV).scatter_(1, z_RV.argmax(-1, keepdim=True), 1.0)
    if len(plan.drawn):
        w_RV = _weights(logits_RV, batch, plan.drawn)
        p_RV[_on(plan.drawn, logits_RV)] = w_RV / w_RV.sum(dim=-1, keepdim=True)
    best_R = _adjusted(logits_RV, batch, every).amax(dim=-1)  # a mask may leave nothing
    usable_R = torch.isfinite(best_R) & torch.isfinite(logits_RV.amax(dim=-1))
    return torch.where(usable_R[:, None], p_RV, 0.0)


@dataclass(frozen=True)
class _Plan:
    """Which rows need what. drawn: those with a temperature. changed: greedy rows with a mask or a penalty,
    and drawn rows with a mask, which may leave them nothing. reported: those that want log-probabilities. All
    ascending."""

    changed: np.ndarray
    drawn: np.ndarray
    reported: np.ndarray

    @classmethod
    def of(cls, batch: SamplingBatch) -> "_Plan":
        options = batch.options
        drawn = options["temperature"] > 0.0
        penalised = (options["repetition_penalty"] != 1.0) | _counts(options)
        changed = (penalised & ~drawn) | (options["min_tokens"] > batch.positions)
        return cls(np.flatnonzero(changed), np.flatnonzero(drawn), np.flatnonzero(options["logprobs"] >= 0))


def _counts(options: np.ndarray) -> np.ndarray:
    """Which rows have a penalty that counts output tokens."""
    return (options["presence_penalty"] != 0.0) | (options["frequency_penalty"] != 0.0)


def _adjusted(logits_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    """fp32 copy of `rows` of the logits with masks and penalties applied."""
    z_RV = logits_RV[_on(rows, logits_RV)].to(torch.float32, copy=True)
    num_tokens = z_RV.shape[1]
    options = batch.options[rows]

    early = np.flatnonzero(options["min_tokens"] > batch.positions[rows])
    if len(early):
        ids_of_rows = batch.ending_ids[rows[early]].tolist()
        row_N = np.repeat(early, [len(ids) for ids in ids_of_rows])
        z_RV[_places(row_N, np.concatenate(ids_of_rows), z_RV)] = float("-inf")

    repeating = np.flatnonzero(options["repetition_penalty"] != 1.0)
    if len(repeating):
        row_N, id_N = _known_tokens(batch, rows[repeating], with_prompt=True)
        places = _places(repeating[row_N], id_N, z_RV)
        penalty = _column(np.maximum(options["repetition_penalty"], 1 / _LARGE), z_RV)[places[0], 0]
        z = z_RV[places]
        # a token seen twice is written twice with the same value
        z_RV[places] = torch.where(z < 0, z * penalty, z / penalty).clamp_(max=_LARGE)

    counted = np.flatnonzero(_counts(options))
    if len(counted):
        row_N, id_N = _known_tokens(batch, rows[counted], with_prompt=False)
        inside = (id_N >= 0) & (id_N < num_tokens)
        key_N, count_N = np.unique(row_N[inside] * num_tokens + id_N[inside], return_counts=True)
        places = _places(counted[key_N // num_tokens], key_N % num_tokens, z_RV)
        frequency = _column(options["frequency_penalty"], z_RV)[places[0], 0]
        presence = _column(options["presence_penalty"], z_RV)[places[0], 0]
        z_RV[places] -= frequency * torch.from_numpy(count_N).to(z_RV) + presence
    return z_RV


_LARGE = 1e30  # options and penalised logits stay below: far from fp32's end, and 1 / _LARGE is no denormal


def _known_tokens(batch: SamplingBatch, rows: np.ndarray, with_prompt: bool) -> tuple[np.ndarray, np.ndarray]:
    """Every known token of `rows`, or every generated one: its place among `rows`, and its id."""
    begin_R = np.zeros(len(rows), dtype=np.int64) if with_prompt else batch.num_prompt[rows]
    count_R = batch.num_known[rows] - begin_R
    row_N = np.repeat(np.arange(len(rows)), count_R)
    column_N = np.arange(len(row_N)) + np.repeat(begin_R - np.cumsum(count_R) + count_R, count_R)
    return row_N, batch.token_ids[batch.slots[rows][row_N], column_N].astype(np.int64)


def _weights(logits_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    """Unnormalised fp32 probabilities of `rows`, the best token at 1, what is left out at exactly 0."""
    options = batch.options[rows]
    z_RV = _adjusted(logits_RV, batch, rows)
    z_RV -= z_RV.amax(dim=-1, keepdim=True)
    # The best token now stands at 0 and stays there, however small the temperature is.
    z_RV /= _column(np.maximum(options["temperature"], 1 / _LARGE), z_RV)

    with_top_k = np.flatnonzero((options["top_k"] > 0) & (options["top_k"] < z_RV.shape[1]))
    if len(with_top_k):
        picked, top_k = _on(with_top_k, z_RV), options["top_k"][with_top_k]
        best_RC, _ = _best_values(z_RV[picked], int(top_k.max()), torch.finfo(torch.float32).min)
        kth_R1 = best_RC.gather(1, torch.from_numpy(top_k).to(z_RV.device)[:, None] - 1)
        z_RV[picked] = z_RV[picked].masked_fill(z_RV[picked] < kth_R1, float("-inf"))

    w_RV = z_RV.exp_()
    if (options["min_p"] > 0.0).any():
        w_RV.masked_fill_(w_RV < _column(options["min_p"], w_RV), 0.0)
    with_top_p = np.flatnonzero(options["top_p"] < 1.0)
    if len(with_top_p):
        picked = _on(with_top_p, w_RV)
        cut_RV = w_RV[picked]
        _cut_top_p(cut_RV, _column(options["top_p"][with_top_p], w_RV).double())
        if not isinstance(picked, slice):  # all rows are a view
            w_RV[picked] = cut_RV
    return w_RV


def _cut_top_p(w_RV: torch.Tensor, top_p_R1: torch.Tensor) -> None:
    """Write 0 wherever the better tokens alone reach top_p of the row's sum; of equal ones the lowest ids stay.

    Mostly a few tokens reach it. Rows where they do not are looked at again with every token that can matter: V
    tokens of less than a V-th of the last mass cannot reach into the kept part; half of that covers rounding.
    """
    total_R1 = sums(w_RV)[:, None]
    wanted_R1 = top_p_R1 * total_R1
    few = _best_values(w_RV, min(_FEW, w_RV.shape[1]), torch.finfo(torch.float32).tiny)
    last_R1, num_equal_R1, is_tied_R, reached_R = _last_kept(*few, wanted_R1)
    flat = np.flatnonzero(~reached_R.cpu().numpy())
    if len(flat):
        on = _on(flat, w_RV)
        unlikely_R1 = 0.5 * (1.0 - top_p_R1[on]) * total_R1[on] / w_RV.shape[1]
        likely = _values_from(w_RV[on], unlikely_R1.float())
        last_R1[on], num_equal_R1[on], is_tied_R[on], _ = _last_kept(*likely, wanted_R1[on])
    w_RV.masked_fill_(w_RV < last_R1, 0.0)
    tied = np.flatnonzero(is_tied_R.cpu().numpy())
    if len(tied):
        on = _on(tied, w_RV)
        equal_RV = w_RV[on] == last_R1[on]
        w_RV[on] = w_RV[on].masked_fill(equal_RV & (equal_RV.cumsum(dim=-1) > num_equal_R1[on]), 0.0)


def _last_kept(best_RC: torch.Tensor, num_best_R: torch.Tensor, wanted_R1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each row the value of the last token that is needed to reach `wanted`, how many of that value are needed and
    whether there are more, and whether the row's `num_best` values reach it at all."""
    best_RC = best_RC.clamp(min=0.0)
    sum_RC = best_RC.double().cumsum(dim=-1)
    num_kept_R1 = (sum_RC - best_RC < wanted_R1).sum(dim=-1, keepdim=True).clamp_(min=1)
    last_R1 = best_RC.gather(1, num_kept_R1 - 1)
    num_equal_R1 = num_kept_R1 - (best_RC > last_R1).sum(dim=-1, keepdim=True)
    is_tied_R = (best_RC == last_R1).sum(dim=-1) > num_equal_R1[:, 0]
    reached_R = (sum_RC[:, -1] >= wanted_R1[:, 0]) & (num_kept_R1[:, 0] <= num_best_R)
    return last_R1, num_equal_R1, is_tied_R, reached_R


def _best_values(x_RV: torch.Tensor, num: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_values_from` a value that at least `num` of a row reach: the num-th of the maxima of groups of tokens. Values
    below `floor` are left out."""
    width = max(x_RV.shape[1] // _GROUPS, 1)
    num_groups = x_RV.shape[1] // width
    if num <= num_groups:
        best_RG = x_RV[:, : num_groups * width].unflatten(1, (num_groups, width)).amax(dim=-1)
    else:
        best_RG = x_RV
    least_R1 = best_RG.topk(num, dim=-1).values[:, -1:].clamp(min=floor)
    return _values_from(x_RV, least_R1, num)


def _values_from(x_RV: torch.Tensor, least_R1: torch.Tensor, num: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's values of at least `least`, the largest first, and how many they are; in at least `num` columns, of
    which the last ones may hold smaller values or -inf."""
    if x_RV.device.type != "cpu":
        count_R = (x_RV >= least_R1).sum(dim=-1)
        return x_RV.topk(max(int(count_R.max()), num), dim=-1).values, count_R
    x, num_tokens = x_RV.numpy(), x_RV.shape[1]
    at_N = np.flatnonzero(x >= least_R1.numpy())
    row_N = at_N // num_tokens
    count_R = np.bincount(row_N, minlength=len(x))
    best_RC = np.full((len(x), max(int(count_R.max()), num)), -np.inf, dtype=np.float32)
    best_RC[row_N, np.arange(len(at_N)) - (np.cumsum(count_R) - count_R)[row_N]] = x.ravel()[at_N]
    best_RC.sort(axis=-1)
    return torch.from_numpy(best_RC[:, ::-1].copy()), torch.from_numpy(count_R)


def _logprobs(
    logits_RV: torch.Tensor, batch: SamplingBatch, plan: _Plan, token_ids: np.ndarray, finite: np.ndarray
) -> dict[int, TokenLogprobs]:
    rows = plan.reported[finite[plan.reported]]
    if not len(rows):
        return {}
    logprobs_RV = logits_RV[_on(rows, logits_RV)].float().log_softmax(dim=-1)
    chosen_R1 = torch.from_numpy(token_ids[rows]).to(logprobs_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    widths = np.minimum(batch.options["logprobs"][rows], logprobs_RV.shape[1])
    top = logprobs_RV.topk(int(widths.max()), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return {
        row: TokenLogprobs(token_id, chosen[i], tuple(zip(ids[i][:width], values[i][:width])))
        for i, (row, token_id, width) in enumerate(zip(rows.tolist(), token_ids[rows].tolist(), widths.tolist()))
    }


def _on(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor | slice:
    """Index of ascending `rows`: all of them cost no copy."""
    if len(rows) == like.shape[0]:
        return slice(None)
    return torch.from_numpy(rows).to(like.device)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """One fp32 number per row, [R, 1]; kept far from the ends of fp32, where inf * 0 would make NaN."""
    inside = np.clip(values, -_LARGE, _LARGE).astype(np.float32)
    return torch.from_numpy(inside).to(like.device)[:, None]


def _places(row_N: np.ndarray, id_N: np.ndarray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of every id in its row; ids outside the vocabulary have no logit and are left out."""
    inside = (id_N >= 0) & (id_N < like.shape[1])
    return torch.from_numpy(row_N[inside]).to(like.device), torch.from_numpy(id_N[inside]).to(like.device)
