"""Sample one token of each row of logits on the device, or take the best, without sorting, in two launches.

The first reads the logits once, with several programs a row: of each part of 128 tokens it writes the largest logit
and the sum of the weights exp((logit - largest) / temperature). The second has one program a row. A row without top_k,
top_p and min_p gets its token from these sums and from the one part that holds it.

The other rows need a cut: a distance below the best logit, (best - logit) / temperature, past which no token counts.
Distances are float32 and not negative, so their bits, as integers, have the order of the numbers. min_p is a cut. top_k
and top_p search theirs: the parts' largest logits bound it. Parts past the bound are never read again; the tokens of
the others are listed, and a search by numbers of tokens or sums of weights finds the cut among them. Where the list
is too short, a sample of the tokens gives two cuts that probably enclose the one searched (Floyd and Rivest, 1975), and
only what lies between is listed.

Sums over threads are integers, in units of 2^-44 of the best token's weight: no order of adding matters, and zero adds
nothing. No row depends on another.

Shapes: P parts of a row, T parts read together, W tokens of a part, C listed tokens, K cuts to try.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch, power_of_two

_PART = 128  # tokens: a warp reads them
_SUMMARIZED = 32  # parts, by one program of the first launch
_TOGETHER = 16  # parts that the second launch reads at a time
_LISTED = 4096  # tokens that fit the list
_STAGES = tl.constexpr(2)  # of the loops over a row: their loads are copied ahead
_UNIT = tl.constexpr(2.0**44)  # of _MAX_TOKENS weights of 1 the sum is below 2^63
_MAX_TOKENS = (1 << 19) - 1
_FARTHEST = tl.constexpr(0x42D00000)  # bits of 104: exp(-104) is 0 in float32, so nothing past it counts
_NO_PART = tl.constexpr(1 << 22)
_NO_DISTANCE = tl.constexpr(0x7FFFFFFF)
_BINADE = tl.constexpr(1 << 23)  # between the bits of a distance and those of its double


@triton.jit
def _scale_of(temperature):
    return tl.where(temperature > 0, 1.0 / temperature, 1.0).to(tl.float32)


@triton.jit
def _weight(bits):
    return tl.exp(-bits.to(tl.float32, bitcast=True))


@triton.jit
def _units(weight):
    return (weight * _UNIT).to(tl.int64)


@triton.jit
def _distances(row, part_T, PART: tl.constexpr):
    """Return the distances of these parts' tokens, as bits."""
    logits_ptr, num_tokens, best, scale = row
    token_TW = part_T[:, None] * PART + tl.arange(0, PART)[None, :]
    logit_TW = tl.load(logits_ptr + token_TW, mask=token_TW < num_tokens, other=float("-inf")).to(tl.float32)
    return ((best - logit_TW) * scale).to(tl.int32, bitcast=True)


@triton.jit
def _summarize_parts(
    logits_ptr, how_ptr, best_ptr, sum_ptr, stride, num_tokens, num_parts, TOGETHER: tl.constexpr, PART: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part_T = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    token_TW = part_T[:, None] * PART + tl.arange(0, PART)[None, :]
    logit_TW = tl.load(logits_ptr + row * stride + token_TW, mask=token_TW < num_tokens, other=float("-inf"))
    logit_TW = logit_TW.to(tl.float32)
    best_T = tl.max(tl.where(logit_TW != logit_TW, float("inf"), logit_TW), axis=1)  # a maximum may pass NaN by
    from_T = tl.where(best_T > float("-inf"), best_T, 0.0)
    weight_TW = tl.exp((logit_TW - from_T[:, None]) * _scale_of(tl.load(how_ptr + row)))
    tl.store(best_ptr + row * num_parts + part_T, best_T, mask=part_T < num_parts)
    tl.store(sum_ptr + row * num_parts + part_T, tl.sum(weight_TW, axis=1), mask=part_T < num_parts)


@triton.jit
def _bounds(bits, unit, low, high, wanted, APART: tl.constexpr):
    """Narrow (low, high] to the nearest cut up to which the units sum to `wanted`, or to `high` if none does."""
    while high - low > APART:
        step = tl.maximum((high - low) // 5, 1)  # four cuts cost little more than one: most of the time is latency
        cut_K = tl.minimum(low + step * (1 + tl.arange(0, 4)), high - 1)
        sum_K = tl.sum(tl.where(bits[None, :] <= cut_K[:, None], unit[None, :], 0), axis=1)
        low = tl.maximum(low, tl.max(tl.where(sum_K >= wanted, low, cut_K), axis=0))
        high = tl.minimum(high, tl.min(tl.where(sum_K >= wanted, cut_K, high), axis=0))
    return low, high


@triton.jit
def _list_between(
    row, scratch, num_read, step, low, high, by_weight,
    TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Read `num_read` of the near parts, every `step`-th. Write the distances in (low, high], ordered by part, as far
    as they fit the list, and for each part their number and the weight up to `low`.

    Return their number, and the amounts up to `low` and up to `high`.
    """
    ids_ptr, sum_ptr, num_ptr, list_ptr = scratch
    num_listed = tl.full((), 0, tl.int32)
    to_low_T, to_high_T = tl.zeros((TOGETHER,), tl.int64), tl.zeros((TOGETHER,), tl.int64)
    for first in tl.range(0, num_read, TOGETHER, num_stages=_STAGES):
        near_T = first + tl.arange(0, TOGETHER)
        part_T = tl.load(ids_ptr + near_T * step, mask=near_T < num_read, other=_NO_PART)
        bits_TW = _distances(row, part_T, PART)
        weight_TW = _weight(bits_TW)
        amount_TW = tl.where(by_weight, weight_TW, 1.0)
        to_low_T += _units(tl.sum(tl.where(bits_TW <= low, amount_TW, 0.0), axis=1))
        to_high_T += _units(tl.sum(tl.where(bits_TW <= high, amount_TW, 0.0), axis=1))
        is_listed_TW = ((bits_TW > low) & (bits_TW <= high)).to(tl.int32)
        num_T = tl.sum(is_listed_TW, axis=1)
        at_T = num_listed + tl.cumsum(num_T, axis=0) - num_T
        at_TW = at_T[:, None] + tl.cumsum(is_listed_TW, axis=1) - 1
        tl.store(list_ptr + at_TW, bits_TW, mask=(is_listed_TW > 0) & (at_TW < LISTED))
        tl.store(num_ptr + part_T, num_T, mask=near_T < num_read)
        tl.store(sum_ptr + part_T, tl.sum(tl.where(bits_TW <= low, weight_TW, 0.0), axis=1), mask=near_T < num_read)
        num_listed += tl.sum(num_T, axis=0)
    tl.debug_barrier()  # other threads read what was written
    return num_listed, tl.sum(to_low_T, axis=0), tl.sum(to_high_T, axis=0)


@triton.jit
def _guess(
    row, scratch, num_near, low, high, far, to_low, to_far, wanted, by_weight, tries,
    TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return two cuts in (low, high] that probably enclose the one at `wanted` and fewer tokens than the list takes.

    They come from a sample, as many parts as certainly fit the list: few tokens have most of the weight, so the sample
    estimates what lies between the cut and `far`, where they are not.
    """
    num_read: tl.constexpr = LISTED // PART
    share = num_read / num_near
    num_listed = _list_between(
        row, scratch, num_read, num_near // num_read, low, far, by_weight, TOGETHER, PART, LISTED
    )[0]
    lane_C = tl.arange(0, LISTED)
    bits_C = tl.load(scratch[3] + lane_C, mask=lane_C < num_listed, other=_NO_DISTANCE)
    unit_C = _units(tl.where(by_weight, _weight(bits_C), (lane_C < num_listed).to(tl.float32)))
    wanted_of_far = tl.sum(unit_C, axis=0) - ((to_far - wanted).to(tl.float32) * share).to(tl.int64)
    wanted_of_low = ((wanted - to_low).to(tl.float32) * share).to(tl.int64)
    cut = _bounds(bits_C, unit_C, low, high, tl.where(by_weight, wanted_of_far, wanted_of_low), 1)[1]
    # A list two thirds full; after a miss a shorter one, at last only what equals the guess.
    reach = (LISTED // 3 * share).to(tl.int32) >> (3 * tries)
    one_C = (lane_C < num_listed).to(tl.int32)
    rank = tl.sum((bits_C <= cut).to(tl.int32), axis=0)
    nearer = _bounds(bits_C, one_C, low, cut, rank - reach, 1)[0]
    return nearer, _bounds(bits_C, one_C, cut - 1, high, rank + reach, 1)[1]


@triton.jit
def _list_around_cut(
    row, scratch, bits_P, sum_P, cut, wanted, by_weight,
    TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """List the distances around the cut. If they do not fit the list, they are all equal.

    Return their bounds, the distance up to which parts were read, the number of distances and the amount up to the
    lower bound.
    """
    # The tokens up to a distance are at least the best ones of the parts that begin there.
    low, to_low = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64)
    best_unit_P = _units(tl.where(by_weight, _weight(bits_P), 1.0))
    high = _bounds(bits_P, best_unit_P, low, cut, wanted, _BINADE // 8)[1]
    near = high
    is_near_P = bits_P <= near
    num_near = tl.sum(is_near_P.to(tl.int32), axis=0)
    at_P = tl.cumsum(is_near_P.to(tl.int32), axis=0) - 1
    tl.store(scratch[0] + at_P, tl.arange(0, bits_P.shape[0]), mask=is_near_P)
    tl.debug_barrier()  # other threads read them
    far, to_far = tl.full((), _FARTHEST, tl.int32), _units(tl.sum(tl.where(is_near_P, sum_P, 0.0), axis=0))
    # Each of these tokens weighs at least what a token at this distance does, all of a part together the part's sum.
    num_P = tl.minimum(sum_P / tl.maximum(_weight(near), 1e-30) + 1.0, PART)
    num_listed = tl.sum(tl.where(is_near_P, num_P, 0.0), axis=0).to(tl.int32)
    nearer, farther, to_nearer = low, high, to_low
    tries, is_listed = tl.full((), 0, tl.int32), num_near < 0
    while is_listed == 0:
        nearer, farther = low, high
        if (num_listed > LISTED) & (num_near * PART > LISTED):
            if tries < 5:
                nearer, farther = _guess(
                    row, scratch, num_near, low, high, far, to_low, to_far, wanted, by_weight, tries,
                    TOGETHER, PART, LISTED,
                )  # fmt: skip
            else:  # whatever the sample, this ends
                nearer = low + (high - low) // 2
        num_listed, to_nearer, to_farther = _list_between(
            row, scratch, num_near, 1, nearer, farther, by_weight, TOGETHER, PART, LISTED
        )
        is_nearer = (nearer > low) & (to_nearer >= wanted)
        is_farther = (farther < high) & (to_farther < wanted)
        is_listed = ((is_nearer | is_farther) == 0) & ((num_listed <= LISTED) | (farther - nearer <= 1))
        if is_farther:
            low, to_low = farther, to_farther
        else:
            far, to_far = tl.where(is_nearer, nearer, farther), tl.where(is_nearer, to_nearer, to_farther)
            high = far
            low, to_low = tl.where(is_nearer, low, nearer), tl.where(is_nearer, to_low, to_nearer)
        num_listed = tl.where(is_nearer | is_farther, LISTED + 1, num_listed)
        tries += 1
    return nearer, farther, near, num_listed, to_nearer


@triton.jit
def _cut_row(
    row, scratch, bits_P, sum_P, total, top_k, top_p, min_p,
    TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return the cut, the number of tokens at it that count, and, up to the end of each part, the weight of the tokens
    that count and the number of tokens at the cut."""
    sum_ptr, num_ptr, list_ptr = scratch[1], scratch[2], scratch[3]
    num_tokens = row[1]
    part_P, lane_C = tl.arange(0, bits_P.shape[0]), tl.arange(0, LISTED)
    by_number = (top_k < num_tokens) | (min_p > 0)
    cut = tl.full((), _FARTHEST, tl.int32)
    if min_p > 0:  # the farthest one whose weight is at least min_p
        low, high = tl.full((), -1, tl.int32), (0.001 - 1.001 * tl.log(min_p)).to(tl.int32, bitcast=True)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_kept = _weight(middle) >= min_p
            low = tl.where(is_kept, middle, low)
            high = tl.where(is_kept, high, middle)
        cut = tl.minimum(cut, low)
    num_kept, low, near = tl.full((), 0, tl.int64), cut, cut
    num_listed, to_low = tl.full((), 0, tl.int32), num_kept
    for stage in tl.range(0, 2):  # top_k and min_p, then top_p
        by_weight = stage > 0
        if (by_weight & (top_p < 1)) | ((stage == 0) & by_number):
            wanted = tl.where(by_weight, tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), top_k.to(tl.int64) << 44)
            if (low >= 0) | (num_listed > LISTED):  # the list lacks tokens that count
                if by_weight:
                    # Tokens of less than a V-th of what top_p leaves out cannot reach what it keeps.
                    left = (1.0 - top_p) * total.to(tl.float64) / _UNIT / num_tokens
                    far = tl.maximum(0.001 - tl.log(left.to(tl.float32)), 0.0)
                    cut = tl.minimum(cut, far.to(tl.int32, bitcast=True))
                low, cut, near, num_listed, to_low = _list_around_cut(
                    row, scratch, bits_P, sum_P, cut, wanted, by_weight, TOGETHER, PART, LISTED
                )
            bits_C = tl.load(list_ptr + lane_C, mask=lane_C < num_listed, other=_NO_DISTANCE)
            weight_C = _weight(bits_C)
            nearer = tl.sum(_units(tl.load(sum_ptr + part_P, mask=bits_P <= near, other=0.0)), axis=0)
            unit_C, before = _units(tl.where(by_weight, weight_C, 1.0)), tl.where(by_weight, nearer, to_low)
            cut = _bounds(bits_C, unit_C, low, cut, wanted - before, 1)[1]
            nearer += tl.sum(tl.where(bits_C < cut, _units(weight_C), 0), axis=0)
            num_kept = tl.where(num_listed > LISTED, num_listed, tl.sum((bits_C == cut).to(tl.int32), axis=0))
            num_kept = num_kept.to(tl.int64)
            at_cut = _units(_weight(cut))
            if by_weight:  # the first ones that reach it, and at least one
                needed = tl.cdiv(wanted - nearer, tl.maximum(at_cut, 1))
                num_kept = tl.minimum(tl.maximum(needed, 1), num_kept)
            total = nearer + num_kept * at_cut
    bits_C = tl.load(list_ptr + lane_C, mask=lane_C < num_listed, other=_NO_DISTANCE)
    unit_C = tl.where(bits_C < cut, _units(_weight(bits_C)), 0)
    end_P = tl.cumsum(tl.load(num_ptr + part_P, mask=bits_P <= near, other=0), axis=0)
    last_P = tl.minimum(tl.maximum(end_P - 1, 0), LISTED - 1)
    tied_P = tl.gather(tl.cumsum((bits_C == cut).to(tl.int32), axis=0), last_P, axis=0)
    tied_P = tl.where(num_listed > LISTED, end_P, tl.where(end_P > 0, tied_P, 0))
    listed_P = tl.where(end_P > 0, tl.gather(tl.cumsum(unit_C, axis=0), last_P, axis=0), 0)
    nearer_P = tl.cumsum(_units(tl.load(sum_ptr + part_P, mask=bits_P <= near, other=0.0)), axis=0)
    upto_P = nearer_P + listed_P + tl.minimum(tied_P, num_kept) * _units(_weight(cut))
    return cut, num_kept, upto_P, tied_P


@triton.jit(do_not_specialize=["num_rows"])
def _sample(
    logits_ptr, how_ptr, token_and_finite_ptr, best_ptr, sum_ptr, ids_ptr, num_ptr, list_ptr,
    stride, num_tokens, num_parts, num_rows,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    temperature = tl.load(how_ptr + at)
    top_k = tl.load(how_ptr + num_rows + at).to(tl.int32)
    top_p = tl.load(how_ptr + 2 * num_rows + at)
    min_p = tl.load(how_ptr + 3 * num_rows + at).to(tl.float32)
    part_P = tl.arange(0, PARTS)
    best_ptr += at * num_parts
    sum_ptr += at * num_parts
    best_P = tl.load(best_ptr + part_P, mask=part_P < num_parts, other=float("-inf"))
    best = tl.max(best_P, axis=0) + 0.0  # never -0: its distance to 0 is -0, whose bits as an integer are negative
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(token_and_finite_ptr + num_rows + at, is_finite.to(tl.int64))
    scale = _scale_of(temperature)
    bits_P = ((best - best_P) * scale).to(tl.int32, bitcast=True)
    row = (logits_ptr + at * stride, num_tokens, best, scale)

    # The tokens nearer than `cut` count, and the first `num_kept` at it. In a greedy row only the best ones do.
    cut = tl.full((), 1, tl.int32)
    num_kept = tl.full((), 0, tl.int64)
    upto_P = tl.cumsum((bits_P == 0).to(tl.int64), axis=0)  # their weight up to the end of each part
    tied_P = tl.zeros((PARTS,), tl.int32)  # tokens at the cut, up to the end of each part
    if is_finite & (temperature > 0):
        sum_P = tl.load(sum_ptr + part_P, mask=part_P < num_parts, other=0.0)
        sum_P *= _weight(bits_P)
        cut = tl.full((), _FARTHEST, tl.int32)
        upto_P = tl.cumsum(_units(sum_P), axis=0)
        if (top_k < num_tokens) | (top_p < 1) | (min_p > 0):
            scratch = (ids_ptr + at * num_parts, sum_ptr, num_ptr + at * num_parts, list_ptr + at * LISTED)
            cut, num_kept, upto_P, tied_P = _cut_row(
                row, scratch, bits_P, sum_P, tl.max(upto_P, axis=0), top_k, top_p, min_p, TOGETHER, PART, LISTED
            )
    total = tl.max(upto_P, axis=0)
    u = tl.load(how_ptr + 4 * num_rows + at, mask=temperature > 0, other=0.0)
    target = tl.minimum((u * total).to(tl.int64), total - 1)  # u * total may round up
    part = tl.min(tl.where(upto_P > target, part_P, num_parts - 1), axis=0)
    before = tl.max(tl.where(part_P < part, upto_P, 0), axis=0)
    num_left = num_kept - tl.max(tl.where(part_P < part, tied_P, 0), axis=0)

    bits_W = tl.reshape(_distances(row, part + tl.zeros((1,), tl.int32), PART), (PART,))
    rank_W = tl.cumsum((bits_W == cut).to(tl.int32), axis=0)
    weight_W = tl.where((bits_W < cut) | ((bits_W == cut) & (rank_W <= num_left)), _weight(bits_W), 0.0)
    lane_W = tl.arange(0, PART)
    is_past_W = before + tl.cumsum(_units(weight_W), axis=0) > target
    first = tl.min(tl.where(is_past_W, lane_W, PART), axis=0)
    last = tl.max(tl.where(weight_W > 0, lane_W, 0), axis=0)
    token = part * PART + tl.where(first < PART, first, last)
    tl.store(token_and_finite_ptr + at, tl.where(is_finite, token, 0).to(tl.int64))


def sample(logits_RV: torch.Tensor, how_5R: torch.Tensor) -> torch.Tensor:
    """See `contract.Kernels`. Stays on the device; the token of a row that is not finite is 0."""
    token_and_finite_2R = torch.empty(2, len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if len(logits_RV):
        for launch in sample_launches(logits_RV, how_5R, token_and_finite_2R):
            launch.run()
    return token_and_finite_2R


def sample_launches(
    logits_RV: torch.Tensor, how_5R: torch.Tensor, token_and_finite_2R: torch.Tensor
) -> tuple[Launch, Launch]:
    """float32, float16 or bfloat16 logits; rows may lie apart."""
    num_rows, num_tokens = logits_RV.shape
    assert logits_RV.stride(1) == 1
    assert how_5R.is_contiguous()
    assert num_tokens <= _MAX_TOKENS
    num_parts = 4 * -(-num_tokens // (4 * _PART))  # a multiple of 4, of 16 bytes: all of the scratch is aligned
    # One allocation: the parts' largest logits and sums, their ids and numbers, the list.
    scratch = torch.empty(num_rows * (4 * num_parts + _LISTED), dtype=torch.int32, device=logits_RV.device)
    best_RP, sum_RP, id_RP, num_RP, listed_RC = scratch.split([num_rows * num_parts] * 4 + [num_rows * _LISTED])
    best_RP, sum_RP = best_RP.view(torch.float32), sum_RP.view(torch.float32)
    parts = Launch(
        _summarize_parts,
        (num_rows, -(-num_parts // _SUMMARIZED)),
        (logits_RV, how_5R, best_RP, sum_RP, logits_RV.stride(0), num_tokens, num_parts),
        {"TOGETHER": _SUMMARIZED, "PART": _PART},
        num_warps=4,
    )
    whole = Launch(
        _sample,
        (num_rows,),
        (
            *(logits_RV, how_5R, token_and_finite_2R, best_RP, sum_RP, id_RP, num_RP, listed_RC),
            *(logits_RV.stride(0), num_tokens, num_parts, num_rows),
        ),
        {"PARTS": power_of_two(num_parts, 4), "TOGETHER": _TOGETHER, "PART": _PART, "LISTED": _LISTED},
        num_warps=16,
    )
    return parts, whole
