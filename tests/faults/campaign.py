"""A real job killed at random moments, run again and checked: `python -m tests.faults.campaign --kills 100 --store s3`.

Every few seconds something of the running job gets SIGKILL: the driver, an engine's process, one of Ray's workers, now
and then Ray's own node process; or the driver gets SIGTERM, SIGHUP or SIGINT. Each run is with Ray or without it, by
chance. It comes in any phase; the short ones (planning, starting, verifying, publishing) are waited for. With `--store
s3` input, output and model lie in an object store behind a proxy that loses answers, says 503, cuts bodies and resets
connections. Whenever the driver is gone the same command is given again; when the job is finished its rows are compared
with those of a run that nobody disturbed, and a new output is begun, until the kills have been done. It ends with an
assertion at the first row that is lost, doubled or different, and at an exit code that is not the documented one.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import yaml

from pipeline.demo import demo_model
from tests.faults.store import Bucket, FaultyStore

ROOT = Path(__file__).parents[2]
WEIGHTS = {"driver": 50, "engine": 25, "worker": 20, "node": 5}
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STOPPED = 0.7  # share of the driver's kills that are one of these instead of SIGKILL
RESUMABLE = (3, 75)  # exit codes after which the same command goes on
LONGEST_RUN_S = 900.0
SOON_AFTER_A_PART, IN_A_PHASE = 0.4, 0.4  # of the kills
PHASES = ("planning", "starting", "loading", "verifying", "publishing")
PATIENCE_S = 120.0
BUSY = {"lost_put": 0.05, "slow_down": 0.05, "server_error": 0.02, "conflict": 0.02, "error_body": 0.02,
        "truncated": 0.02, "reset": 0.02, "slow": 0.02}  # fmt: skip


@dataclass
class Campaign:
    """What happened so far."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # in which it was killed
    parts_at_kill: list[int] = field(default_factory=list)
    rounds: int = 0
    rows: int = 0  # of all rounds, each seen once and equal
    runs: int = 0
    ended: Counter[int] = field(default_factory=Counter)  # exit codes of the runs
    wasted_tokens: int = 0
    restarts: int = 0

    def told(self) -> str:
        kinds = ", ".join(f"{n} of {kind}" for kind, n in sorted(self.kills.items()))
        there = sorted(self.parts_at_kill) or [0]
        return (
            f"{self.kills.total()} kills ({kinds}) in {self.runs} runs of {self.rounds} jobs, while "
            f"{', '.join(f'{phase} {n}' for phase, n in self.phases.most_common())}; parts that stood at a "
            f"kill: {there[0]} to {there[-1]}, median {there[len(there) // 2]}; {self.rows} rows: 0 lost, 0 doubled, "
            f"0 different; exit codes {dict(self.ended)}; {self.restarts} engine restarts, at least "
            f"{self.wasted_tokens} generated tokens computed in vain"
        )


class Place:
    """Where the job's input, model and outputs lie: a folder, or a bucket behind a faulty store."""

    def __init__(self, folder: Path, bucket: Bucket | None, rows: int) -> None:
        self.folder = folder
        self.bucket = bucket
        self.rows = rows
        if bucket is not None:
            for path in [*(ROOT / "jobs" / "data").glob("*.parquet")]:
                bucket.upload(path, f"in/{path.name}")
            for path in demo_model("target-awq").iterdir():
                bucket.upload(path, f"model/{path.name}")

    def url(self, name: str) -> str:
        return f"s3://{self.bucket.name}/{name}" if self.bucket is not None else str(self.folder / name)

    def job(self, output: str, on_disk: bool = False) -> Path:
        """The job file, written; with `on_disk` the same job from local folders."""
        job = yaml.safe_load((ROOT / "jobs" / "summarize.yaml").read_text())
        if on_disk or self.bucket is None:
            job["input"]["path"] = str(ROOT / "jobs" / "data")
            job["output"]["path"] = str(self.folder / output)
        else:
            job["storage"] = {"s3": self.bucket.storage}
            for section, name in (("input", "in"), ("model", "model"), ("output", output)):
                job[section] |= {"path": self.url(name)}
        job["engine"] = {"dtype": "float32"}
        # one thread: on a machine that others use too, two wait for each other at every step
        job["output"]["rows_per_file"] = 16
        job["run"] = {"window_rows": 256, "cpus_per_actor": 1, "drain_timeout": "5 s"}
        path = self.folder / f"{output}.yaml"
        path.write_text(json.dumps(job))  # which is YAML; its own writer would write what is there twice by reference
        return path

    def parts(self, output: str) -> dict[str, str]:
        """Name -> what tells one writing of it from another, of every part that stands."""
        if self.bucket is not None:
            return {n: tag for n, tag in self.bucket.tags(f"{output}/").items() if n.startswith("part-")}
        found = (self.folder / output).glob("part-*.parquet")
        return {p.name: f"{p.stat().st_ino} {p.stat().st_mtime_ns}" for p in found}

    def table(self, output: str, on_disk: bool = False) -> pa.Table:
        folder = self.folder / output
        if self.bucket is not None and not on_disk:
            folder = self.folder / f"{output}-copy"
            self.bucket.download(f"{output}/", folder)
        assert (folder / "_SUCCESS").exists(), f"{output} has no _SUCCESS"
        return ds.dataset(sorted(str(p) for p in folder.glob("part-*.parquet"))).to_table()


def rows_of(table: pa.Table) -> dict[tuple[str, int], tuple]:
    """(file, row) -> what was generated for it. Asserts that each is there once."""
    names = ("generated_text", "finish_reason", "error", "num_input_tokens", "num_generated_tokens")
    keys = list(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist(), strict=True))
    doubled = [key for key, n in Counter(keys).items() if n > 1]
    assert not doubled, f"rows that are there more than once: {doubled[:5]}"
    return dict(zip(keys, zip(*(table[name].to_pylist() for name in names), strict=True), strict=True))


def compare(expected: Mapping[tuple[str, int], tuple], got: Mapping[tuple[str, int], tuple]) -> None:
    """Assert that no row is lost, added or different."""
    assert expected.keys() == got.keys(), f"lost {sorted(expected.keys() - got.keys())[:5]}"
    different = [(key, expected[key], got[key]) for key in expected if expected[key] != got[key]]
    assert not different, f"{len(different)} rows differ, the first: {different[0]}"


def command(job: Path, rows: int, with_ray: bool = False) -> list[str]:
    ray = ["--set", "run.ray_address=local"] if with_ray else []
    return [sys.executable, "-m", "pipeline", "run", str(job), "--limit", str(rows), "--json", *ray]


def family(driver: int) -> dict[str, list[int]]:
    """The processes below the driver that may be killed, by what they are."""
    parent: dict[int, int] = {}
    words: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
            line = Path("/proc", entry, "cmdline").read_bytes()
            words[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        parent[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    # the guard, and the fork in which the run is
    found: dict[str, list[int]] = {"driver": [driver, *(p for p in parent if parent[p] == driver)]}
    for pid, line in words.items():
        above = pid
        while above and above != driver:
            above = parent.get(above, 0)
        if not above or pid == driver:
            continue
        if "pipeline.job.process.main" in line:
            found.setdefault("engine", []).append(pid)
        elif "/raylet " in line or (line.startswith("ray::") and "Agent" in line):  # they end together
            found.setdefault("node", []).append(pid)
        elif line.startswith("ray::") and "IDLE" not in line:
            found.setdefault("worker", []).append(pid)
    return found


def strike(driver: int, draw: random.Random) -> str | None:
    """Kill one process of the job, or stop it; what it was. None: there was nothing to kill any more."""
    there = family(driver)
    kind = draw.choices(list(there), [WEIGHTS[kind] for kind in there])[0]
    pid, number = draw.choice(there[kind]), signal.SIGKILL
    if kind == "driver" and draw.random() < STOPPED:
        pid, number = driver, draw.choice(STOPS)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    return kind if number == signal.SIGKILL else number.name


def run_campaign(
    place: Place, environment: Mapping[str, str], kills: int, seed: int, longest_s: float, say=lambda text: None
) -> Campaign:
    """Kill `kills` times, at most `longest_s` seconds apart, and check every finished job, one at least."""
    draw, happened = random.Random(seed), Campaign()
    say("an undisturbed run, to compare with")
    job = command(place.job("undisturbed", on_disk=True), place.rows)
    undisturbed = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, check=False)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    expected = rows_of(place.table("undisturbed", on_disk=True))
    assert len(expected) == place.rows
    while happened.rounds == 0 or happened.kills.total() < kills:
        output = f"out-{happened.rounds}"
        report = _one_job(place, output, environment, kills, draw, longest_s, happened, say)
        compare(expected, rows_of(place.table(output)))
        assert sum(report["phases_us"].values()) == report["machine_us"]
        assert report["rows"]["written"] == report["rows"]["input"] == place.rows
        happened.rounds += 1
        happened.rows += len(expected)
        happened.restarts += report["work"]["engine_restarts"]
        happened.wasted_tokens += report["work"]["wasted_generated_tokens"]
        say(f"job {happened.rounds} is finished and equal; {happened.kills.total()} kills so far")
    return happened


def _one_job(
    place: Place, output: str, env: Mapping, kills: int, draw: random.Random, longest_s: float, happened: Campaign, say
) -> dict:
    """Run one job to its end through whatever comes; its report."""
    job = place.job(output)
    standing: dict[str, str] = {}
    while True:
        with tempfile.TemporaryFile("w+") as told, tempfile.NamedTemporaryFile("w+") as complaints:
            driver = subprocess.Popen(
                command(job, place.rows, draw.choice((False, True))),
                cwd=ROOT,
                stdout=told,
                stderr=complaints,
                env={**os.environ, **env},
            )
            happened.runs += 1
            began, struck = time.monotonic(), []
            while driver.poll() is None:
                assert time.monotonic() - began < LONGEST_RUN_S, f"a run hangs; {_words(complaints)}"
                if happened.kills.total() >= kills:
                    _wait(driver, 5.0)
                elif _wait_for_moment(driver, place, output, draw, longest_s, complaints):
                    phase, kind = _phase(complaints), strike(driver.pid, draw)
                    if kind is not None:
                        struck.append(kind)
                        happened.kills[kind] += 1
                        happened.phases[phase] += 1
                        happened.parts_at_kill.append(len(place.parts(output)))
                        say(f"{time.monotonic() - began:6.1f} s, {phase}: {kind}; {happened.parts_at_kill[-1]} parts")
            happened.ended[driver.returncode] += 1
            now = place.parts(output)
            assert standing.items() <= now.items(), "a part that stood was written again or removed"
            standing = now
            if len(struck) == 1 and struck[0] in {number.name for number in STOPS}:
                assert driver.returncode in (0, 75), f"{struck} gave {driver.returncode}: {_words(complaints)}"
            if driver.returncode == 0:
                told.seek(0)
                return json.loads(told.read())
            assert driver.returncode in (-signal.SIGKILL, *RESUMABLE), f"{driver.returncode}: {_words(complaints)}"
            if driver.returncode != -signal.SIGKILL:
                say(f"a run ended with {driver.returncode}: {_reason(_words(complaints))}")


def _wait(driver: subprocess.Popen, seconds: float) -> bool:
    """Whether the driver still runs after so long."""
    try:
        driver.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wait_for_moment(
    driver: subprocess.Popen, place: Place, output: str, draw: random.Random, longest_s: float, complaints
) -> bool:
    """Wait for the next kill: soon after a new part stands, as a phase begins, or at any time. Without the first kind a
    slow machine would never get as far as a part. False: the driver has ended."""
    when = draw.random()
    if when < IN_A_PHASE:
        phase = draw.choice(PHASES)
        while _phase(complaints) != phase:
            if not _wait(driver, 0.02):
                return False
        return _wait(driver, draw.uniform(0.0, 0.5))
    if when < IN_A_PHASE + SOON_AFTER_A_PART:
        stood, deadline = len(place.parts(output)), time.monotonic() + PATIENCE_S
        while len(place.parts(output)) == stood and time.monotonic() < deadline:
            if not _wait(driver, 0.5):
                return False
        return _wait(driver, draw.uniform(0.0, longest_s / 5))
    return _wait(driver, draw.uniform(0.0, longest_s))


def _phase(complaints) -> str:
    """The first word of what the driver last said on its way; "start" before that."""
    with open(complaints.name) as said:
        lines = [line for line in said.read().splitlines() if line.strip()]
    return re.split(r"[ :]", lines[-1])[0] if lines else "start"


def _words(file) -> str:
    file.seek(0)
    return file.read()[-3000:]


def _reason(words: str) -> str:
    return next((line for line in words.splitlines() if line.startswith("Error: ")), words[-300:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--longest-s", type=float, default=30.0, help="between two kills")
    parser.add_argument("--store", choices=("disk", "s3"), default="disk")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:7.1f} s] {text}", flush=True)

    say(f"seed {options.seed}, in {folder}")
    if options.store == "disk":
        place = Place(folder, None, options.rows)
        happened = run_campaign(place, {}, options.kills, options.seed, options.longest_s, say)
    else:
        with FaultyStore(seed=options.seed, chances=BUSY) as store:
            place = Place(folder, store.bucket, options.rows)
            environment = {"PIPELINE_CACHE": str(folder / "cache")}
            happened = run_campaign(place, environment, options.kills, options.seed, options.longest_s, say)
            print(f"the store's faults: {store.told()}")
    print(happened.told())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
