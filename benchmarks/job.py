"""Compare a whole job, Parquet to Parquet, with the engine alone on the same rows.

    python -m benchmarks.job
    python -m benchmarks.job --model qwen3-0.6b --rows 64 --rounds 1
    python -m benchmarks.job --server http://localhost:8000/v1    # also the same job computed by a running server

Each round starts both processes cold, in alternating order: `pipeline run`, and `engine_alone`, which reads, renders
and tokenizes the same rows with the job's own stages and steps the same engine without Ray, parts or an engine
process. Start-up and load time are reported separately from work time. The job's work time runs from its engine being
ready to the driver receiving the last part, according to the job's run record. The engine's work time runs from its
first request to its last completion and excludes tokenization. The ratio therefore includes everything that the job
does to feed the engine, to write and to count.

Rows are the demonstration's reports. A model with random weights does not stop at EOS, so each of its rows requests its
own number of tokens.
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Spread, alternating, facts_to_text, last_line, machine_facts, ratio, table
from benchmarks.request_sets import REPORT_TOKENS, workload
from benchmarks.script import json_flag, progress, report, script, shared_options
from benchmarks.shapes import NAMES, bench_model
from pipeline.data.output.parts import PartStore
from pipeline.demo.reports import make_report
from pipeline.errors import PipelineError
from pipeline.job.telemetry.run_log import load_runs
from pipeline.machine.host import available_cores
from pipeline.machine.interpreter import child_environment
from pipeline.report.record.run_record import RunRecord

ROW_GROUP = 128
NUM_FILES = 4

PHASES = {
    "startup_s": "start-up (Ray, processes, imports)",
    "load_s": "load and warm-up",
    "work_s": "work",
    "idle_s": "  no engine step (no rows, last part)",
    "end_s": "end (counting, Ray's shutdown)",
    "whole_s": "whole process",
}

Row = tuple[str, int]  # source file, source row


@dataclass(frozen=True)
class Times:
    """Seconds of one run.

    idle_s: part of work_s in which no engine stepped. whole_s: the whole process, including Python's start and exit.
    tokens_per_s: generated tokens per second of work_s.
    """

    startup_s: float
    load_s: float
    work_s: float
    idle_s: float
    end_s: float
    whole_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class JobBench:
    description: str
    rows: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    dtype: str
    job: tuple[Times, ...]
    engine: tuple[Times, ...]
    server: tuple[Times, ...]  # empty if there is none
    equal_rows: int  # rows with the same completion in every run of the job and of the engine
    equal_rows_of_server: int  # rows for which a server has the same completion as the job
    machine: dict[str, str]

    @property
    def ratio(self) -> Spread:
        """Return the job's work time divided by the engine's, paired by round."""
        return ratio([t.work_s for t in self.job], [t.work_s for t in self.engine])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "job_by_engine": asdict(self.ratio)}

    def to_lines(self) -> list[str]:
        runs = {"job": self.job, "engine alone": self.engine} | ({"server": self.server} if self.server else {})
        lines = [
            f"The job, Parquet to Parquet, and the engine alone: {self.description}, {self.dtype}.",
            f"{self.rows:,} rows, {self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} of them from the job's "
            f"prefix cache), {self.generated_tokens:,} generated tokens; greedy. Seconds: median (lowest to highest) "
            f"of {len(self.job)} cold runs each, in alternating order.",
            facts_to_text(self.machine),
            "",
        ]
        rows = [
            (label, *(Spread.from_values([vars(t)[field] for t in times]).to_text() for times in runs.values()))
            for field, label in PHASES.items()
        ]
        rates = (Spread.from_values([t.tokens_per_s for t in times]).to_text(0) for times in runs.values())
        columns = " | ".join([" <36", *(f"{name} >27" for name in runs)])
        lines += table(columns, [*rows, ("generated tokens/s, during work", *rates)])
        lines += ["", f"Job's work time / engine's: {self.ratio.to_text(3)}."]
        lines.append(f"Equal completions in all runs of job and engine: {self.equal_rows:,} of {self.rows:,} rows.")
        if self.server:
            by_job = ratio([t.work_s for t in self.server], [t.work_s for t in self.job])
            lines.append(f"Server's work time / job's: {by_job.to_text()}.")
            lines.append(f"Server's completions equal to the job's: {self.equal_rows_of_server:,} of {self.rows:,}.")
        return lines


def bench_job(
    model: str = "demo:target-awq",
    rows: int = 512,
    rounds: int = 3,
    dtype: str = "auto",
    output_tokens: tuple[int, int] = (16, 128),
    server: str | None = None,
    folder: str | None = None,
) -> JobBench:
    """Measure `model` (a shape of `shapes.NAMES`, an embedded model or a path) over `rows` reports.

    output_tokens: bounds of the output tokens that each row of a random shape requests. server: url of a running server
    of the same model. folder: holds the shapes' checkpoints. Raises PipelineError when a run fails, or when float32
    completions of job and engine differ.
    """
    machine = machine_facts()
    bench = bench_model(model, folder, progress)
    with tempfile.TemporaryDirectory(prefix="bench-job-") as made:
        work_folder = Path(made)
        job_file = _write_job(work_folder, bench.folder, rows, dtype, output_tokens if model in NAMES else None)
        runs: dict[str, list[_Run]] = {name: [] for name in ("job", "engine", *(["server"] if server else []))}
        for number, order in enumerate(alternating(list(runs), rounds), 1):
            for name in order:
                progress(f"round {number} of {rounds}: {name}")
                if name == "engine":
                    runs[name].append(_run_engine(job_file))
                else:
                    file = job_file if name == "job" else _of_server(job_file, str(server))
                    runs[name].append(_run_job(file, work_folder / f"{name}-{number}"))
    first = runs["job"][0]
    ours = runs["job"] + runs["engine"]
    equal = sum(all(run.answers.get(row) == answer for run in ours) for row, answer in first.answers.items())
    if first.dtype == "float32" and (equal < rows or len(first.answers) != rows):
        raise PipelineError(f"{rows - equal} of {rows} float32 completions of the job and of the engine alone differ")
    return JobBench(
        bench.description,
        rows,
        first.prompt_tokens,
        first.cached_tokens,
        first.generated_tokens,
        first.dtype,
        tuple(run.times for run in runs["job"]),
        tuple(run.times for run in runs["engine"]),
        tuple(run.times for run in runs.get("server", [])),
        equal,
        sum(runs["server"][0].answers.get(row) == answer for row, answer in first.answers.items()) if server else 0,
        machine,
    )


@dataclass(frozen=True)
class _Run:
    times: Times
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    dtype: str
    answers: Mapping[Row, str]  # digest of each completion


def answer_digest(text: str, num_tokens: int, finish_reason: str) -> str:
    """Return a digest that is equal for equal completions."""
    return hashlib.sha256(f"{num_tokens} {finish_reason} {text}".encode()).hexdigest()[:16]


def _write_job(work_folder: Path, model: Path, rows: int, dtype: str, output_tokens: tuple[int, int] | None) -> Path:
    """Write the input and the job file. output_tokens: bounds of each row's tokens, ignoring EOS; None stops at EOS."""
    (work_folder / "in").mkdir()
    max_tokens = [n.output for n in workload(rows, 120, output_tokens or (REPORT_TOKENS, REPORT_TOKENS)).lengths()]
    table = pa.table(
        {
            "prompt": [make_report("job", index).prompt for index in range(rows)],
            "max_tokens": pa.array(max_tokens, pa.int32()),
        }
    )
    per_file = -(-rows // NUM_FILES)
    for number, start in enumerate(range(0, rows, per_file)):
        part = table.slice(start, per_file)
        pq.write_table(part, work_folder / "in" / f"reports-{number:02d}.parquet", row_group_size=ROW_GROUP)
    job = {
        "name": "bench",
        "input": {"path": str(work_folder / "in"), "columns": []},
        "prompt": {"column": "prompt"},
        "model": {"path": str(model)},
        "engine": {"dtype": dtype},
        "sampling": {"max_tokens": {"column": "max_tokens"}, "ignore_eos": output_tokens is not None},
        "output": {"path": str(work_folder / "out")},
    }
    path = work_folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML too
    return path


def _run_job(job_file: Path, output: Path) -> _Run:
    command = ["-m", "pipeline", "run", str(job_file), "--set", f"output.path={output}", "--json"]
    _, whole_s = _measured([sys.executable, *command], child_environment())
    run = load_runs(PartStore(str(output)))[0]
    columns = ["source_file", "source_row", "generated_text", "num_generated_tokens", "finish_reason"]
    table = pa.concat_tables([pq.read_table(part, columns=columns) for part in output.glob("part-*.parquet")])
    answers = {
        (row["source_file"], row["source_row"]): answer_digest(
            row["generated_text"] or "", row["num_generated_tokens"], row["finish_reason"]
        )
        for row in table.to_pylist()
    }
    return _Run(
        _times_of(run, whole_s),
        run.input_tokens,
        run.cached_tokens,
        run.generated_tokens,
        str(run.resolved.get("dtype", "")),
        answers,
    )


def _of_server(job_file: Path, url: str) -> Path:
    """Write the same job for a server, and return its path."""
    job = json.loads(job_file.read_text())
    del job["model"]
    path = job_file.with_name("server.yaml")
    path.write_text(json.dumps(job | {"server": {"base_url": url}}))
    return path


def _times_of(run: RunRecord, whole_s: float) -> Times:
    """Return the times of a run with one actor, whose phases begin with the run and end with its graph."""
    assert len(run.actors) == 1
    startup_us, load_us = run.phase_us("startup"), run.phase_us("load")
    work_s = (run.machine_us - startup_us - load_us) / 1e6
    idle_s = run.phase_us("idle") / 1e6
    end_s = sum(run.driver_us[name] for name in ("ray_stop", "verify")) / 1e6
    return Times(startup_us / 1e6, load_us / 1e6, work_s, idle_s, end_s, whole_s, run.generated_tokens / work_s)


def _run_engine(job_file: Path) -> _Run:
    threads = str(available_cores())  # the same as a job with one actor gives its engine
    result, whole_s = _measured(
        [sys.executable, "-m", "benchmarks.engine_alone", str(job_file)],
        child_environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, NUMBA_NUM_THREADS=threads),
    )
    startup_s = whole_s - result["load_s"] - result["tokenize_s"] - result["work_s"] - result["end_s"]
    rate = result["generated_tokens"] / result["work_s"]
    return _Run(
        Times(startup_s, result["load_s"], result["work_s"], result["idle_s"], result["end_s"], whole_s, rate),
        result["prompt_tokens"],
        result["cached_tokens"],
        result["generated_tokens"],
        result["dtype"],
        {(file, row): answer for file, row, answer in result["answers"]},
    )


def _measured(command: list[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], float]:
    """Return the JSON of a process's last line, and the process's seconds."""
    began = time.perf_counter()
    return last_line(command, environment), time.perf_counter() - began


@script(__doc__)
@shared_options(model="demo:target-awq", rows=512, rounds=3, dtype="auto", output_tokens="16-128", folder=None)
@click.option("--server", metavar="URL", help="Also run the job on a running server of the same model.")
@json_flag
def main(as_json: bool, **options: Any) -> None:
    found = bench_job(**options)
    report("job", found.to_json(), found.to_lines(), as_json)


if __name__ == "__main__":
    main()
