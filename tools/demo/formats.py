"""Quantize the demonstration model to every weight format, and evaluate all of them on held-out reports.

    python -m tools.demo.formats --out build/formats --reports 500

`pipeline.quantize` creates the formats and `pipeline.evaluate` measures them. AWQ needs the extra `quantize` and a few
minutes. Existing formats in the folder are reused.
"""

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.config import job_from_flags
from pipeline.demo import demo_model
from pipeline.demo.reports import PROMPT_TEMPLATE, make_report
from pipeline.engine.sampling_params import SamplingParams
from pipeline.evaluate import Evaluation, ModelVariant, evaluate
from pipeline.quantize import Recipe, quantize
from pipeline.tokenization.tokenizer import Tokenizer
from tools.demo.quantize import calibration_texts

SOURCE = demo_model("target")
RECIPES = {
    "awq": Recipe("awq"),
    "gptq": Recipe("gptq"),
    "rtn": Recipe("rtn"),
    "int8": Recipe("int8"),
    "fp8": Recipe("fp8"),
}
ON_LOAD = ("nf4", "int4-rtn", "int8")
FP8_ACTIVATIONS = ("awq", "gptq", "fp8")  # also measured with fp8 activations
MAX_TOKENS = 96


def make_all(out: Path, num_samples: int) -> list[Path]:
    """Create a folder for each recipe, calibrated on training prompts with their summaries, and return the folders."""
    texts = calibration_texts(Tokenizer.from_folder(str(SOURCE)), num_samples)
    folders = {out / name: recipe for name, recipe in RECIPES.items()}
    for folder, recipe in folders.items():
        if not folder.exists():
            print(f"creating {folder}", flush=True)
            quantize(SOURCE, folder, recipe, texts, torch.device("cpu"), print)
    return list(folders)


def write_reports(path: Path, num_reports: int) -> None:
    """Write held-out reports with their correct summaries."""
    reports = [make_report("heldout", index) for index in range(num_reports)]
    columns = {"report_id": [r.report_id for r in reports], "report": [r.text for r in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns | {"summary": [r.summary for r in reports]}), path)


def measure(folders: list[Path], data: Path) -> Evaluation:
    """Evaluate all formats against the 16-bit model, in float32, so that only the weights differ."""
    flags = {
        "model.path": (str(SOURCE), "SOURCE"),
        "input.path": (str(data), "data"),
        "prompt.template": (PROMPT_TEMPLATE, "PROMPT_TEMPLATE"),
        "output.path": ("-", "none"),
        "engine.dtype": ("float32", "dtype"),
    }
    source = ModelVariant("demo:target")
    variants = [ModelVariant(str(folder)) for folder in folders] + [
        ModelVariant("demo:target", kind) for kind in ON_LOAD
    ]
    variants += [
        ModelVariant(str(folder), activation_dtype="fp8") for folder in folders if folder.name in FP8_ACTIVATIONS
    ]
    return evaluate(job_from_flags(flags), variants, source, SamplingParams(max_tokens=MAX_TOKENS), "summary", print)


def main() -> None:
    parser = argparse.ArgumentParser(description="Create and evaluate every weight format of the demonstration model.")
    parser.add_argument("--out", type=Path, default=Path("build/formats"))
    parser.add_argument("--reports", type=int, default=500)
    parser.add_argument("--samples", type=int, default=32, help="number of calibration texts")
    options = parser.parse_args()
    data = options.out / f"heldout-{options.reports}.parquet"
    write_reports(data, options.reports)
    found = measure(make_all(options.out, options.samples), data)
    print(found.to_text())
    print(json.dumps(found.to_json()))


if __name__ == "__main__":
    main()
