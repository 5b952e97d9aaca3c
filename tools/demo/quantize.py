"""Quantize the trained target to AWQ int4, calibrated on training prompts and their summaries.

    python -m tools.demo.quantize --model DIR --out DIR

This module chooses the texts. `pipeline.quantize` does the work and needs the extra `quantize`.
"""

import argparse
from pathlib import Path

import torch

from pipeline.demo.reports import HARD_FROM, make_report
from pipeline.quantize import Recipe, quantize
from pipeline.tokenization.tokenizer import Tokenizer

MAX_TOKENS = 256


def calibration_texts(tokenizer: Tokenizer, num_samples: int) -> list[list[int]]:
    """Return token ids of training prompts with their summaries, each below MAX_TOKENS tokens."""
    texts: list[list[int]] = []
    index = HARD_FROM
    while len(texts) < num_samples:
        report = make_report("train", index)
        index += 1
        token_ids = tokenizer.encode(f"{report.prompt} {report.summary}")
        if len(token_ids) < MAX_TOKENS:
            texts.append(token_ids)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantize the demonstration model to AWQ int4.")
    parser.add_argument("--model", type=Path, required=True, help="the 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    texts = calibration_texts(Tokenizer.from_folder(str(options.model)), options.samples)
    quantize(options.model, options.out, Recipe("awq"), texts, torch.device("cpu"), print)


if __name__ == "__main__":
    main()
