"""Compare the speed of two versions of the pipeline.

    python -m benchmarks.compare ../before .
    python -m benchmarks.compare ../before . --bench job --busy 0,1,3
    python -m benchmarks.compare /envs/old/bin/python /envs/new/bin/python --rounds 15 --json

OLD and NEW are checkouts, run by this Python, or the Python of an environment. Both run the benchmarks of the checkout
that contains this file, with their own `pipeline` package. Every round runs OLD, NEW and OLD again, or in reverse
order. NEW is compared with the mean of its two neighbors, so that drift of the machine cancels. The ratio of the two
OLD runs is the control: its interval should contain 1. Intervals contain the median ratio with at least 95% confidence
(order statistics of the rounds, no assumptions about their distribution).

Wall time is the bench's own work time per token, without loading. CPU time is that of the whole command and its
children. With --busy, other processes compete for the CPU. The exit code is 1 if NEW is slower than OLD by more than
2%, that is if an interval of wall time is entirely above 1.02.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.measure import facts_to_text, machine_facts, table
from benchmarks.script import json_flag, report, script

COMMANDS = {
    "engine": "--model demo --reports --requests 256 --batch-sizes none --rounds 3",
    "job": "--rows 512 --rounds 1",
    "speculation": "--batch-sizes 8 --rows 64 --rounds 2",
}
MAX_SLOWER = 1.02
CONFIDENCE = 0.95
OLD, NEW, CONTROL = "old", "new", "old again"


@dataclass(frozen=True)
class Ran:
    """Result of one command. seconds: measure -> wall time per token. tokens: computed tokens, to compare the work."""

    seconds: dict[str, float]
    processor_s: float
    tokens: int


@dataclass(frozen=True)
class Interval:
    median: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Interval":
        """Return a confidence interval of the median of the values' distribution."""
        ranked, cut = sorted(values), _ranks_cut(len(values))
        return cls(median(ranked), ranked[cut], ranked[-1 - cut])

    def to_text(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Compared:
    """One measure with `busy` other processes. alone: median time relative to no other processes, for old and new."""

    bench: str
    measure: str
    busy: int
    old: float
    new: float
    ratio: Interval
    control: Interval
    alone: tuple[float, float] | None

    @property
    def is_slower(self) -> bool:
        return self.ratio.low > MAX_SLOWER

    def cells(self) -> tuple[object, ...]:
        alone = [None if self.alone is None else f"{each:.2f}" for each in (self.alone or (0, 0))]
        verdict = "slower" if self.is_slower else "faster" if self.ratio.high < 1 else ""
        control = self.control.to_text() + ("" if self.control.low <= 1 <= self.control.high else " !")
        ratios = (self.ratio.to_text(), control)
        return (self.bench, self.measure, self.busy, self.old, self.new, *alone, *ratios, verdict)


def _ranks_cut(count: int) -> int:
    """Return the number of values that an interval with CONFIDENCE excludes at each end.

    The median is beyond rank k with the probability of at most k heads in `count` tosses. Up to 8 values return 0; up
    to 5 values give less confidence.
    """
    cut, beyond = 0, 2 / 2**count
    while beyond + 2 * comb(count, cut + 1) / 2**count <= 1 - CONFIDENCE:
        cut += 1
        beyond += 2 * comb(count, cut) / 2**count
    return cut


def run_bench(side: Path, bench: str, options: Sequence[str]) -> Ran:
    """Run a benchmark with the package of a checkout or environment.

    Raises ClickException with the end of its stderr when it fails, and when it would import another package.
    """
    python = sys.executable if side.is_dir() else str(side)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stderr:
        # The benchmarks of a checkout must not shadow ours, so ours are the only package of a folder that comes first.
        Path(folder, "benchmarks").symlink_to(Path(__file__).resolve().parent)
        paths = [folder, str(side.resolve())] if side.is_dir() else [folder]
        command = [python, "-m", f"benchmarks.{bench}", *options, "--json"]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            stderr.seek(0)
            end = stderr.read()[-2000:].decode(errors="replace")
            raise click.ClickException(f"{' '.join(command)} of {side} exited with code {process.returncode}: {end}")
    found = json.loads(printed.splitlines()[-1])
    if side.is_dir() and found["package"] != str(side.resolve() / "pipeline"):
        raise click.ClickException(f"{side}: the benchmark imported {found['package']}")
    seconds, tokens = MEASURES[bench](found)
    return Ran(seconds, usage.ru_utime + usage.ru_stime, tokens)


def _engine(found: dict[str, Any]) -> tuple[dict[str, float], int]:
    (ours,) = (speed for speed in found["speeds"] if speed["name"] == "this engine")
    rates = {"all requests": ours["tokens_per_s"], "one request": ours["single_tokens_per_s"]}
    return {name: 1 / rate["median"] for name, rate in rates.items()}, found["computed_tokens"]


def _job(found: dict[str, Any]) -> tuple[dict[str, float], int]:
    runs, tokens = found["job"], found["generated_tokens"]
    names = {"work_s": "work", "whole_s": "whole process"}
    return {name: median(run[field] for run in runs) / tokens for field, name in names.items()}, tokens


def _speculation(found: dict[str, Any]) -> tuple[dict[str, float], int]:
    seconds, tokens = {}, 0
    for batch in found["batches"]:
        for way in batch["ways"]:
            if way["name"] in ("plain", "auto"):
                seconds[f"{batch['batch']} at once, {way['name']}"] = sum(way["seconds"]) / way["tokens"]
                tokens += way["tokens"]
    return seconds, tokens


MEASURES = {"engine": _engine, "job": _job, "speculation": _speculation}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` busy processes, which share the CPU fairly with the benchmark."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if processes else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compared(bench: str, busy: int, runs: dict[int, dict[str, list[Ran]]]) -> list[Compared]:
    """Compare one bench with `busy` other processes. runs: number of busy processes -> side -> a run for each round."""

    def values(side: str, measure: str | None, count: int) -> list[float]:
        return [ran.processor_s if measure is None else ran.seconds[measure] for ran in runs[count][side]]

    found = []
    for measure in [*runs[busy][OLD][0].seconds, None]:
        old, new, control = (values(side, measure, busy) for side in (OLD, NEW, CONTROL))
        alone = None
        if busy and 0 in runs:
            pairs = ((side, zip(values(side, measure, busy), values(side, measure, 0))) for side in (OLD, NEW))
            before, after = (median(a / b for a, b in times) for _, times in pairs)
            alone = before, after
        scale = 1 if measure is None else 1e6
        found.append(
            Compared(
                bench,
                "CPU s" if measure is None else f"{measure}, us/token",
                busy,
                scale * median(old),
                scale * median(new),
                Interval.from_values([n / sqrt(o * c) for o, n, c in zip(old, new, control)]),
                Interval.from_values([c / o for o, c in zip(old, control)]),
                alone,
            )
        )
    return found


def same_work(bench: str, runs: dict[int, dict[str, list[Ran]]]) -> Iterator[str]:
    """Yield a sentence if the versions generated different numbers of tokens."""
    counts = {side: {ran.tokens for each in runs.values() for ran in each[side]} for side in (OLD, NEW)}
    if counts[OLD] != counts[NEW]:
        old, new = (", ".join(f"{count:,}" for count in sorted(counts[side])) for side in (OLD, NEW))
        yield f"bench {bench}: old computed {old} tokens, new {new}; times are per token."


@script(__doc__)
@click.argument("old", type=click.Path(exists=True, resolve_path=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, resolve_path=False, path_type=Path))
@click.option("--bench", "benches", type=click.Choice(list(COMMANDS)), multiple=True, help="Default: all.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=1), help="Rounds; a verdict needs 9.")
@click.option("--busy", default="0", show_default=True, metavar="N,N", help="Numbers of other busy processes.")
@click.option("--options", help="Options of the benchmark, instead of the defaults of one --bench.")
@json_flag
def main(
    old: Path, new: Path, benches: tuple[str, ...], rounds: int, busy: str, options: str | None, as_json: bool
) -> None:
    benches = benches or tuple(COMMANDS)
    if options is not None and len(benches) != 1:
        raise click.UsageError("--options requires exactly one --bench")
    sides = {OLD: old.absolute(), NEW: new.absolute(), CONTROL: old.absolute()}
    counts = [int(count) for count in busy.split(",")]
    machine = machine_facts()
    found: list[Compared] = []
    notes: list[str] = []
    for bench in benches:
        arguments = (COMMANDS[bench] if options is None else options).split()
        runs: dict[int, dict[str, list[Ran]]] = {count: {side: [] for side in sides} for count in counts}
        for number in range(rounds):
            for count in counts:
                with busy_processes(count):
                    for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
                        click.echo(f"{bench}, round {number + 1} of {rounds}, {count} busy: {side}", err=True)
                        runs[count][side].append(run_bench(sides[side], bench, arguments))
        found += [each for count in counts for each in compared(bench, count, runs)]
        notes += same_work(bench, runs)
    columns = "bench <11 | time <20 | busy >4 | old >9.2f | new >9.2f | old / alone >12 | new / alone >12"
    rows = [each.cells() for each in found]
    if rounds < 9:
        notes.append(f"{rounds} rounds: a verdict needs 9.")
    if any(row[-2].endswith("!") for row in rows if isinstance(row[-2], str)):
        notes.append("!: the control's interval does not contain 1; the machine's speed changed during the run.")
    lines = [facts_to_text(machine), *table(f"{columns} | new / old <24 | old again / old <26 |  <7", rows), *notes]
    compared_json = [asdict(each) for each in found]
    figures = {"machine": machine, "rounds": rounds, "compared": compared_json, "notes": notes}
    report("compare", figures, lines, as_json)
    sys.exit(any(each.is_slower for each in found if each.measure != "CPU s"))


if __name__ == "__main__":
    main()
