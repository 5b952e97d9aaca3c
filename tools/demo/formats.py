"""What each form of weights costs the demonstration model: makes every one, measures all on held-out reports.

    python -m tools.demo.formats --out build/formats --reports 500

Owns the choice of forms and texts; `pipeline.quantize` makes, `pipeline.evaluate` measures. AWQ needs the extra
`quantize` and some minutes. Forms that are in the folder are not made again.
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
from pipeline.engine.params import SamplingParams
from pipeline.evaluate import Evaluation, ModelVariant, evaluate
from pipeline.quantize import Recipe, quantize
from pipeline.tokenization.tokenizer import Tokenizer
from tools.demo.quantize import calibration_texts

SOURCE = demo_model("target")
RECIPES = {
    "awq": Recipe("awq"),
    "gptq": Recipe("gptq"),
    "gptq-act-order": Recipe("gptq", act_order=True),
    "rtn": Recipe("rtn"),
    "int8": Recipe("int8"),
    "fp8": Recipe("fp8"),
}
ON_LOAD = ("nf4", "int4-rtn", "int8")
FP8_ACTIVATIONS = ("awq", "gptq", "fp8")  # those that are measured with activations in fp8 too
MAX_TOKENS = 96


def make_all(out: Path, num_samples: int) -> list[Path]:
    """A folder for each recipe, calibrated on training prompts with their summaries."""
    texts = calibration_texts(Tokenizer.from_folder(str(SOURCE)), num_samples)
    folders = {out / name: recipe for name, recipe in RECIPES.items()}
    for folder, recipe in folders.items():
        if not folder.exists():
            print(f"making {folder}", flush=True)
            quantize(SOURCE, folder, recipe, texts, torch.device("cpu"), print)
    return list(folders)


def write_reports(path: Path, num_reports: int) -> None:
    """Held-out reports with their right summaries."""
    reports = [make_report("heldout", index) for index in range(num_reports)]
    columns = {"report_id": [r.report_id for r in reports], "report": [r.text for r in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns | {"summary": [r.summary for r in reports]}), path)


def measure(folders: list[Path], data: Path) -> Evaluation:
    """All forms against the 16-bit model, in float32, so that the weights alone differ."""
    flags = {
        "model.path": (str(SOURCE), "SOURCE"),
        "input.path": (str(data), "data"),
        "prompt.template": (PROMPT_TEMPLATE, "PROMPT_TEMPLATE"),
        "output.path": ("-", "none"),
        "engine.dtype": ("float32", "dtype"),
    }
    source = ModelVariant("demo:target")
    subjects = [ModelVariant(str(folder)) for folder in folders] + [
        ModelVariant("demo:target", kind) for kind in ON_LOAD
    ]
    subjects += [
        ModelVariant(str(folder), activation_dtype="fp8") for folder in folders if folder.name in FP8_ACTIVATIONS
    ]
    return evaluate(job_from_flags(flags), subjects, source, SamplingParams(max_tokens=MAX_TOKENS), "summary", print)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make and measure every form of the demonstration model.")
    parser.add_argument("--out", type=Path, default=Path("build/formats"))
    parser.add_argument("--reports", type=int, default=500)
    parser.add_argument("--samples", type=int, default=32, help="texts to calibrate with")
    options = parser.parse_args()
    data = options.out / f"heldout-{options.reports}.parquet"
    write_reports(data, options.reports)
    found = measure(make_all(options.out, options.samples), data)
    print(found.to_text())
    print(json.dumps(found.to_json()))


if __name__ == "__main__":
    main()
