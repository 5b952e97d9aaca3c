"""Runs a step on the device: host arrays in, logits of the sampling rows out. Owns the tensors of the KV cache and of
the positions."""

from typing import Protocol

import torch

from pipeline.engine.flight import LateTokens
from pipeline.engine.step import StepInput
from pipeline.kernels.contract import AttentionInput
from pipeline.model.decoder import Decoder, KVCache


class Runner(Protocol):
    """What the engine needs of a model: `ModelRunner`, or a test's model that proves the scheduler."""

    vocab_size: int
    is_asynchronous: bool
    """Whether `execute` returns while the device is still at work."""

    def execute(self, step: StepInput, late: LateTokens | None = None) -> torch.Tensor: ...
    def zero_blocks(self, blocks: list[int]) -> None: ...


class ModelRunner:
    """`execute` is the only way tokens are computed; it overwrites the KV slots the step names."""

    def __init__(self, decoder: Decoder, kv: KVCache, block_size: int, max_model_len: int) -> None:
        self.decoder, self.kv, self.block_size = decoder, kv, block_size
        self.vocab_size = decoder.config.vocab_size
        self.is_asynchronous = decoder.device.type == "cuda"
        # As long as a sequence can be here, which is less than what the checkpoint claims where the cache is smaller.
        cos_PD2, sin_PD2 = decoder.config.rope.tables(decoder.config.head_dim, max_model_len)
        self.cos_PD2, self.sin_PD2 = cos_PD2.to(decoder.device), sin_PD2.to(decoder.device)

    @torch.inference_mode()
    def execute(self, step: StepInput, late: LateTokens | None = None) -> torch.Tensor:
        """Logits (R, vocabulary) in float32 of the rows `step.logit_row_R`. `late`: tokens that the step does not hold
        yet."""
        device = self.decoder.device
        where = AttentionInput(
            query_start_S1=step.query_start_S1,
            context_len_S=step.context_len_S,
            block_table_SM=step.block_table_SM,
            slot_mapping_T=torch.from_numpy(step.slot_mapping_T).to(device),
            block_size=self.block_size,
        )
        token_ids_T = torch.from_numpy(step.token_id_T).to(device)
        if late is not None:
            late.put_into(token_ids_T)
        positions_T = torch.from_numpy(step.position_T).to(device)
        cos_TD2, sin_TD2 = self.cos_PD2[positions_T], self.sin_PD2[positions_T]
        hidden_RH = self.decoder.forward(token_ids_T, cos_TD2, sin_TD2, where, step.logit_row_R, self.kv)
        return self.decoder.logits(hidden_RH)

    def zero_blocks(self, blocks: list[int]) -> None:
        self.kv.fill(blocks, 0.0)
