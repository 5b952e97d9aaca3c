"""Samples one token of each row of logits on the device, or takes the best: one program a row, without sorting.

(best logit - logit) / temperature is a float32 that is not negative, and the bits of such numbers, as integers, have
the same order as the numbers. So the cuts of top_k and top_p are found by a search over the bits: each pass tries three
cuts and leaves a quarter of the range, some 14 passes in all.

These passes read candidates alone. One pass over the row finds the total, and what the tokens within two fixed
distances of the best weigh, or their number for top_k. The nearest distance that is certain to hold the cut gives the
candidates, which another pass writes to a list in the order of their tokens. Where there are more than the list takes,
as with a high temperature, the search reads the whole row. A row without these options is read three times, a greedy
row once.

Sums are float32 in each lane and float64 across lanes; the running sum in which a token is found is float64. Nothing
depends on other rows.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch

_WIDTH = 4096  # tokens looked at together, by 512 threads
_CANDIDATES = 4096  # of a row that the list takes, a multiple of _WIDTH
_STAGES = tl.constexpr(3)  # of the loops over a row: their loads are copied ahead
_NEAR, _FAR = tl.constexpr(0x40C00000), tl.constexpr(0x41400000)  # bits of the distances 6 and 12
_FARTHEST = tl.constexpr(0x42D00000)  # bits of 104: exp(-104) is 0 in float32, so nothing past it counts


@triton.jit
def _best_of_row(logits_ptr, num_tokens, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), float("-inf"), tl.float32)
    at = tl.zeros((WIDTH,), tl.int32)
    for first in tl.range(0, num_tokens, WIDTH, num_stages=_STAGES):
        token = first + lane
        logit = tl.load(logits_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit)  # a maximum may pass NaN by
        at = tl.where(logit > best, token, at)
        best = tl.maximum(best, logit)
    largest = tl.max(best, axis=0) + 0.0  # never -0: its distance to 0 is -0, whose bits as an integer are negative
    return largest, tl.min(tl.where(best == largest, at, num_tokens), axis=0)


@triton.jit
def _weights(logits_ptr, first, num_tokens, best, scale, min_p, WIDTH: tl.constexpr):
    """Of tokens from `first` on: their distance below the best, as bits, and their weights, 0 below min_p."""
    token = first + tl.arange(0, WIDTH)
    logit = tl.load(logits_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    below = (best - logit) * scale
    weight = tl.exp(-below)
    return below.to(tl.int32, bitcast=True), tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def _nearest_cut(
    logits_ptr,
    num_tokens,
    best,
    scale,
    min_p,
    cut,
    wanted,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The nearest cut, up to `cut`, at which the tokens up to it are `wanted` in number or, without COUNT, weigh as
    much."""
    low = tl.full((), -1, tl.int32)
    high = cut
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        near, middle, far = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        to_near = tl.zeros((WIDTH,), tl.float32)
        to_middle = tl.zeros((WIDTH,), tl.float32)
        to_far = tl.zeros((WIDTH,), tl.float32)
        for first in tl.range(0, num_tokens, WIDTH, num_stages=STAGES):
            bits, amount = _weights(logits_ptr, first, num_tokens, best, scale, min_p, WIDTH)
            if COUNT:
                amount = tl.full((WIDTH,), 1.0, tl.float32)
            to_near += tl.where(bits <= near, amount, 0.0)
            to_middle += tl.where(bits <= middle, amount, 0.0)
            to_far += tl.where(bits <= far, amount, 0.0)
        past_near = tl.sum(to_near.to(tl.float64), axis=0) >= wanted
        past_middle = tl.sum(to_middle.to(tl.float64), axis=0) >= wanted
        past_far = tl.sum(to_far.to(tl.float64), axis=0) >= wanted
        low = tl.where(past_near, low, tl.where(past_middle, near, tl.where(past_far, middle, far)))
        high = tl.where(past_near, near, tl.where(past_middle, middle, tl.where(past_far, far, high)))
    return high


@triton.jit
def _sum_before(logits_ptr, num_tokens, best, scale, min_p, cut, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """The sum of the weights before the cut, and the number of tokens at it."""
    before = tl.zeros((WIDTH,), tl.float32)
    num_at = tl.zeros((WIDTH,), tl.int32)
    for first in tl.range(0, num_tokens, WIDTH, num_stages=STAGES):
        bits, weight = _weights(logits_ptr, first, num_tokens, best, scale, min_p, WIDTH)
        before += tl.where(bits < cut, weight, 0.0)
        num_at += (bits == cut).to(tl.int32)
    return tl.sum(before.to(tl.float64), axis=0), tl.sum(num_at, axis=0)


@triton.jit
def _survey(logits_ptr, num_tokens, best, scale, min_p, counts, WIDTH: tl.constexpr):
    """The sum of all weights; and of the tokens within each fixed distance the number if `counts`, else the weight."""
    total = tl.zeros((WIDTH,), tl.float32)
    near, far = total, total
    for first in tl.range(0, num_tokens, WIDTH, num_stages=_STAGES):
        bits, weight = _weights(logits_ptr, first, num_tokens, best, scale, min_p, WIDTH)
        total += tl.where(bits <= _FARTHEST, weight, 0.0)
        amount = tl.where(counts, 1.0, weight)
        near += tl.where(bits <= _NEAR, amount, 0.0)
        far += tl.where(bits <= _FAR, amount, 0.0)
    return (
        tl.sum(total.to(tl.float64), axis=0),
        tl.sum(near.to(tl.float64), axis=0),
        tl.sum(far.to(tl.float64), axis=0),
    )


@triton.jit
def _list_candidates(
    logits_ptr, logit_ptr, place_ptr, num_tokens, best, scale, cut, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Write the logits and the tokens up to the cut, in their order, and -inf to the end of the last WIDTH. Returns how
    many there are; those that the list does not take are not written."""
    lane = tl.arange(0, WIDTH)
    listed = tl.full((), 0, tl.int32)
    for first in tl.range(0, num_tokens, WIDTH, num_stages=_STAGES):
        token = first + lane
        logit = tl.load(logits_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        wanted = ((best - logit) * scale).to(tl.int32, bitcast=True) <= cut
        at = listed + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(logit_ptr + at, logit, mask=wanted & (at < CANDIDATES))
        tl.store(place_ptr + at, token, mask=wanted & (at < CANDIDATES))
        listed += tl.sum(wanted.to(tl.int32), axis=0)
    end = listed + lane
    tl.store(logit_ptr + end, float("-inf"), mask=end < tl.minimum(tl.cdiv(listed, WIDTH) * WIDTH, CANDIDATES))
    tl.debug_barrier()  # other threads read what was written
    return listed


@triton.jit
def _token_at(
    logits_ptr, num_tokens, best, scale, min_p, cut, at_cut, most_at_cut, target, WIDTH: tl.constexpr
):  # fmt: skip
    """The first token at which the running sum passes `target`, else the last of positive weight. Of those at the cut,
    which weigh `at_cut` each, the first `most_at_cut` count."""
    first = tl.full((), 0, tl.int32)
    running = tl.full((), 0.0, tl.float64)
    num_seen = tl.full((), 0, tl.int32)  # at the cut
    begin, before, seen_before = first, running, num_seen  # of the tokens among which the one looked for is
    while (first < num_tokens) & (running <= target):
        bits, weight = _weights(logits_ptr, first, num_tokens, best, scale, min_p, WIDTH)
        num_at = tl.sum((bits == cut).to(tl.int32), axis=0)
        num_taken = tl.minimum(tl.maximum(most_at_cut - num_seen, 0), num_at)
        added = tl.sum(tl.where(bits < cut, weight, 0.0).to(tl.float64), axis=0) + num_taken.to(tl.float64) * at_cut
        begin = tl.where(added > 0, first, begin)
        before = tl.where(added > 0, running, before)
        seen_before = tl.where(added > 0, num_seen, seen_before)
        running += added
        num_seen += num_at
        first += WIDTH
    bits, weight = _weights(logits_ptr, begin, num_tokens, best, scale, min_p, WIDTH)
    rank = tl.cumsum((bits == cut).to(tl.int32), axis=0)
    kept = (bits < cut) | ((bits == cut) & (rank <= most_at_cut - seen_before))
    weight = tl.where(kept, weight, 0.0)
    past = (weight > 0) & (before + tl.cumsum(weight.to(tl.float64), axis=0) > target)
    lane = tl.arange(0, WIDTH)
    place = tl.min(tl.where(past, lane, WIDTH), axis=0)
    last = tl.max(tl.where(weight > 0, lane, 0), axis=0)
    return begin + tl.where(place < WIDTH, place, last)


@triton.jit
def _sampled(
    logits_ptr,
    num_tokens,
    best,
    scale,
    min_p,
    cut,
    top_k,
    top_p,
    u,
    total,
    is_cut_by_k,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The place, among these logits, of the token that `u` samples. All that counts is up to `cut`; `total`: the sum of
    the weights before top_k."""
    if is_cut_by_k:
        cut = _nearest_cut(logits_ptr, num_tokens, best, scale, min_p, cut, top_k, True, WIDTH, STAGES)
        before, num_at = _sum_before(logits_ptr, num_tokens, best, scale, min_p, cut, WIDTH, STAGES)
        total = before + num_at.to(tl.float64) * _weight_at(cut, min_p)
    if top_p < 1:
        wanted = top_p * total
        cut = _nearest_cut(logits_ptr, num_tokens, best, scale, min_p, cut, wanted, False, WIDTH, STAGES)
    before, num_at = _sum_before(logits_ptr, num_tokens, best, scale, min_p, cut, WIDTH, STAGES)
    at_cut = _weight_at(cut, min_p)
    if top_p < 1:
        # as many as are needed to reach it, and at least one
        needed = tl.ceil((top_p * total - before) / tl.maximum(at_cut, 1e-300))
        num_at = tl.minimum(tl.maximum(needed, 1.0), num_at.to(tl.float64)).to(tl.int32)
    target = u * (before + num_at.to(tl.float64) * at_cut)
    return _token_at(logits_ptr, num_tokens, best, scale, min_p, cut, at_cut, num_at, target, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _sample(
    logits_ptr,
    how_ptr,
    token_ptr,
    finite_ptr,
    listed_logit_ptr,
    listed_token_ptr,
    stride,
    num_tokens,
    num_rows,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    best, token = _best_of_row(logits_ptr, num_tokens, WIDTH)
    finite = (best > float("-inf")) & (best < float("inf"))
    token = tl.where(finite, token, 0)
    temperature = tl.load(how_ptr + row)
    if finite & (temperature > 0):
        scale = (1.0 / temperature).to(tl.float32)
        top_k = tl.load(how_ptr + num_rows + row)
        top_p = tl.load(how_ptr + 2 * num_rows + row)
        min_p = tl.load(how_ptr + 3 * num_rows + row).to(tl.float32)
        u = tl.load(how_ptr + 4 * num_rows + row)
        is_cut_by_k = top_k < num_tokens
        cut = tl.full((), _FARTHEST, tl.int32)
        total = tl.full((), 0.0, tl.float64)
        num_listed = tl.full((), CANDIDATES + 1, tl.int32)
        listed_logit_ptr += row * CANDIDATES
        listed_token_ptr += row * CANDIDATES
        if is_cut_by_k | (top_p < 1):
            total, near, far = _survey(logits_ptr, num_tokens, best, scale, min_p, is_cut_by_k, WIDTH)
            # Of top_k the k-th token has to be within the distance, of top_p alone the tokens there must weigh enough.
            wanted = tl.where(is_cut_by_k, top_k, top_p * total)
            if far >= wanted:
                cut = tl.where(near >= wanted, _NEAR, _FAR)
                num_listed = _list_candidates(
                    *(logits_ptr, listed_logit_ptr, listed_token_ptr, num_tokens, best, scale, cut, WIDTH, CANDIDATES),
                )
        if num_listed <= CANDIDATES:
            whole = tl.multiple_of(tl.cdiv(num_listed, WIDTH) * WIDTH, 16)
            place = _sampled(
                *(listed_logit_ptr, whole, best, scale, min_p, cut, top_k, top_p, u, total, is_cut_by_k, WIDTH, 1),
            )
            token = tl.load(listed_token_ptr + place)
        else:
            token = _sampled(
                *(logits_ptr, num_tokens, best, scale, min_p, cut, top_k, top_p, u, total, is_cut_by_k, WIDTH, _STAGES),
            )
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(finite_ptr + row, finite)


@triton.jit
def _weight_at(cut, min_p):
    weight = tl.exp(-cut.to(tl.float32, bitcast=True))
    return tl.where(weight >= min_p, weight, 0.0).to(tl.float64)


def sample(logits_RV: torch.Tensor, how_5R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contract.Kernels`. Stays on the device; the token of a row that is not finite is 0."""
    num_rows = len(logits_RV)
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    finite_R = torch.empty(num_rows, dtype=torch.bool, device=logits_RV.device)
    if num_rows:
        sample_launch(logits_RV, how_5R, token_R, finite_R).run()
    return token_R, finite_R


def sample_launch(
    logits_RV: torch.Tensor, how_5R: torch.Tensor, token_R: torch.Tensor, finite_R: torch.Tensor
) -> Launch:
    """float32, float16 or bfloat16 logits; rows may lie apart."""
    num_rows, num_tokens = logits_RV.shape
    assert logits_RV.stride(1) == 1
    assert how_5R.is_contiguous()
    listed_logit = torch.empty(num_rows, _CANDIDATES, dtype=torch.float32, device=logits_RV.device)
    listed_token = torch.empty(num_rows, _CANDIDATES, dtype=torch.int32, device=logits_RV.device)
    return Launch(
        _sample,
        (num_rows,),
        (
            *(logits_RV, how_5R, token_R, finite_R, listed_logit, listed_token),
            *(logits_RV.stride(0), num_tokens, num_rows),
        ),
        {"WIDTH": _WIDTH, "CANDIDATES": _CANDIDATES},
        num_warps=16,
    )
