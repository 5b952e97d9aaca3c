"""Steps that compute whole texts, in pages of their own that are not in order."""

from dataclasses import replace

import numpy as np

from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.roofline.kv_pages import KVPages


def prompt_step(pages: KVPages, token_ids: list[int], count: int = 1) -> StepInput:
    """Return a step of `count` rows of the same text, with logits at every position."""
    length, size = len(token_ids), pages.block_size
    per_row = -(-length // size)

    def layout(first_page: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
        page_SM = first_page + np.arange(count * per_row)[::-1].reshape(count, per_row)
        position_T = np.tile(np.arange(length), count)
        block_T = page_SM[np.repeat(np.arange(count), length), position_T // size] * stride
        return (page_SM * stride).astype(np.int32), block_T * size + position_T % size

    table_SM, slot_T = layout(1, pages.stride)
    step = dummy_step(
        count_S=np.full(count, length),
        context_len_S=np.full(count, length),
        block_table_SM=table_SM,
        block_size=size,
        row_R=np.arange(count * length),
    )
    step = replace(step, token_id_T=np.array(token_ids * count, dtype=np.int64), slot_mapping_T=slot_T)
    if pages.window is None:
        return step
    table_SM, slot_T = layout(1 + count * per_row, pages.window_stride)
    return replace(step, window_block_table_SM=table_SM, window_slot_mapping_T=slot_T)
