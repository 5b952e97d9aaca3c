"""The demonstration job killed at random moments and run again: `python -m tests.faults.kill_demo --kills 10`.

The driver gets SIGKILL, so nothing can be tidied up; Ray's processes and the engine must notice by themselves. After
each kill the parts that stand are remembered; no later run may write them again. In the end every input row must be
there once, and the summaries as good as the checker wants.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.dataset as ds

ROOT = Path(__file__).parents[2]


@dataclass
class Campaign:
    """What happened: moments of the kills in seconds after the start, parts that stood after each, runs to the end."""

    kills_s: list[float]
    parts_after: list[int]
    rows: int
    wasted_tokens: int


def command(out: Path, limit: int | None, unit_rows: int) -> list[str]:
    line = [sys.executable, "-m", "pipeline.cli", "run", "jobs/summarize.yaml", "--set", f"output.path={out}"]
    line += ["--set", f"run.unit_rows={unit_rows}", "--json"]
    return line if limit is None else [*line, "--limit", str(limit)]


def parts(out: Path) -> dict[str, tuple[int, int]]:
    """Name -> inode and time of writing of every part that stands."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.glob("part-*.parquet")}


def run_campaign(out: Path, kills: int, seed: int, limit: int | None, unit_rows: int, longest_s: float) -> Campaign:
    """Kill `kills` runs at random moments up to `longest_s` seconds in, then run to the end and check the promise."""
    draw = random.Random(seed)
    happened = Campaign([], [], 0, 0)
    standing: dict[str, tuple[int, int]] = {}
    while len(happened.kills_s) < kills:
        driver = subprocess.Popen(
            command(out, limit, unit_rows), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        moment = draw.uniform(0.0, longest_s)
        try:
            driver.wait(timeout=moment)
            assert driver.returncode == 0, f"a run between kills ended with {driver.returncode}"
            break  # finished before its kill came
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        now = parts(out)
        assert standing.items() <= now.items(), "a part that stood was written again or removed"
        standing = now
        happened.kills_s.append(round(moment, 1))
        happened.parts_after.append(len(now))
        time.sleep(draw.uniform(0.0, 2.0))
    last = subprocess.run(command(out, limit, unit_rows), cwd=ROOT, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr[-2000:]
    assert standing.items() <= parts(out).items(), "a part that stood was written again or removed"
    happened.rows, happened.wasted_tokens = check(out, limit, json.loads(last.stdout))
    return happened


def check(out: Path, limit: int | None, report: dict) -> tuple[int, int]:
    """Every input row once, no more, no fewer, and the machine time's phases sum to its total."""
    rows = ds.dataset(sorted(str(p) for p in out.glob("part-*.parquet"))).to_table(
        columns=["source_file", "source_row"]
    )
    seen = Counter(zip(rows["source_file"].to_pylist(), rows["source_row"].to_pylist()))
    expected = []
    for path in sorted((ROOT / "jobs" / "data").glob("*.parquet")):
        expected += [(path.name, row) for row in range(ds.dataset(path).count_rows())]
    assert seen == Counter(expected[:limit])
    assert (out / "_SUCCESS").exists()
    assert sum(report["phases_us"].values()) == report["machine_us"]
    assert report["work"]["units_lost"] == 0, "a unit was computed that had its part"
    return len(expected[:limit]), report["work"]["wasted_generated_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--unit-rows", type=int, default=64)
    parser.add_argument("--longest-s", type=float, default=45.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"seed {options.seed}", flush=True)
        happened = run_campaign(
            Path(folder) / "out", options.kills, options.seed, options.limit, options.unit_rows, options.longest_s
        )
    print(f"killed {len(happened.kills_s)} times, after {happened.kills_s} s; parts that stood: {happened.parts_after}")
    print(f"{happened.rows} rows, each once; at least {happened.wasted_tokens} generated tokens lost")


if __name__ == "__main__":
    main()
