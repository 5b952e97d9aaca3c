"""Sample one token of each row of logits on the device, or take the best, without sorting, in two launches.

The first launch reads the logits once, with several programs per row: for each part of 256 tokens it writes the largest
logit and the sum of the weights exp((logit - largest) / temperature). The second has one program per row. A row without
top_k, top_p and min_p gets its token from these sums and from the one part that contains it.

The other rows need a cut: a distance below the best logit, (best - logit) / temperature, past which no token counts.
Distances are float32 and not negative, so their bits, as integers, are in the order of the numbers. min_p is a cut.
top_k and top_p search theirs: the parts' largest logits and sums bound it from both sides. Parts past the bounds are
never read again. The tokens of the other parts between the bounds are listed, and bisection finds the cut among them.
If the list is too short, a pass over these parts first tries 8 cuts, which leaves a ninth of the range.

Sums across threads are integers, in units of 2^-44 of the best token's weight: the order of additions does not matter,
and zero adds nothing. No row depends on another.

Shapes: P parts of a row, T parts read together, W tokens of a part, Q quarters of W, C listed tokens, K cuts to try.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch, power_of_two

_PART = 256  # tokens
_SUMMARIZED = 16  # parts per program of the first launch
_TOGETHER = 8  # parts that the second launch reads at a time
_LISTED = 4096  # capacity of the list, in tokens
_STAGES = tl.constexpr(3)  # of the loops over a row: their loads are prefetched
_UNIT = tl.constexpr(2.0**44)  # the sum of _MAX_TOKENS weights of 1 stays below 2^63
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
def _sum(amount):
    """Sum in units, after adding four adjacent values, which are in one thread, in float32."""
    return tl.sum(_units(tl.sum(tl.reshape(amount, (amount.shape[0] // 4, 4)), axis=1)), axis=0)


@triton.jit
def _distances(row, part_T, PART: tl.constexpr):
    """Return the distances of these parts' tokens, as bits."""
    logits_ptr, num_tokens, best, scale = row
    token_TW = part_T[:, None] * PART + tl.arange(0, PART)[None, :]
    logit_TW = tl.load(logits_ptr + token_TW, mask=token_TW < num_tokens, other=float("-inf")).to(tl.float32)
    return ((best - logit_TW) * scale).to(tl.int32, bitcast=True)


@triton.jit
def _summarize_parts(
    logits_ptr, params_ptr, best_ptr, sum_ptr, stride, num_tokens, num_parts, TOGETHER: tl.constexpr, PART: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part_T = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    token_TW = part_T[:, None] * PART + tl.arange(0, PART)[None, :]
    logit_TW = tl.load(logits_ptr + row * stride + token_TW, mask=token_TW < num_tokens, other=float("-inf"))
    logit_TW = logit_TW.to(tl.float32)
    best_T = tl.max(tl.where(logit_TW != logit_TW, float("inf"), logit_TW), axis=1)  # a maximum may ignore NaN
    from_T = tl.where(best_T > float("-inf"), best_T, 0.0)
    weight_TW = tl.exp((logit_TW - from_T[:, None]) * _scale_of(tl.load(params_ptr + row)))
    tl.store(best_ptr + row * num_parts + part_T, best_T, mask=part_T < num_parts)
    tl.store(sum_ptr + row * num_parts + part_T, tl.sum(weight_TW, axis=1), mask=part_T < num_parts)


@triton.jit
def _bounds(bits, amount, low, high, wanted, APART: tl.constexpr):
    """Bisect (low, high] around the nearest cut up to which the amounts sum to `wanted`, or around `high` if there is
    none."""
    while high - low > APART:
        middle = low + (high - low) // 2
        is_reached = _sum(tl.where(bits <= middle, amount, 0.0)) >= wanted
        low = tl.where(is_reached, low, middle)
        high = tl.where(is_reached, middle, high)
    return low, high


@triton.jit
def _narrow(
    row, ids_ptr, num_near, low, high, to_low, to_high, wanted, by_weight, TOGETHER: tl.constexpr, PART: tl.constexpr
):
    """Try 8 cuts in (low, high]. Return the two that enclose the cut at `wanted`, and the amounts up to them."""
    step = tl.maximum((high - tl.maximum(low, high - 4 * _BINADE)) // 9, 1)
    cut_K = high - step * (1 + tl.arange(0, 8))
    amount_KTQ = tl.zeros((8, TOGETHER, PART // 4), tl.float32)
    for first in tl.range(0, num_near, TOGETHER, num_stages=_STAGES):
        near_T = first + tl.arange(0, TOGETHER)
        bits_TW = _distances(row, tl.load(ids_ptr + near_T, mask=near_T < num_near, other=_NO_PART), PART)
        amount_TW = tl.where(by_weight, _weight(bits_TW), 1.0)
        amount_KTW = tl.where(bits_TW[None, :, :] <= cut_K[:, None, None], amount_TW[None, :, :], 0.0)
        amount_KTQ += tl.sum(tl.reshape(amount_KTW, (8, TOGETHER, PART // 4, 4)), axis=3)  # a thread's own
    amount_K = tl.sum(tl.sum(_units(amount_KTQ), axis=2), axis=1)
    is_reached_K = amount_K >= wanted
    low = tl.maximum(low, tl.max(tl.where(is_reached_K, low, cut_K), axis=0))
    high = tl.min(tl.where(is_reached_K, cut_K, high), axis=0)
    to_low = tl.maximum(to_low, tl.max(tl.where(is_reached_K, to_low, amount_K), axis=0))
    return low, high, to_low, tl.min(tl.where(is_reached_K, amount_K, to_high), axis=0)


@triton.jit
def _list_between(row, scratch, num_near, low, high, TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr):
    """Write the distances in (low, high], ordered by part, as far as the list has room, and for each part their number
    and the weight up to `low`. Return their total number."""
    ids_ptr, sum_ptr, num_ptr, list_ptr = scratch
    num_listed = tl.full((), 0, tl.int32)
    for first in tl.range(0, num_near, TOGETHER, num_stages=_STAGES):
        near_T = first + tl.arange(0, TOGETHER)
        part_T = tl.load(ids_ptr + near_T, mask=near_T < num_near, other=_NO_PART)
        bits_TW = _distances(row, part_T, PART)
        nearer_TW = tl.where(bits_TW <= low, _weight(bits_TW), 0.0)
        is_listed_TW = ((bits_TW > low) & (bits_TW <= high)).to(tl.int32)
        num_T = tl.sum(is_listed_TW, axis=1)
        at_T = num_listed + tl.cumsum(num_T, axis=0) - num_T
        at_TW = at_T[:, None] + tl.cumsum(is_listed_TW, axis=1) - 1
        tl.store(list_ptr + at_TW, bits_TW, mask=(is_listed_TW > 0) & (at_TW < LISTED))
        tl.store(num_ptr + part_T, num_T, mask=near_T < num_near)
        tl.store(sum_ptr + part_T, tl.sum(nearer_TW, axis=1), mask=near_T < num_near)
        num_listed += tl.sum(num_T, axis=0)
    tl.debug_barrier()  # other threads read these values
    return num_listed


@triton.jit
def _list_around_cut(
    row, scratch, bits_P, sum_P, cut, total, wanted, by_weight,
    TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """List the distances around the cut. If the list overflows, they are all equal.

    Return their bounds, the distance up to which parts were read, the number of distances and, unless `by_weight`, the
    amount up to the lower bound.
    """
    # The tokens up to a distance number at least the best ones of the parts that begin there, and at most (except for
    # rounding) all tokens of these parts.
    none = tl.full((), -1, tl.int32)
    low = none
    best_amount_P = tl.where(by_weight, _weight(bits_P), 1.0)
    cut = _bounds(bits_P, best_amount_P, none, cut, wanted, _BINADE // 8)[1]
    if by_weight:
        low = _bounds(bits_P, sum_P * 1.0001, none, cut, wanted, _BINADE // 8)[0]
    near = cut
    is_near_P = bits_P <= near
    num_near = tl.sum(is_near_P.to(tl.int32), axis=0)
    at_P = tl.cumsum(is_near_P.to(tl.int32), axis=0) - 1
    tl.store(scratch[0] + at_P, tl.arange(0, bits_P.shape[0]), mask=is_near_P)
    tl.debug_barrier()  # other threads read these values
    # Each of these tokens weighs at least as much as a token at this distance; together they weigh the part's sum.
    num_P = tl.minimum(sum_P / tl.maximum(_weight(near), 1e-30) + 1.0, PART)
    num_listed = tl.sum(tl.where(is_near_P, num_P, 0.0), axis=0).to(tl.int32)
    to_low, to_cut = tl.full((), 0, tl.int64), tl.where(by_weight, total, row[1].to(tl.int64) << 44)
    is_listed = num_listed < 0
    while is_listed == 0:
        while (num_listed > LISTED) & (cut - low > 1):
            low, cut, to_low, to_cut = _narrow(
                row, scratch[0], num_near, low, cut, to_low, to_cut, wanted, by_weight, TOGETHER, PART
            )
            # Estimate the number as if each token were in the middle.
            each = tl.where(by_weight, tl.maximum(_weight(tl.maximum(low, 0) // 2 + cut // 2), 1e-30), 1.0)
            num_listed = tl.minimum((to_cut - to_low).to(tl.float32) / _UNIT / each, 1e9).to(tl.int32)
        num_listed = _list_between(row, scratch, num_near, low, cut, TOGETHER, PART, LISTED)
        is_listed = (num_listed <= LISTED) | (cut - low <= 1)
    return low, cut, near, num_listed, to_low


@triton.jit
def _cut_row(
    row, scratch, bits_P, sum_P, top_k, top_p, min_p, TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr
):
    """Return the cut, the number of tokens at it that count, and, up to the end of each part, the weight of the tokens
    that count and the number of tokens at the cut."""
    sum_ptr, num_ptr, list_ptr = scratch[1], scratch[2], scratch[3]
    num_tokens = row[1]
    part_P, lane_C = tl.arange(0, bits_P.shape[0]), tl.arange(0, LISTED)
    by_number = (top_k < num_tokens) | (min_p > 0)
    cut = tl.full((), _FARTHEST, tl.int32)
    if min_p > 0:  # the farthest cut whose weight is at least min_p
        low, high = tl.full((), -1, tl.int32), (0.001 - 1.001 * tl.log(min_p)).to(tl.int32, bitcast=True)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_kept = _weight(middle) >= min_p
            low = tl.where(is_kept, middle, low)
            high = tl.where(is_kept, high, middle)
        cut = tl.minimum(cut, low)
    total, num_kept, low, near = tl.sum(_units(sum_P), axis=0), tl.full((), 0, tl.int64), cut, cut
    num_listed, to_low = tl.full((), 0, tl.int32), num_kept
    for stage in tl.range(0, 2):  # top_k and min_p, then top_p
        by_weight = stage > 0
        if (by_weight & (top_p < 1)) | ((stage == 0) & by_number):
            wanted = tl.where(by_weight, tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), top_k << 44)
            if (low >= 0) | (num_listed > LISTED):  # the list lacks tokens that count
                if by_weight:
                    # Tokens below 1/V of the weight that top_p leaves out cannot be among those it keeps.
                    left = (1.0 - top_p) * total.to(tl.float64) / _UNIT / num_tokens
                    far = tl.maximum(0.001 - tl.log(left.to(tl.float32)), 0.0)
                    cut = tl.minimum(cut, far.to(tl.int32, bitcast=True))
                low, cut, near, num_listed, to_low = _list_around_cut(
                    row, scratch, bits_P, sum_P, cut, total, wanted, by_weight, TOGETHER, PART, LISTED
                )
            bits_C = tl.load(list_ptr + lane_C, mask=lane_C < num_listed, other=_NO_DISTANCE)
            weight_C = _weight(bits_C)
            nearer = tl.sum(_units(tl.load(sum_ptr + part_P, mask=bits_P <= near, other=0.0)), axis=0)
            amount_C, before = tl.where(by_weight, weight_C, 1.0), tl.where(by_weight, nearer, to_low)
            cut = _bounds(bits_C, amount_C, low, cut, wanted - before, 1)[1]
            nearer += _sum(tl.where(bits_C < cut, weight_C, 0.0))
            num_kept = tl.where(num_listed > LISTED, num_listed, tl.sum((bits_C == cut).to(tl.int32), axis=0))
            num_kept = num_kept.to(tl.int64)
            at_cut = _units(_weight(cut))
            if by_weight:  # the first tokens that reach it, at least one
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
    logits_ptr, params_ptr, token_and_finite_ptr, best_ptr, sum_ptr, ids_ptr, num_ptr, list_ptr,
    stride, num_tokens, num_parts, num_rows,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    temperature = tl.load(params_ptr + at)
    top_k = tl.load(params_ptr + num_rows + at).to(tl.int64)
    top_p = tl.load(params_ptr + 2 * num_rows + at)
    min_p = tl.load(params_ptr + 3 * num_rows + at).to(tl.float32)
    u = tl.load(params_ptr + 4 * num_rows + at)
    part_P = tl.arange(0, PARTS)
    best_ptr += at * num_parts
    sum_ptr += at * num_parts
    best_P = tl.load(best_ptr + part_P, mask=part_P < num_parts, other=float("-inf"))
    best = tl.max(best_P, axis=0) + 0.0  # never -0: its distance to 0 is -0, whose bits as an integer are negative
    is_finite = (best > float("-inf")) & (best < float("inf"))
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
        if (top_k < num_tokens) | (top_p < 1) | (min_p > 0):
            scratch = (ids_ptr + at * num_parts, sum_ptr, num_ptr + at * num_parts, list_ptr + at * LISTED)
            cut, num_kept, upto_P, tied_P = _cut_row(
                row, scratch, bits_P, sum_P, top_k, top_p, min_p, TOGETHER, PART, LISTED
            )
        else:
            cut = tl.full((), _FARTHEST, tl.int32)
            upto_P = tl.cumsum(_units(sum_P), axis=0)
    total = tl.max(upto_P, axis=0)
    target = tl.minimum((tl.where(temperature > 0, u, 0.0) * total).to(tl.int64), total - 1)  # u * total may round up
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
    tl.store(token_and_finite_ptr + num_rows + at, is_finite.to(tl.int64))


def sample(logits_RV: torch.Tensor, sampling_params_5R: torch.Tensor) -> torch.Tensor:
    """Implement `contract.Kernels.sample`. The result stays on the device; the token of a non-finite row is 0."""
    token_and_finite_2R = torch.empty(2, len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if len(logits_RV):
        for launch in sample_launches(logits_RV, sampling_params_5R, token_and_finite_2R):
            launch.run()
    return token_and_finite_2R


def sample_launches(
    logits_RV: torch.Tensor, sampling_params_5R: torch.Tensor, token_and_finite_2R: torch.Tensor
) -> tuple[Launch, Launch]:
    """Return the launches for float32, float16 or bfloat16 logits; rows may be strided."""
    num_rows, num_tokens = logits_RV.shape
    assert logits_RV.stride(1) == 1
    assert sampling_params_5R.is_contiguous()
    assert num_tokens <= _MAX_TOKENS
    num_parts = -(-num_tokens // _PART)
    best_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_RV.device)
    sum_RP = torch.empty_like(best_RP)
    id_RP, num_RP = (torch.empty_like(best_RP, dtype=torch.int32) for _ in range(2))
    listed_RC = torch.empty(num_rows, _LISTED, dtype=torch.int32, device=logits_RV.device)
    parts = Launch(
        _summarize_parts,
        (num_rows, -(-num_parts // _SUMMARIZED)),
        (logits_RV, sampling_params_5R, best_RP, sum_RP, logits_RV.stride(0), num_tokens, num_parts),
        {"TOGETHER": _SUMMARIZED, "PART": _PART},
        num_warps=4,
    )
    whole = Launch(
        _sample,
        (num_rows,),
        (
            *(logits_RV, sampling_params_5R, token_and_finite_2R, best_RP, sum_RP, id_RP, num_RP, listed_RC),
            *(logits_RV.stride(0), num_tokens, num_parts, num_rows),
        ),
        {"PARTS": power_of_two(num_parts, 4), "TOGETHER": _TOGETHER, "PART": _PART, "LISTED": _LISTED},
        num_warps=16,
    )
    return parts, whole
