"""Quantize the trained target to AWQ int4 with autoawq, calibrated on training prompts and their summaries.

    python -m pipeline.demo.quantize --model DIR --out DIR

Needs the extra `quantize` of this project.
"""

import argparse
import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.demo.reports import HARD_FROM, make_report

QUANT_CONFIG = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
MAX_TOKENS = 256


def quantize(model: Path, out: Path, num_samples: int) -> None:
    """Write the int4 model folder `out` from the 16-bit one in `model`; minutes on two cores."""
    from awq import AutoAWQForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    awq = AutoAWQForCausalLM.from_pretrained(str(model), device_map="cpu", safetensors=True)
    awq.quantize(
        tokenizer,
        quant_config=QUANT_CONFIG,
        calib_data=calibration_texts(tokenizer, num_samples),
        max_calib_samples=num_samples,
        max_calib_seq_len=MAX_TOKENS,
    )
    awq.save_quantized(str(out), safetensors=True)
    ship_with_configuration_of(model, out)


def calibration_texts(tokenizer: PreTrainedTokenizerFast, num_samples: int) -> list[str]:
    """Training prompts with their summaries that fit in `MAX_TOKENS`: autoawq drops longer ones silently."""
    texts: list[str] = []
    index = HARD_FROM
    while len(texts) < num_samples:
        report = make_report("train", index)
        index += 1
        text = f"{report.prompt} {report.summary}"
        if len(tokenizer.encode(text)) < MAX_TOKENS:
            texts.append(text)
    return texts


def ship_with_configuration_of(model: Path, out: Path) -> None:
    """Keep of autoawq's configuration the quantization alone; all else is the 16-bit model's, byte for byte.

    autoawq switches sampling on and the cache off, and notes that the tokenizer came from a local folder.
    """
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = json.loads((out / "config.json").read_text())["quantization_config"]
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(model / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantize the demonstration model to AWQ int4.")
    parser.add_argument("--model", type=Path, required=True, help="the 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    quantize(options.model, options.out, options.samples)


if __name__ == "__main__":
    main()
