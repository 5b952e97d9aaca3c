"""Cascade attention: prefixes that sequences share, read once for all of them, against the reference, which reads each
sequence by itself; conditions of joint reading."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.attention.cascade_metadata import CascadePlan, CascadeShape, CascadeSteps
from pipeline.kernels.triton.attention.dispatch import PagedAttention
from pipeline.kernels.triton.batch_invariant import BatchInvariantAttention
from pipeline.kernels.triton.launch import H100
from tests.kernels.steps import SOFTMAX_KINDS, Lengths, softmax_options
from tests.kernels.triton.problems import ATTENTION, DEVICE, DTYPES, Step, make_step, sharing

# numpy's, of padding rows: 0 / 0 in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Shared = list[tuple[list[int], int]]


@pytest.fixture
def any_saving_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any saving pay, because the interpreter's steps are smaller than any that pays on a GPU."""
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)


def check(step: Step, groups: int, kind: str = "", scale: float = 0.3) -> None:
    """Compare with the oracle; this many groups were read together."""
    num_heads = step.q_TND.shape[1]
    ours = PagedAttention(DEVICE)(
        *step.tensors, step.attn_metadata, scale, None, *softmax_options(kind, num_heads, DEVICE)
    )
    oracle = reference_attention(*step.wide, step.attn_metadata, scale, None, *softmax_options(kind, num_heads))
    assert torch.isfinite(ours).all(), "a slot outside the context was read, or a token not written"
    assert float((ours.float().cpu() - oracle).abs().max()) < ATTENTION[ours.dtype]
    work = step.plan(None).decode.cascade
    served = set() if work is None else set(work.numbers.tile_W3[:, 0].tolist())
    assert len(served) == groups


STEPS: dict[str, tuple[Lengths, Shared]] = {
    "all in one group": ([(130, 1), (200, 1), (300, 1)], [([0, 1, 2], 2)]),
    "two groups and one alone": ([(200, 1), (330, 1), (150, 1), (260, 1), (290, 1)], [([0, 2], 2), ([1, 4], 4)]),
    "drafts": ([(200, 5), (266, 2), (270, 8), (400, 1)], [([0, 1, 2, 3], 3)]),
    "next to prompts": ([(200, 1), (150, 20), (190, 1), (40, 40)], [([0, 1, 2], 2)]),
}


@pytest.mark.usefixtures("any_saving_pays")
@DTYPES
@pytest.mark.parametrize("with_fp8", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_shared_prefixes(name: str, with_fp8: bool, dtype: torch.dtype) -> None:
    lengths, shared = STEPS[name]
    check(sharing(make_step(lengths, (4, 1), 16, 64, dtype, with_fp8=with_fp8), shared), len(shared))


@pytest.mark.usefixtures("any_saving_pays")
@pytest.mark.parametrize("with_fp8", [False, True])
@pytest.mark.parametrize("kind", SOFTMAX_KINDS)
def test_soft_caps_and_sinks(kind: str, with_fp8: bool) -> None:
    lengths, shared = STEPS["drafts"]
    step = make_step([*lengths, (900, 1)], (4, 2), 16, 64, torch.float32, with_fp8=with_fp8)
    check(sharing(step, shared), len(shared), kind)


@pytest.mark.usefixtures("any_saving_pays")
@DTYPES
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "with_fp8"),
    [
        *((1, 64, 64, False), (5, 80, 7, False), (8, 128, 16, True), (7, 16, 128, False), (4, 136, 32, True)),
        *((8, 512, 64, False), (8, 512, 16, True)),
    ],
)
def test_groups_of_heads_head_sizes_and_blocks(
    group: int, head_dim: int, block_size: int, with_fp8: bool, dtype: torch.dtype
) -> None:
    lengths = [(151, 1), (170, 3), (140, 1)]
    step = make_step(lengths, (2 * group, 2), head_dim, block_size, dtype, with_fp8=with_fp8)
    check(sharing(step, [([0, 1, 2], 139 // block_size)]), 1, scale=min(0.3, 2 / head_dim**0.5))


@pytest.mark.usefixtures("any_saving_pays")
@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, sequences = int(rng.choice([16, 48, 64])), int(rng.integers(4, 8))
    counts = rng.choice([1, 1, 2], sequences)
    shared_blocks = int(rng.integers(180, 300)) // size
    lengths = [(shared_blocks * size + int(rng.integers(0, 90)) + int(count), int(count)) for count in counts]
    half = sequences // 2
    members = [list(range(half)), list(range(half, sequences))] if seed else [list(range(1, sequences))]
    group, kv_heads = int(rng.choice([1, 4, 6])), int(rng.integers(1, 3))
    step = make_step(lengths, (group * kv_heads, kv_heads), 16, size, torch.float32, seed)
    check(sharing(step, [(group_members, shared_blocks) for group_members in members]), len(members))


@pytest.mark.usefixtures("any_saving_pays")
def test_more_queries_than_a_tile_holds() -> None:
    """8 query heads: 16 tokens a tile, so that sequences of 3 tokens extend across two tiles, cut unequally."""
    step = make_step([(390 + s, 3) for s in range(22)], (8, 1), 16, 64, torch.float32)
    check(sharing(step, [(list(range(22)), 6)]), 1)
    work = step.plan(None).decode.cascade
    assert work.numbers.tile_W3[:, 2].tolist() == [1, 2, 2, 1, 1]


@pytest.mark.usefixtures("any_saving_pays")
def test_a_broken_query_stays_in_its_row_and_a_broken_value_in_its_group() -> None:
    lengths, shared = STEPS["two groups and one alone"]
    step = sharing(make_step(lengths, (2, 2), 16, 64, torch.float32), shared)
    step.q_TND[2, 1, 5] = float("nan")
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
    assert torch.isfinite(ours).all(-1).logical_not().nonzero().tolist() == [[2, 1]]
    step.cache.v_CBKD[step.attn_metadata.block_table_SM[4, 0], 9, 0] = float("nan")
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, None)
    assert torch.isfinite(ours).all(-1).logical_not().nonzero().tolist() == [[1, 0], [2, 1], [4, 0]]


@pytest.mark.usefixtures("any_saving_pays")
def test_layers_with_a_window_and_the_deterministic_mode_read_each_sequence_by_itself() -> None:
    lengths, shared = STEPS["all in one group"]
    step = sharing(make_step(lengths, (4, 1), 16, 64, torch.float32), shared)
    ours = PagedAttention(DEVICE)(*step.tensors, step.attn_metadata, 0.3, 150)
    assert float((ours.cpu() - reference_attention(*step.wide, step.attn_metadata, 0.3, 150)).abs().max()) < 5e-6
    assert step.plan(150).decode.cascade is None
    apart = make_step(lengths, (4, 1), 16, 64, torch.float32)
    for s in (1, 2):  # what is shared, copied to blocks of its own
        for tensor, its in zip(apart.cache.tensors, step.cache.tensors):
            tensor[apart.attn_metadata.block_table_SM[s, :2]] = its[step.attn_metadata.block_table_SM[s, :2]]

    def is_the_same(attention: PagedAttention | BatchInvariantAttention) -> bool:
        return torch.equal(
            *(attention(step.q_TND, s.cache, replace(s.attn_metadata, plans={}), 0.3, None) for s in (step, apart))
        )

    assert is_the_same(BatchInvariantAttention(DEVICE))
    assert not is_the_same(PagedAttention(DEVICE)), "sums in another order have other bits"


# -- groups that are read together


def planned(shape: CascadeShape, groups: list[tuple[int, int]]) -> CascadePlan | None:
    """Plan for groups of (sequences, shared tokens), where each sequence has 100 tokens of its own."""
    sequences = sum(size for size, _ in groups)
    width = (max(tokens for _, tokens in groups) + 100) // 64 + 1
    table_SM = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    context_S, first = np.zeros(sequences, dtype=np.int32), 0
    for size, tokens in groups:
        table_SM[first : first + size, : tokens // 64] = table_SM[first, : tokens // 64]
        context_S[first : first + size] = tokens + 100
        first += size
    query_start_S1 = np.arange(sequences + 1, dtype=np.int32)
    attn_metadata = AttentionInput(query_start_S1, context_S, table_SM, torch.zeros(0, dtype=torch.int64), 64)
    return shape.decide(attn_metadata, np.arange(sequences)).plan


def test_groups_are_read_together_where_they_pay_and_up_to_the_limit() -> None:
    """A group pays if it saves more than a launch costs."""
    many, few = (CascadeShape.for_steps(sequences, 32, 8, 128, H100) for sequences in (1024, 64))
    cases: list[tuple[CascadeShape, list[tuple[int, int]], list[int]]] = [
        (many, [(835, 2048)], [2048]),
        (many, [(2, 128)], []),
        (many, [(2, 8192)], [8192]),
        (many, [(64, 64)], []),  # less than a unit
        (many, [(8, 2048), (300, 640), (1, 500), (2, 128)], [2048, 640, 128]),
        (few, [(4, 1024), (4, 4096), (4, 512), (4, 2048), (40, 3072)], [4096, 2048, 3072]),
    ]
    for shape, groups, expected in cases:
        plan = planned(shape, groups)
        assert (plan.tokens_G.tolist() if plan is not None else []) == expected, groups
        assert plan is None or plan.tiles_G.sum() <= shape.max_tiles


@pytest.mark.parametrize("seed", range(6))
def test_what_is_remembered_from_step_to_step_is_what_is_found_anew(seed: int) -> None:
    rng, size, width = np.random.default_rng(seed), 64, 16
    shape = replace(CascadeShape.for_steps(64, 8, 2, 64, H100), min_saved_bytes=0)
    steps = CascadeSteps(shape)
    stems = np.arange(3 * width, dtype=np.int32).reshape(3, width)
    stems[1:, :2] = stems[0, :2]
    table_SM, context_S, fresh = np.zeros((0, width), dtype=np.int32), np.zeros(0, dtype=np.int32), 1000
    numbers, num_kept, num_shared = [], 0, 0
    for _ in range(300):
        stays = (rng.random(len(table_SM)) > 0.01) & (context_S < width * size - 11)
        table_SM, context_S = table_SM[stays], context_S[stays]
        if len(table_SM) < 7 and (not len(table_SM) or rng.random() < 0.2):
            row = np.arange(fresh, fresh + width, dtype=np.int32)
            shared = int(rng.integers(0, 9))
            row[:shared], fresh = stems[rng.integers(3), :shared], fresh + width
            table_SM = np.concatenate([table_SM, row[None]])
            context_S = np.append(context_S, np.int32(rng.integers(max(shared - 5, 0) * size + 1, 9 * size)))
        context_S = context_S + np.int32(11)
        count_S = np.ones(len(context_S), dtype=np.int32) + (rng.random(len(context_S)) < 0.02)
        query_start_S1 = np.append(0, np.cumsum(count_S)).astype(np.int32)
        attn_metadata = AttentionInput(
            query_start_S1, context_S, table_SM.copy(), torch.zeros(0, dtype=torch.int64), size
        )
        plan = shape.decide(attn_metadata, np.arange(len(context_S))).plan
        found = shape.numbers(attn_metadata, plan)
        before, numbers = numbers, steps.numbers(attn_metadata)
        assert all(np.array_equal(a, b) for a, b in zip(numbers, found, strict=True))
        num_kept += numbers is before
        num_shared += plan is not None
    assert min(num_kept, num_shared) > 60
