"""From logits to the next token of each row.

Owns the order of the sampling options, which is vLLM's:

    fp32 logits -> min_tokens mask -> repetition penalty -> presence and frequency penalties -> temperature
    -> min_p -> top_k -> top_p -> one draw

top_k keeps every token that ties with the k-th best. min_p is relative to the best token's probability. top_p
is relative to what top_k and min_p left: the fewest best tokens whose probabilities reach top_p; of equal
ones the lowest ids. Greedy rows (temperature 0) take the best token after masks and penalties, of equal ones
the lowest id. Log-probabilities are those of the raw logits.

A draw uses one uniform number that depends on the row's seed and the token's position alone (`uniforms`), and
every step works row by row, so a row draws the same token in any batch. Rows that need a feature are copied
out and worked on; a batch of plain greedy rows costs one pass over the logits.

Shapes: R rows, V vocabulary, K best values, B blocks of the cumulative sum, W tokens of one block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.engine.params import SamplingParams, TokenLogprobs

_BLOCK = 512  # tokens of one block of the two-level cumulative sum
_BEST = 1024  # values sorted for top_p, unless a row is flatter than that


@dataclass
class SamplingBatch:
    """The rows of one step that need a token, in the order of the logits.

    seeds (uint64) and positions (int64; how many tokens the row has generated so far) key the draw. The token
    ids are only read for rows with penalties: output_token_ids for all three, prompt_token_ids for the
    repetition penalty.
    """

    params: Sequence[SamplingParams]
    seeds: np.ndarray
    positions: np.ndarray
    output_token_ids: Sequence[np.ndarray] = field(default_factory=list)
    prompt_token_ids: Sequence[np.ndarray] = field(default_factory=list)
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row. Where `finite` is False the row's logits hold NaN or +inf, or nothing above -inf;
    its token id is then 0 and means nothing."""

    token_ids: np.ndarray  # int64 [R]
    finite: np.ndarray  # bool [R]
    logprobs: list[TokenLogprobs | None]


def sample(logits_RV: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
    """The next token of each row. `logits_RV` may have any float dtype, on any device, and is not changed.

    Plain greedy rows take one pass and one transfer to the host; other rows also a few transfers of their
    options.
    """
    plan = _Plan.of(batch)
    # torch.max hands NaN on, so one pass gives the greedy token and whether the row can be used.
    best_R, token_ids_R = logits_RV.max(dim=-1)
    if plan.changed:
        rows = _on(plan.changed, logits_RV)
        z_RV = _adjusted(logits_RV, batch, plan.changed)
        best_R, token_ids_R = best_R.float(), token_ids_R.clone()
        best_changed_R, token_ids_R[rows] = z_RV.max(dim=-1)
        # a mask or penalty may leave nothing, but never makes a broken row good
        best_R[rows] = torch.where(torch.isfinite(best_R[rows]), best_changed_R, best_R[rows])
    finite_R = torch.isfinite(best_R)
    if plan.drawn:
        rows = _on(plan.drawn, logits_RV)
        w_RV = _weights(logits_RV, batch, plan.drawn)
        u_R = uniforms(batch.seeds[plan.drawn], batch.positions[plan.drawn])
        token_ids_R = token_ids_R.clone()
        token_ids_R[rows] = _draw(w_RV, torch.from_numpy(u_R).to(w_RV.device))
    ids_and_finite = torch.stack([token_ids_R, finite_R.to(token_ids_R.dtype)]).cpu().numpy()
    finite = ids_and_finite[1].astype(bool)
    token_ids = np.where(finite, ids_and_finite[0], 0)
    return SamplerOutput(token_ids, finite, _logprobs(logits_RV, batch, plan, token_ids, finite))


def distribution(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The fp32 probabilities [R, V] that `sample` draws from; one-hot for greedy rows, zeros for rows not
    finite.
    """
    plan = _Plan.of(batch)
    p_RV = torch.zeros(logits_RV.shape, dtype=torch.float32, device=logits_RV.device)
    greedy = sorted(set(range(len(batch.params))) - set(plan.drawn))
    if greedy:
        z_RV = _adjusted(logits_RV, batch, greedy)
        p_RV[_on(greedy, logits_RV)] = torch.zeros_like(z_RV).scatter_(1, z_RV.argmax(-1, keepdim=True), 1.0)
    if plan.drawn:
        w_RV = _weights(logits_RV, batch, plan.drawn)
        p_RV[_on(plan.drawn, logits_RV)] = w_RV / w_RV.sum(dim=-1, keepdim=True)
    best_R = _adjusted(logits_RV, batch, range(len(batch.params))).amax(dim=-1)  # a mask may leave nothing
    usable_R = torch.isfinite(best_R) & torch.isfinite(logits_RV.amax(dim=-1))
    return torch.where(usable_R[:, None], p_RV, 0.0)


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One number in [0, 1) per row (float64, 53 random bits) from its seed and position alone.

    splitmix64's output function (Steele, Lea, Flood 2014) over the seed, then over seed and position, then
    over the stream: a counter-based generator, nothing to keep between steps. `stream` gives further
    independent numbers of the same position.
    """
    with np.errstate(over="ignore"):
        key = _mix64(np.asarray(seeds).astype(np.uint64) + _GOLDEN)
        key = _mix64(key + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        bits = _mix64(key + np.uint64(stream + 1) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class _Plan:
    """Which rows need what. drawn: those with a temperature. changed: greedy rows with a mask or a penalty,
    and drawn rows with a mask, which may leave them nothing. reported: those that want log-probabilities. All
    ascending."""

    changed: list[int]
    drawn: list[int]
    reported: list[int]

    @classmethod
    def of(cls, batch: SamplingBatch) -> "_Plan":
        changed, drawn, reported = [], [], []
        for row, params in enumerate(batch.params):
            if params.temperature > 0.0:
                drawn.append(row)
            elif _has_penalty(params) or _masks(params, batch, row):
                changed.append(row)
            if params.logprobs is not None:
                reported.append(row)
        masked = [row for row in drawn if _masks(batch.params[row], batch, row)]
        return cls(sorted(changed + masked), drawn, reported)


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _masks(params: SamplingParams, batch: SamplingBatch, row: int) -> bool:
    """Whether the row may not end yet."""
    return params.min_tokens > 0 and params.min_tokens > batch.positions[row]


def _adjusted(logits_RV: torch.Tensor, batch: SamplingBatch, rows: Sequence[int]) -> torch.Tensor:
    """fp32 copy of `rows` of the logits with masks and penalties applied."""
    z_RV = logits_RV[_on(rows, logits_RV)].to(torch.float32, copy=True)
    num_tokens = z_RV.shape[1]
    params = [batch.params[row] for row in rows]

    masked = [
        np.array(sorted(_stop_ids(p, batch.eos_token_ids)), dtype=np.int64) if _masks(p, batch, row) else _NONE
        for row, p in zip(rows, params)
    ]
    if any(len(ids) for ids in masked):
        z_RV[_places(masked, num_tokens, z_RV)] = float("-inf")

    if any(p.repetition_penalty != 1.0 for p in params):
        seen = [
            np.concatenate([batch.prompt_token_ids[row], batch.output_token_ids[row]]).astype(np.int64)
            if p.repetition_penalty != 1.0
            else _NONE
            for row, p in zip(rows, params)
        ]
        places = _places(seen, num_tokens, z_RV)
        penalty = _column((max(p.repetition_penalty, 1 / _LARGE) for p in params), z_RV)[places[0], 0]
        z = z_RV[places]
        # a token seen twice is written twice with the same value
        z_RV[places] = torch.where(z < 0, z * penalty, z / penalty).clamp_(max=_LARGE)

    counted = [i for i, p in enumerate(params) if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0]
    if counted:
        output = [np.asarray(batch.output_token_ids[rows[i]], dtype=np.int64) for i in counted]
        count_RV = torch.zeros((len(counted), num_tokens), dtype=torch.float32, device=z_RV.device)
        places = _places(output, num_tokens, z_RV)
        ones = torch.ones(places[0].shape, dtype=torch.float32, device=z_RV.device)
        count_RV.index_put_(places, ones, accumulate=True)
        frequency = _column((params[i].frequency_penalty for i in counted), z_RV)
        presence = _column((params[i].presence_penalty for i in counted), z_RV)
        z_RV[_on(counted, z_RV)] -= frequency * count_RV + presence * (count_RV > 0)
    return z_RV


_LARGE = 1e30  # options and penalised logits stay below: far from fp32's end, and 1 / _LARGE is no denormal
_NONE = np.empty(0, dtype=np.int64)


def _stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> set[int]:
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))


def _weights(logits_RV: torch.Tensor, batch: SamplingBatch, rows: Sequence[int]) -> torch.Tensor:
    """Unnormalised fp32 probabilities of `rows`, the best token at 1, what is left out at exactly 0."""
    params = [batch.params[row] for row in rows]
    z_RV = _adjusted(logits_RV, batch, rows)
    z_RV -= z_RV.amax(dim=-1, keepdim=True)
    # The best token now stands at 0 and stays there, however small the temperature is.
    z_RV /= _column((max(p.temperature, 1 / _LARGE) for p in params), z_RV)

    with_top_k = [i for i, p in enumerate(params) if 0 < p.top_k < z_RV.shape[1]]
    if with_top_k:
        picked = _on(with_top_k, z_RV)
        k_R = torch.tensor([params[i].top_k for i in with_top_k], device=z_RV.device)
        best_RK = z_RV[picked].topk(int(max(params[i].top_k for i in with_top_k)), dim=-1).values
        kth_R1 = best_RK.gather(1, k_R[:, None] - 1)
        z_RV[picked] = torch.where(z_RV[picked] < kth_R1, float("-inf"), z_RV[picked])

    w_RV = z_RV.exp_()
    if any(p.min_p > 0.0 for p in params):
        w_RV.masked_fill_(w_RV < _column((p.min_p for p in params), w_RV), 0.0)
    with_top_p = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if with_top_p:
        picked = _on(with_top_p, w_RV)
        w_RV[picked] = _cut_top_p(w_RV[picked], _column((params[i].top_p for i in with_top_p), w_RV).double())
    return w_RV


def _cut_top_p(w_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """`w_RV` with 0 wherever the better tokens alone reach top_p of the row's sum.

    Tokens that together cannot hold the last 1 - top_p of a row are left out before anything is sorted; what
    is sorted are the values alone, and the row is then cut at the value of the last token kept.
    """
    total_R1 = w_RV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # V tokens of less than a V-th of the last mass cannot reach into the kept part; half of that covers
    # rounding
    unlikely_R1 = 0.5 * (1.0 - top_p_R1) * total_R1 / w_RV.shape[1]
    num_likely_R = (w_RV >= unlikely_R1).sum(dim=-1).tolist()
    cut_RV = torch.empty_like(w_RV)
    peaked = [row for row, count in enumerate(num_likely_R) if count <= _BEST]
    flat = [row for row, count in enumerate(num_likely_R) if count > _BEST]
    for rows in filter(None, (peaked, flat)):
        on = _on(rows, w_RV)
        num_sorted = max(1, max(num_likely_R[row] for row in rows))
        cut_RV[on] = _keep_best(w_RV[on], top_p_R1[on] * total_R1[on], num_sorted)
    return cut_RV


def _keep_best(w_RV: torch.Tensor, wanted_R1: torch.Tensor, num_sorted: int) -> torch.Tensor:
    """Per row the fewest best tokens that reach `wanted`, of equal ones the lowest ids; 0 elsewhere."""
    best_RK = w_RV.topk(num_sorted, dim=-1).values
    before_RK = best_RK.double().cumsum(dim=-1) - best_RK
    num_kept_R1 = (before_RK < wanted_R1).sum(dim=-1, keepdim=True).clamp_(min=1)
    last_R1 = best_RK.gather(1, num_kept_R1 - 1)
    num_equal_R1 = num_kept_R1 - (best_RK > last_R1).sum(dim=-1, keepdim=True)
    equal_RV = w_RV == last_R1
    keep_RV = (w_RV > last_R1) | (equal_RV & (equal_RV.cumsum(dim=-1) <= num_equal_R1))
    return w_RV.masked_fill(~keep_RV, 0.0)


def _draw(w_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative weight passes u of the whole: inverse transform sampling.

    Sums are fp64 and in two levels, blocks and then the tokens of one block. Only a token with weight above 0
    is ever taken, whatever the rounding: a place counts only where its own weight is positive.
    """
    num_rows, num_tokens = w_RV.shape
    num_blocks = -(-num_tokens // _BLOCK)
    padded_RV = torch.nn.functional.pad(w_RV, (0, num_blocks * _BLOCK - num_tokens))
    w_RBW = padded_RV.view(num_rows, num_blocks, _BLOCK)
    w_RB = w_RBW.sum(dim=-1, dtype=torch.float64)
    block_R, rest_R = _first_past(w_RB, u_R * w_RB.sum(dim=-1))
    w_RW = w_RBW[torch.arange(num_rows, device=w_RV.device), block_R].double()
    within_R, _ = _first_past(w_RW, rest_R)
    return block_R * _BLOCK + within_R


def _first_past(w_RN: torch.Tensor, target_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of positive weight where the running sum passes the target (else the last of positive
    weight), and how far beyond the sum before that place the target lies."""
    sum_RN = w_RN.cumsum(dim=-1)
    positive_RN = w_RN > 0
    past_RN = positive_RN & (sum_RN > target_R[:, None])
    place_N = torch.arange(w_RN.shape[1], device=w_RN.device)
    last_R = torch.where(positive_RN, place_N, 0).amax(dim=-1)
    first_R = torch.where(past_RN.any(dim=-1), past_RN.to(torch.uint8).argmax(dim=-1), last_R)
    before_R = (sum_RN - w_RN).gather(1, first_R[:, None])[:, 0]
    return first_R, target_R - before_R


def _logprobs(
    logits_RV: torch.Tensor, batch: SamplingBatch, plan: _Plan, token_ids: np.ndarray, finite: np.ndarray
) -> list[TokenLogprobs | None]:
    reported: list[TokenLogprobs | None] = [None] * len(batch.params)
    rows = [row for row in plan.reported if finite[row]]
    if not rows:
        return reported
    logprobs_RV = logits_RV[_on(rows, logits_RV)].float().log_softmax(dim=-1)
    chosen_R1 = torch.from_numpy(token_ids[rows]).to(logprobs_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, chosen_R1)[:, 0].cpu().numpy()
    widths = [min(batch.params[row].logprobs or 0, logprobs_RV.shape[1]) for row in rows]
    top = logprobs_RV.topk(max(widths), dim=-1)
    values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    for i, (row, width) in enumerate(zip(rows, widths)):
        best = tuple((int(ids[i, j]), float(values[i, j])) for j in range(width))
        reported[row] = TokenLogprobs(int(token_ids[row]), float(chosen[i]), best)
    return reported


def _on(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor | slice:
    """Index of ascending `rows`: all of them cost no copy."""
    if len(rows) == like.shape[0]:
        return slice(None)
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """One fp32 number per row, [R, 1]; kept far from the ends of fp32, where inf * 0 would make NaN."""
    inside = [min(max(value, -_LARGE), _LARGE) for value in values]
    return torch.tensor(inside, dtype=torch.float32, device=like.device)[:, None]


def _places(
    ids_of_rows: Sequence[np.ndarray], num_tokens: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column index of every id; ids outside the vocabulary have no logit and are left out."""
    ids = np.concatenate(ids_of_rows)
    rows = np.repeat(np.arange(len(ids_of_rows)), [len(row_ids) for row_ids in ids_of_rows])
    inside = (ids >= 0) & (ids < num_tokens)
    return torch.from_numpy(rows[inside]).to(like.device), torch.from_numpy(ids[inside]).to(like.device)
