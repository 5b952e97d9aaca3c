"""Distance of logits with states in bfloat16 from those with states in float32: `python -m tests.parity.states`.

A random model of Qwen3.5's form computes random tokens one by one, as in decoding. For comparison, so does a model that
computes in bfloat16, with states in float32.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipeline import Engine, EngineConfig
from pipeline.engine.schedule.step_plan import StepInput
from tests.model_folders import DELTA, Family, small_config, write_checkpoint
from tests.prompt_steps import prompt_step

SIZES = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "head_dim": 64, "max_position_embeddings": 4096,
         "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2}  # fmt: skip
EXACT = {"dtype": "float32", "state_dtype": "float32"}
VARIANTS = {"bfloat16 states": {"state_dtype": "bfloat16"}, "bfloat16 model": {"dtype": "bfloat16"}}


def last_token(step: StepInput) -> StepInput:
    """Return the step of a text that computes only its last token."""
    arrays = {name: getattr(step, name)[-1:] for name in ("token_id_T", "position_T", "slot_mapping_T")}
    starts, rows = np.array([0, 1], dtype=np.int32), np.zeros(1, dtype=np.int64)
    return replace(step, **arrays, query_start_S1=starts, logit_row_R=rows)


def log_probs(folder: Path, token_ids: list[int], options: dict[str, str]) -> torch.Tensor:
    """Return the logarithms of the next token's probabilities after each token."""
    limits = {"max_model_len": 4096, "max_num_seqs": 1, "block_size": 16, "device": "cpu"}
    with Engine(EngineConfig(model=str(folder), **limits, **EXACT | options)) as engine:  # type: ignore[arg-type]
        steps = (prompt_step(engine.table.pages, token_ids[:end]) for end in range(1, len(token_ids) + 1))
        return torch.cat([engine.runner.execute(last_token(step)) for step in steps]).float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    token_ids = np.random.default_rng(arguments.seed).integers(0, 256, arguments.tokens).tolist()
    with tempfile.TemporaryDirectory() as root:
        config, family = small_config(256, 512, 8, 4, 2) | DELTA | SIZES, Family("qwen3-5", "qwen3_5_text")
        folder = write_checkpoint(Path(root), family, config, arguments.seed)
        exact = log_probs(folder, token_ids, {})
        print(f"standard deviation of log-probabilities: {float(exact.std()):.2f}\n")
        print("| | largest difference | mean KL | same first choice |\n| --- | --- | --- | --- |")
        for name, options in VARIANTS.items():
            ours = log_probs(folder, token_ids, options)
            divergence = float((exact.exp() * (exact - ours)).sum(-1).mean())
            same = float((exact.argmax(-1) == ours.argmax(-1)).float().mean())
            print(f"| {name} | {float((exact - ours).abs().max()):.3f} | {divergence:.1e} | {same:.1%} |")


if __name__ == "__main__":
    main()
