"""The Triton attention kernels against the reference, and the division of the decode kernel's work into items."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ModelError
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.triton.attention.decode_metadata import MIN_TILES, DecodeMetadata, decode_items
from pipeline.kernels.triton.attention.dispatch import AttentionPlan, PagedAttention, plan_key
from pipeline.kernels.triton.batch_invariant import BatchInvariantAttention
from pipeline.kernels.triton.launch import H100, CompileTarget
from tests.kernels.steps import SOFTMAX_KINDS, softmax_options
from tests.kernels.triton.problems import ATTENTION, DEVICE, DTYPES, TYPES, Step, make_step, sharing

# numpy's, of rows that stand for no query: 0 / 0 in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(step: Step, window: int | None, kind: str = "", scale: float = 0.3) -> None:
    num_heads = step.q_TND.shape[1]
    ours = PagedAttention(DEVICE)(
        *step.tensors, step.attn_metadata, scale, window, *softmax_options(kind, num_heads, DEVICE)
    )
    oracle = reference_attention(*step.wide, step.attn_metadata, scale, window, *softmax_options(kind, num_heads))
    assert ours.dtype == step.q_TND.dtype
    assert torch.isfinite(ours).all(), "a slot outside the context was read, or a token not written"
    assert float((ours.float().cpu() - oracle).abs().max()) < ATTENTION[ours.dtype]


LENGTHS = {
    "one token": [(1, 1)],
    "decoding, ragged": [(1, 1), (63, 1), (64, 1), (65, 1), (200, 1)],
    "one long": [(700, 1), (3, 1)],
    "drafts": [(9, 2), (70, 8), (129, 5), (40, 1)],
    "prompts": [(9, 9), (65, 65), (150, 150)],
    "chunk behind a prefix": [(140, 30), (129, 66)],
    "mixed": [(66, 1), (100, 40), (30, 3), (64, 64), (90, 1)],
}


@pytest.mark.parametrize("with_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("name", LENGTHS)
def test_attention(name: str, with_fp8: bool) -> None:
    in_float16 = (
        with_fp8 and name != "prompts"
    )  # the products are; what many tiles read is converted to the step's type
    for dtype in {*TYPES, torch.bfloat16} if in_float16 else TYPES:
        check(make_step(LENGTHS[name], (4, 1), 16, 64, dtype, with_fp8=with_fp8), None)
    check(make_step(LENGTHS[name], (4, 1), 16, 64, torch.float32, with_fp8=with_fp8), 13)


@pytest.mark.parametrize("with_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("kind", SOFTMAX_KINDS)
def test_soft_caps_and_sinks(kind: str, with_fp8: bool) -> None:
    """One sequence is split among programs; the others are whole, drafts, a chunk and a prompt."""
    lengths = [(700, 1), (66, 1), (140, 40), (30, 3), (64, 64)]
    step = make_step(lengths, (4, 2), 16, 64, torch.float32, with_fp8=with_fp8)
    check(step, None, kind)
    check(step, 13, kind)
    assert step.plan(None).decode.numbers.num_splits.item() > 0


@DTYPES
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "with_fp8"),
    [
        *((1, 64, 64, False), (5, 80, 64, False), (8, 128, 64, False), (4, 96, 64, False), (7, 16, 64, False)),
        *((5, 80, 7, True), (4, 96, 16, True), (7, 16, 128, True), (8, 512, 64, False), (8, 512, 16, True)),
    ],
)
def test_groups_head_sizes_and_blocks(
    group: int, head_dim: int, block_size: int, with_fp8: bool, dtype: torch.dtype
) -> None:
    lengths, scale = [(67, 1), (130, 20), (70, 3)], min(0.3, 2 / head_dim**0.5)
    check(make_step(lengths, (2 * group, 2), head_dim, block_size, dtype, with_fp8=with_fp8), None, scale=scale)


@pytest.mark.parametrize(
    ("block_size", "window"), [(1, None), (7, None), (7, 64), (16, 65), (32, None), (64, 1), (64, 64), (128, 65)]
)
def test_blocks_of_any_size_and_windows_at_tile_borders(block_size: int, window: int | None) -> None:
    check(make_step([(67, 1), (130, 20), (129, 2)], (2, 1), 16, block_size, torch.float32), window)


def converted_blocks_of(step: Step, window: int | None) -> list[int] | None:
    block_X = step.plan(window).prefill.block_X
    return None if block_X is None else block_X.tolist()


@pytest.mark.parametrize("head_dim", [16, 80])
def test_blocks_that_prompts_read_from_an_fp8_cache_are_converted_once(head_dim: int) -> None:
    """Two prompts that share their first block, and a sequence that decodes."""
    step = make_step([(300, 300), (150, 80), (200, 1)], (8, 2), head_dim, 64, torch.float16, with_fp8=True)
    step = sharing(step, [([0, 1], 1)])
    check(step, None)
    check(step, None, "softcap and sinks")
    table_SM = step.attn_metadata.block_table_SM
    assert converted_blocks_of(step, None) == sorted({*table_SM[0, :5].tolist(), *table_SM[1, :3].tolist()})


def test_a_tile_converts_what_hardly_any_other_tile_reads() -> None:
    step = make_step([(300, 60)], (4, 1), 16, 64, torch.float16, with_fp8=True)  # two tiles
    check(step, None)
    assert converted_blocks_of(step, None) is None


def test_blocks_before_a_window_are_not_converted_and_not_read() -> None:
    """The first tile of keys begins before the window, where what is masked must be finite: 0 * NaN is NaN."""
    step = make_step([(500, 180), (64, 64)], (4, 1), 16, 16, torch.float16, seed=12, with_fp8=True)
    mine, others = (row[row >= 0] for row in step.attn_metadata.block_table_SM)
    step.cache.fill(others.tolist(), float("nan"))
    window = 500 - 180 - 216 + 1  # the first key that is seen: 216; its tile begins at 192
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, window)
    found = converted_blocks_of(step, window)
    assert found is not None
    assert found[0] in others, "what no block of the table maps to is another sequence's"
    assert set(found) == {*mine[128 // 16 :].tolist(), *others.tolist()}
    assert torch.isfinite(ours[:180]).all()


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize(("of_keys", "of_values"), [(1e-6, 1e4), (1e6, 1e-4), (1.0, 1e-9), (1.0, 1e9)])
def test_an_fp8_cache_of_values_of_any_size(of_keys: float, of_values: float, queries: int) -> None:
    """Products are in float16, whose range ends at 6e-8 and 65,504."""
    step = make_step([(150, queries), (70, 1)], (4, 1), 32, 64, torch.bfloat16, with_fp8=True)
    for scale, size in ((step.cache.k_scale_CKB, of_keys), (step.cache.v_scale_CKB, of_values)):
        assert scale is not None
        scale *= size
    step.q_TND.mul_(1 / of_keys)
    for kind in ("", "sinks"):
        options = (softmax_options(kind, 4, device) for device in (DEVICE, torch.device("cpu")))
        ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None, *next(options))
        oracle = reference_attention(*step.wide, step.attn_metadata, 0.3, None, *next(options))
        assert float((ours.float().cpu() - oracle).abs().max()) < ATTENTION[torch.bfloat16] * of_values


@pytest.mark.parametrize("kind", ["", "softcap and sinks"])
@pytest.mark.parametrize(("broken", "with_fp8"), [(float("nan"), False), (float("nan"), True), (float("inf"), True)])
def test_a_broken_query_stays_in_its_row(broken: float, with_fp8: bool, kind: str) -> None:
    step = make_step([(66, 1), (100, 12), (200, 1)], (2, 1), 16, 64, torch.float32, with_fp8=with_fp8)
    step.q_TND[3, 1, 5] = broken
    options = softmax_options(kind, 2, DEVICE)
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None, *options)
    assert torch.isfinite(ours).all(-1).logical_not().nonzero().tolist() == [[3, 1]]


def test_a_broken_value_or_key_stays_in_its_head_and_sequence() -> None:
    for name in ("k_scale_CKB", "v_scale_CKB"):
        step = make_step([(66, 1), (100, 12), (200, 1)], (2, 2), 16, 64, torch.float32, with_fp8=True)
        getattr(step.cache, name)[step.attn_metadata.block_table_SM[2, 1], 1, 5] = float("nan")
        ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
        assert torch.isfinite(ours).all(-1).logical_not().nonzero().tolist() == [[13, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = []
    for context in rng.integers(1, 260, int(rng.integers(1, 8))).tolist():
        lengths.append((context, int(rng.choice([1, 1, context, int(rng.integers(1, context + 1))]))))
    group, kv_heads = int(rng.choice([1, 4, 5, 8])), int(rng.integers(1, 3))
    window = [None, 100][seed % 2]
    check(make_step(lengths, (group * kv_heads, kv_heads), 16, 64, torch.float32, seed), window)


def test_some_rows_of_a_step_attend_as_in_the_whole_step() -> None:
    step = make_step([(66, 1), (100, 40), (30, 3)], (4, 2), 16, 64, torch.float32)
    rows = np.random.default_rng(8).permutation(len(step.q_TND))[:17]
    whole = reference_attention(*step.wide, step.attn_metadata, 0.3, 9)
    q_RND = step.q_TND[torch.from_numpy(rows).to(DEVICE)]
    ours = PagedAttention(DEVICE)(q_RND, *step.tensors[1:], step.attn_metadata.rows(rows), 0.3, 9)
    assert float((ours.cpu() - whole[rows]).abs().max()) < ATTENTION[torch.float32]


@pytest.mark.parametrize("attention", [PagedAttention, BatchInvariantAttention])
def test_too_many_heads_are_refused_by_name(attention: type[PagedAttention | BatchInvariantAttention]) -> None:
    step = make_step([(20, 20)], (129, 1), 16, 64, torch.float32)
    with pytest.raises(ModelError, match="129 query heads with 1 KV heads"):
        attention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)


# -- the work of the decode kernel


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=40),
    num_programs=st.integers(1, 70),
)
def test_every_tile_is_computed_once(tiles: list[tuple[int, int]], num_programs: int) -> None:
    begin_S, count_S = np.array(tiles).T
    items = decode_items(np.arange(len(tiles)), begin_S, begin_S + count_S, num_programs)
    pieces: dict[int, list[list[int]]] = {}
    for s, begin, end, sums in items.item_I4.tolist():
        pieces.setdefault(s, []).append([begin, end, sums])
    for s, (begin, count) in enumerate(tiles):
        begins, ends, sums = zip(*pieces[s])
        assert (begins, ends[-1]) == ((begin, *ends[:-1]), begin + count)
        split = [[s, sums[0], len(sums)]] if len(sums) > 1 else []
        assert items.split_S3[items.split_S3[:, 0] == s].tolist() == split
        assert list(sums) == (list(range(sums[0], sums[0] + len(sums))) if split else [-1])
    assert (items.item_I4[:, 3] < 2 * num_programs).all()
    size_I = items.item_I4[:, 2] - items.item_I4[:, 1]
    num_tiles = [int(size_I[a:b].sum()) for a, b in pairwise(items.program_start)]
    assert (sum(num_tiles), len(num_tiles)) == (count_S.sum(), num_programs)
    assert max(num_tiles) == min(count_S.sum(), max(MIN_TILES, -(-count_S.sum() // num_programs)))


def test_a_ready_plan_is_used() -> None:
    step = make_step([(100, 1), (30, 1)], (2, 1), 16, 64, torch.float32)
    work = DecodeMetadata.allocate(4, 4, 64, 2, 1, 16, DEVICE, CompileTarget.from_device(DEVICE))
    work.prepare_replay(step.attn_metadata)
    work.sequences.context_len_S[:2] = torch.tensor(
        [90, 20], device=DEVICE
    )  # distinguishes the ready plan from a new one
    step.attn_metadata.plans[plan_key(None, 1, 16)] = AttentionPlan(work, None)
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
    shorter = replace(step.attn_metadata, context_len_S=np.array([90, 20], dtype=np.int32))
    oracle = reference_attention(*step.wide, shorter, 0.3, None)
    assert float((ours.cpu() - oracle).abs().max()) < ATTENTION[torch.float32]


def test_tensors_of_the_work_are_aligned() -> None:
    """Unaligned tensors would need another compiled kernel for each number of sequences."""
    for max_seqs in (1, 2, 3, 5):
        work = DecodeMetadata.allocate(max_seqs, 3, 64, 2, 1, 16, torch.device("cpu"), H100)
        assert work.staged is not None
        for view in (*work.numbers, work.sequences.query_start_S1, work.sequences.context_len_S):
            assert (view.data_ptr() - work.staged.tensor.data_ptr()) % 16 == 0
