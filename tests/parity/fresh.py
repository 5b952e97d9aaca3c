"""Parity on shapes, weights and prompts drawn anew: `python -m tests.parity.fresh --seed N [--rounds K]`.

Each round draws a checkpoint of every family, random prompts with shared beginnings, and random engine limits (block
size, batch, chunk, KV cache), and compares logits and greedy tokens with transformers in float32. Without a seed one is
taken from the system and printed, so that a failure can be repeated.
"""

import argparse
import secrets
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from tests.model_folders import FAMILIES, VOCAB, draw_config, load_reference, write_checkpoint
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    greedy_reference,
    our_logits,
    reference_logits,
)


def check_family(folder: Path, rng: np.random.Generator, seen: Agreement) -> str:
    """Compare one drawn checkpoint under drawn limits; return a line about it."""
    model = load_reference(folder)
    stem = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
    prompts = []
    for _ in range(8):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 90))).tolist()
        prompts.append(stem + own if rng.random() < 0.5 else own)
    num_tokens = int(rng.integers(4, 65))
    block_size = int(rng.choice([1, 4, 8, 16, 32]))
    limits = {
        "block_size": block_size,
        "max_num_seqs": int(rng.integers(1, 9)),
        "max_num_batched_tokens": int(rng.integers(9, 300)),
        "max_model_len": 224,
        "enable_prefix_caching": bool(rng.random() < 0.7),
    }
    with float32_engine(folder, **limits) as engine:
        worst = float((our_logits(engine, prompts[0]) - reference_logits(model, prompts[0])).abs().max())
        assert worst < LOGIT_TOLERANCE, f"logits differ by {worst:.1e} under {limits}"
        kv_bytes = int(rng.integers(240, 700)) * engine.runner.decoder.config.kv_bytes_per_token(torch.float32)
    with float32_engine(folder, kv_cache_memory_bytes=kv_bytes, **limits) as engine:
        engine.scheduler.admission.expected_output = int(rng.choice([1, 64]))
        done = engine.generate(prompts, greedy(num_tokens))
        engine.pool.check()
        preemptions = engine.stats.num_preemptions
        cached = engine.stats.cached_tokens
    for prompt, completion in zip(prompts, done):
        compare_greedy(model, prompt, completion.token_ids, greedy_reference(model, prompt, num_tokens), seen)
    return f"logits within {worst:.1e}, {num_tokens} tokens x 8, {preemptions} preemptions, {cached} cached, {limits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    seen = Agreement()
    for round_ in range(arguments.rounds):
        for family in FAMILIES:
            rng = np.random.default_rng([seed, round_, sum(family.name.encode())])
            with tempfile.TemporaryDirectory() as root:
                config = draw_config(family, rng)
                folder = write_checkpoint(Path(root) / family.name, family, config, int(rng.integers(1 << 31)))
                print(f"{family.name}: {check_family(folder, rng, seen)}", flush=True)
    print(f"{seen.compared} tokens compared, {seen.near_ties} near-ties")


if __name__ == "__main__":
    main()
