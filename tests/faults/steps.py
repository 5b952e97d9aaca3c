"""Kill jobs of three steps, a repetition and a vote, and check every row: `python -m tests.faults.steps --kills 150`.
With `--row-function` the jobs have a row function instead (`row_function.py`).

A run is a process of its own over a fake engine, whose answers follow from prompt and seed. It is struck after a random
time: the driver or the engine is killed, or the driver gets SIGTERM. Then the same command is repeated. At the end each
row must be there once, with the values that computing its prompts one after the other gives. The engine logs the
requests that it computes: only those of units in flight at a kill may be computed twice.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.output.parts import PartStore
from pipeline.engine.tasks import Choice, ChoiceResult
from pipeline.errors import Interrupted
from pipeline.job.actor.tokenize import row_seed, step_seed
from pipeline.job.output.audit import audit
from tests.faults.processes import family
from tests.job.fake_engine import answer, result_of

ROOT = Path(__file__).parents[2]
UNIT_ROWS, KINDS, SEQS = 20, 3, 16
UNITS_IN_FLIGHT = 4  # of an engine with SEQS sequences and these units
LABELS = (" yes", " no")
STEPS: list[dict[str, Any]] = [
    {
        "name": "check",
        "prompt": {"template": "{text}: {draft}; ok?"},
        "task": {"type": "choice", "labels": list(LABELS)},
    },
    {
        "name": "repair",
        "when": "check.label = ' no'",
        "prompt": {"template": "{text} {draft} {check.attempts} again"},
        "sampling": {"max_tokens": 4, "temperature": 0.5},
        "replaces": "draft",
        "repeat": {"from": "check", "until": "check.label = ' yes'", "at_most": 2},
    },
    {
        "name": "best",
        "prompt": {"template": "{draft} best {text}"},
        "sampling": {"max_tokens": 4, "temperature": 0.5},
        "vote": {"n": 5, "stop_at": 0.6},
    },
]


@dataclass(frozen=True)
class Flow:
    """Flow of the rows of a job. sections: of its job file. driver: the module that runs it. max_requests: of a row.
    expected: values of a row by its number. found: the same values in a row of the output."""

    sections: dict[str, Any]
    driver: str
    max_requests: int
    expected: Callable[[int], dict[str, Any]]
    found: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Counts:
    """Counts of a campaign. duplicates: requests that were computed again. allowed: those that may be."""

    jobs: int = 0
    rows: int = 0
    runs: int = 0
    requests: int = 0
    duplicates: int = 0
    allowed: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        kills = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kills}) in {self.runs} runs of {self.jobs} jobs: {self.rows:,} rows, each "
            f"once and right; {self.duplicates:,} of {self.requests:,} requests computed again, at most "
            f"{self.allowed:,} of units in flight"
        )


def _expected(row: int) -> dict[str, Any]:
    """Return the values of a row, computed one after the other."""

    def generated(prompt: str, seed: int) -> str:
        return str(answer(list(prompt.encode()), seed, 4)[0] % KINDS)

    def seed(name: str, attempt: int) -> int:
        return step_seed(0, "f0.parquet", row, name, attempt)

    text, tokens = text_of_row(row), tuple(tuple(label.encode()) for label in LABELS)
    draft, label, checks, repairs = generated(f"Say {text}", row_seed(0, "f0.parquet", row)), "", 0, 0
    while label != " yes" and repairs <= 2:
        chosen = result_of(list(f"{text}: {draft}; ok?".encode()), Choice(tokens))
        assert isinstance(chosen, ChoiceResult)
        label, checks = LABELS[chosen.best], checks + 1
        if label == " no":
            draft = generated(f"{text} {draft} {checks} again", seed("repair", repairs))
            repairs += 1
    samples: list[str] = []
    while True:
        most = max(Counter(samples).values(), default=0)
        if most == 3 or most + 5 - len(samples) < 3:
            break
        samples.append(generated(f"{draft} best {text}", seed("best", len(samples))))
    best = max(Counter(samples), key=Counter(samples).__getitem__)
    return {"draft": draft, "check": (label, checks), "repair": repairs or None, "best": (best, most, len(samples))}


def _found(row: dict[str, Any]) -> dict[str, Any]:
    check, repair, best = row["check"], row["repair"], row["best"]
    return {
        "draft": row["generated_text"],
        "check": (check["label"], check["attempts"]),
        "repair": repair and repair["attempts"],
        "best": (best["generated_text"], best["votes"], best["attempts"]),
    }


STEPS_FLOW = Flow({"steps": STEPS}, "tests.job.drive", 1 + 3 + 3 + 5, _expected, _found)


def play(kills: int, seed: int, num_rows: int = 600, log=print, flow: Flow = STEPS_FLOW) -> Counts:
    """Kill runs of jobs until `kills` of them were struck; check each finished job."""
    draw, counts = random.Random(seed), Counts()
    while counts.kills.total() < kills:
        with tempfile.TemporaryDirectory(prefix="steps-") as folder:
            _play_job(Path(folder), flow, num_rows, draw, kills, counts)
        log(counts.text())
    return counts


def _play_job(folder: Path, flow: Flow, num_rows: int, draw: random.Random, kills: int, counts: Counts) -> None:
    job, log_file = _write_job(folder, flow, num_rows), folder / "computed.txt"
    allowed = 0
    while True:
        with open(folder / "stderr.txt", "ab") as stderr:
            command = [sys.executable, "-m", flow.driver, str(job)]
            run = subprocess.Popen(command, cwd=ROOT, stdout=stderr, stderr=stderr, start_new_session=True)
        counts.runs += 1
        kind = draw.choice(("driver", "driver", "engine", "SIGTERM"))
        num_computed, deadline = _num_lines(log_file), time.monotonic() + 120
        while run.poll() is None and _num_lines(log_file) <= num_computed and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            run.wait(draw.uniform(0.0, 0.7))
        except subprocess.TimeoutExpired:
            if counts.kills.total() < kills and _strike(run, kind):
                counts.kills[kind] += 1
                allowed += UNITS_IN_FLIGHT * UNIT_ROWS * flow.max_requests if kind == "driver" else SEQS
        code = run.wait(120)
        if code == 0:
            break
        ended = (-signal.SIGKILL, -signal.SIGTERM, Interrupted.exit_code)  # SIGTERM: after the end of the job
        assert code in ended, f"exit code {code}: {(folder / 'stderr.txt').read_text()[-3000:]}"
    _check(folder, flow, num_rows)
    lines = log_file.read_text().split()
    duplicates = len(lines) - len(set(lines))
    assert duplicates <= allowed, f"{duplicates} requests were computed again, at most {allowed} may be"
    counts.jobs, counts.rows = counts.jobs + 1, counts.rows + num_rows
    counts.requests, counts.duplicates = counts.requests + len(lines), counts.duplicates + duplicates
    counts.allowed += allowed


def _strike(run: subprocess.Popen[bytes], kind: str) -> bool:
    """Strike a process of a run; return False if it does not exist."""
    pids = family([run.pid]).get("engine", []) if kind == "engine" else [run.pid]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    except ProcessLookupError:
        return False
    return bool(pids)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def text_of_row(row: int) -> str:
    return f"text {row} " + "x" * (row % 13)


def _write_job(folder: Path, flow: Flow, num_rows: int) -> Path:
    for name in ("in", "model"):
        (folder / name).mkdir()
    table = pa.table(
        {"id": pa.array(range(num_rows), pa.int64()), "text": [text_of_row(row) for row in range(num_rows)]}
    )
    pq.write_table(table, folder / "in" / "f0.parquet")
    fake = {"kinds": KINDS, "step_s": 0.01, "max_num_seqs": SEQS, "computed": str(folder / "computed.txt")}
    (folder / "model" / "config.json").write_text(json.dumps({"fake": fake}))
    (folder / "model" / "tokenizer.json").write_text("{}")
    settings = {
        "input": {"path": str(folder / "in"), "columns": ["id"]},
        "prompt": {"template": "Say {text}"},
        "model": {"path": str(folder / "model")},
        "engine": {"device": "cpu", "max_num_seqs": SEQS},
        "sampling": {"max_tokens": 4},
        "output": {"path": str(folder / "out"), "rows_per_file": UNIT_ROWS},
        "run": {"drain_timeout": "5 s"},
        **flow.sections,
    }
    (folder / "job.yaml").write_text(json.dumps(settings))
    return folder / "job.yaml"


def _check(folder: Path, flow: Flow, num_rows: int) -> None:
    parts = sorted((folder / "out").glob("part-*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(num_rows)), "a row is lost or doubled"
    for row in rows:
        assert row["error"] is None
        assert flow.found(row) == flow.expected(row["id"])
    assert audit(PartStore(str(folder / "out")), deep=True, log=lambda text: None).sound
    assert (folder / "out" / "_SUCCESS").exists()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--row-function", action="store_true")
    arguments = parser.parse_args()
    if arguments.row_function:
        from tests.faults.row_function import FLOW

        play(arguments.kills, arguments.seed, flow=FLOW)
    else:
        play(arguments.kills, arguments.seed)
