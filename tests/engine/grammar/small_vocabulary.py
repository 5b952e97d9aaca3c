"""A vocabulary of 97 tokens that can spell JSON in ASCII, and an engine whose logits are hashes of whole contexts."""

from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.tokenization.tokenizer import Tokenizer
from tests.engine.hash_runner import EOS, VOCAB, hash_engine

MERGES = [('"', ":"), ("{", '"'), (",", '"'), ("a", "b")]
_TABLE = torch.from_numpy(np.random.default_rng(11).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32))


def small_tokenizer() -> Tokenizer:
    """Build a tokenizer of printable ASCII without four characters, four pairs, a special token and EOS."""
    letters = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in "~^|`"] + ["\u0120"]  # byte-level's blank
    pieces = letters + [left + right for left, right in MERGES]
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|eos|>"])
    assert (backend.token_to_id("<|eos|>"), backend.get_vocab_size()) == (EOS, VOCAB)
    return Tokenizer(backend, name="small", eos_token_ids=frozenset({EOS}), digest="")


def text_engine(num_blocks: int = 1200, is_asynchronous: bool = False, **options: Any) -> Engine:
    """Build an engine whose logits depend on a hash of all earlier tokens; every token is possible."""
    options = {"max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    engine = hash_engine(num_blocks, is_asynchronous=is_asynchronous, tokenizer=small_tokenizer(), **options)
    add_noise(engine.runner)
    return engine


def add_noise(runner: Any) -> None:
    """Replace the runner's logits by a row of a table that the hash selects."""
    execute = runner.execute

    def with_noise(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        return _TABLE[execute(step, future).argmax(dim=-1)]

    runner.execute = with_noise


def job_engine(config: object, log: object) -> Engine:
    """Build the engine of a job's backend."""
    return text_engine()


def job_tokenizer(folder: str, chat_template: str | None = None) -> Tokenizer:
    return small_tokenizer()
