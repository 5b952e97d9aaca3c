"""What a set of kernels must offer: signatures, shapes, aliasing. `reference.py` is the oracle of each.

Shape suffixes: T tokens of a step, S sequences of a step, H hidden, N query heads, K KV heads, D head size,
B block size, C number of blocks, M most blocks of a sequence in the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.quant.packed import LinearWeight

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x_TK -> y_TN, in x's type. Owns its packed weight."""


@dataclass(frozen=True)
class AttentionInput:
    """Where each sequence's queries and keys lie. One object serves all layers of a step.

    Sequence s computes the query tokens query_start_S1[s]:query_start_S1[s+1]; they are the last ones of its context
    of context_len_S[s] tokens, whose keys and values (these tokens' own included) lie in the blocks block_table_SM[s].
    The numpy arrays are the host's copies, for kernels that plan on the host.
    """

    query_start_S1: np.ndarray  # int32
    context_len_S: np.ndarray  # int32
    block_table_SM: np.ndarray  # int32; entries past the context are not read
    slot_mapping_T: torch.Tensor  # int64: block * B + offset, where this token's key and value are written
    block_size: int


@dataclass(frozen=True)
class Kernels:
    """A frozen set of functions for one device and type, and who serves each.

    prepare_linear(weight) -> Linear: packs once at load; the caller drops its own copy.
    rms_norm(x, weight, eps) -> y: over the last dimension (hidden states; query and key heads).
    add_rms_norm(x_TH, residual_TH, weight_H, eps) -> (y_TH, residual_TH + x_TH); may write into its inputs.
    rope(x_TND, cos_TD2, sin_TD2) -> rotated halves, the layout of Hugging Face checkpoints ("neox").
    write_kv(k_TKD, v_TKD, k_cache_CBKD, v_cache_CBKD, slot_mapping_T) -> None: writes the caches in place.
    attention(q_TND, k_cache_CBKD, v_cache_CBKD, AttentionInput, scale, window) -> o_TND; window None is full
      causal attention, else a query at position p sees keys p - window + 1 .. p.
    silu_mul(gate_up_T2F) -> silu(first half) * second half.
    """

    prepare_linear: Callable[[LinearWeight], Linear]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionInput, float, int | None], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    served_by: dict[str, str]
