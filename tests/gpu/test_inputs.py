"""Steps for kernels alone: every token's slot is in its sequence's blocks, and what is counted of them is right."""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.reference import attention
from tests.gpu.inputs import Heads, paged_step

HEADS = Heads(4, 2, 64)
CPU = torch.device("cpu")


def test_blocks_belong_to_one_sequence_and_slots_to_one_token():
    counts, contexts = [5, 1, 130], [5, 200, 140]
    step = paged_step(counts, contexts, HEADS, torch.float32, CPU)
    used = [set(step.where.block_table_SM[s, : -(-c // 64)].tolist()) for s, c in enumerate(contexts)]
    assert sorted(block for blocks in used for block in blocks) == list(range(1 + 4 + 3))
    assert step.cache.k_CBKD.shape == (8, 64, 2, 64)
    slots = step.where.slot_mapping_T.tolist()
    assert len(set(slots)) == len(slots) == 136
    for s, (count, context) in enumerate(zip(counts, contexts)):
        own = slots[step.where.query_start_S1[s] : step.where.query_start_S1[s + 1]]
        table = step.where.block_table_SM[s]
        assert own == [table[p // 64] * 64 + p % 64 for p in range(context - count, context)]
    assert (np.diff(step.where.block_table_SM[1, :4]) != 1).any()  # in no order


def test_attention_over_it_is_attention_over_the_same_tokens_in_a_row():
    step = paged_step([70], [70], HEADS, torch.float32, CPU, seed=4)
    order = [int(slot) for slot in step.where.slot_mapping_T]
    k, v = (cache.flatten(0, 1)[order].transpose(0, 1)[None] for cache in step.cache.tensors)
    q = step.q_TND.transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    found = attention(step.q_TND, step.cache, step.where, 64**-0.5, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bytes_and_operations():
    step = paged_step([3, 1], [3, 10], HEADS, torch.bfloat16, CPU)
    assert step.kv_bytes == 2 * 13 * 2 * 64 * 2
    in_8_bits = paged_step([3, 1], [3, 10], HEADS, torch.bfloat16, CPU, with_fp8_cache=True)
    assert in_8_bits.kv_bytes == 2 * 13 * 2 * (64 + 4)
    assert step.flops == 4 * 4 * 64 * (1 + 2 + 3 + 10)


def test_a_shared_beginning_lies_in_the_same_blocks_and_is_counted_once():
    step = paged_step([1, 2, 1], [129, 300, 200], HEADS, torch.bfloat16, CPU, shared=128)
    table_SM = step.where.block_table_SM
    assert (table_SM[:, :2] == table_SM[0, :2]).all()
    assert len({*table_SM[0, :3].tolist(), *table_SM[1, :5].tolist(), *table_SM[2, :4].tolist()}) == 2 + 1 + 3 + 2
    assert len(step.cache.k_CBKD) == 8
    assert step.kv_bytes == 2 * (128 + 1 + 172 + 72) * 2 * 64 * 2
