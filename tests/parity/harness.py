"""Our tokens and logits against those of transformers, in float32."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.kernels.delta_net import StateCache
from tests.model_folders import CHUNKED, in_chunks, load_reference
from tests.prompt_steps import prompt_step

LOGIT_TOLERANCE = 1e-4
TIE = 1e-4  # two best logits closer than this may come out either way


@dataclass
class Agreement:
    """Number of compared tokens, and of near-ties that were decided differently."""

    compared: int = 0
    near_ties: int = 0


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def own_error(folder: Path, token_ids: list[int]) -> float:
    """Return how far the logits of transformers' own form of a model are from float64."""
    exact = reference_logits(load_reference(folder, torch.float64), token_ids)
    model = load_reference(folder)
    module = sys.modules[type(model).__module__]
    with patch.object(module, CHUNKED, in_chunks[module]) if module in in_chunks else nullcontext():
        return float((reference_logits(model, token_ids) - exact).abs().max())


def greedy_reference(model: Any, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()) -> list[int]:
    """Return the reference's tokens. One pass verifies those of the guess; the rest is generated token by token."""
    guess = list(guess)
    best = reference_logits(model, prompt + guess)[len(prompt) - 1 : -1].argmax(-1).tolist()
    right = next((i for i, (ours, theirs) in enumerate(zip(guess, best, strict=True)) if ours != theirs), len(guess))
    if right == num_tokens:
        return guess
    prompt, known = prompt + guess[:right], guess[:right]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens - right,
            min_new_tokens=num_tokens - right,
            eos_token_id=None,
            pad_token_id=0,
        )
    return known + out[0, len(prompt) :].tolist()


def compare_greedy(model: Any, prompt: list[int], ours: list[int], expected: list[int], seen: Agreement) -> None:
    """Assert that tokens are equal, or first differ at a near-tie of the reference, which is counted."""
    for position, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        seen.compared += 1
        if mine == theirs:
            continue
        logits = reference_logits(model, prompt + expected[:position])[-1]
        gap = float(logits[theirs] - logits[mine])
        assert abs(gap) < TIE, f"token {position}: {mine} instead of {theirs}, whose logit is {gap:.2e} higher"
        seen.near_ties += 1
        print(f"near-tie at token {position}: gap {gap:.2e}")
        return


def our_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Return the logits at every position; the engine's runner computes them as one chunk in unordered blocks."""
    return engine.runner.execute(prompt_step(engine.table.pages, token_ids))


def float32_engine(folder: Path, **options: Any) -> Engine:
    settings = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 8}
    return Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", **(settings | options)))


def state_bytes(engine: Engine) -> int:
    """Return the bytes of the states of all layers; 0 for most families."""
    states: tuple[StateCache | None, ...] = engine.runner.kv.states  # type: ignore[attr-defined]
    return sum(tensor.nbytes for state in states if state is not None for tensor in state.tensors)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
