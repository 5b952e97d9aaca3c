"""Measure what each quantization costs on real text: perplexity, KL divergence and agreement, as one table.

    python -m benchmarks.quality smollm2 --limit 24
    python -m benchmarks.quality gemma3 --limit 8 --work /tmp/quality

The models are those of `make test-real`. Their dequantized GGUF weights are the reference, so the loss of the GGUF file
itself is not in the table. Calibrated methods read half of the texts (English documentation); all are measured on the
other half, by `pipeline eval` in float32. fp8 activations are rounded exactly, in the reference kernels.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import facts_to_text, machine_facts, table
from benchmarks.script import json_flag, progress, report, script
from tests.real.models import dense_folder, gemma3, smollm2, texts

NUM_TEXTS = 64
ON_LOAD = ("int8", "int4-rtn", "nf4", "fp8")
MADE = {"gptq": ("--group-size", "64"), "awq": ("--group-size", "64"), "rtn": ("--group-size", "64")}


def _pipeline(*arguments: str) -> str:
    progress(f"pipeline {' '.join(arguments[:2])}")
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@script(__doc__)
@click.argument("model", type=click.Choice(["smollm2", "gemma3"]))
@click.option("--limit", type=click.IntRange(min=1), default=24, show_default=True, help="Texts to measure.")
@click.option("--methods", default="gptq,rtn", show_default=True, help="Methods to make; also awq.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder to keep; default: a temporary one.")
@json_flag
def main(model: str, limit: int, methods: str, work: Path | None, as_json: bool) -> None:
    work = work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    file = smollm2() if model == "smollm2" else gemma3(work)
    if file is None:
        raise click.ClickException("the model's packages are missing: `make test-real` installs them")
    dense = work / "dense"
    if not dense.is_dir():
        dense_folder(file, dense)
    every = texts(NUM_TEXTS)
    for name, part in (("calibration", every[::2]), ("heldout", every[1::2])):
        pq.write_table(pa.table({"text": part}), work / f"{name}.parquet")
    made = [method for method in methods.split(",") if method]
    for method in made:
        if not (work / method).is_dir():
            texts_of = [] if method == "rtn" else ["--calibration", str(work / "calibration.parquet")]
            options = ["--output", str(work / method), "--method", method, *texts_of, *MADE[method]]
            _pipeline("quantize", str(dense), *options)
    shared = ["--against", str(dense), "--data", str(work / "heldout.parquet"), "--dtype", "float32"]
    shared += ["--limit", str(limit), "--max-tokens", "1", "--json"]  # outputs are not in the table
    loaded = [part for each in ON_LOAD for part in ("--quantization", each)]
    runs = {
        "weights": [*(str(work / method) for method in made), *loaded, "--activation-dtype", "none"],
        "dense, KV cache in fp8": [str(dense), "--kv-cache-dtype", "fp8"],
        "int8, activations in int8": ["--quantization", "int8", "--activation-dtype", "int8"],
        "fp8, activations in fp8": ["--quantization", "fp8", "--activation-dtype", "fp8"],
    }
    rows, figures = [], {}
    for run, arguments in runs.items():
        found: list[dict[str, Any]] = json.loads(_pipeline("eval", *arguments, *shared))["models"]
        for each in found if run == "weights" else found[-1:]:
            name = each["weights"] if run == "weights" else run
            figures[name] = {key: each[key] for key in ("perplexity", "kl_mean", "kl_p99", "top1")}
            kl = (None if each[key] is None else f"{each[key]:.2e}" for key in ("kl_mean", "kl_p99"))
            rows.append((name, each["perplexity"], *kl, None if each["top1"] is None else f"{each['top1']:.1%}"))
    columns = "quantization <10 | perplexity >8.3f | KL mean >9 | KL p99 >9 | same top token >8"
    head = [
        f"{file.name}: {limit} texts; the reference is its dequantized weights.",
        facts_to_text(machine_facts()),
        "",
    ]
    report("quality", figures, [*head, *table(columns, rows)], as_json)


if __name__ == "__main__":
    main()
