"""Kill a real job at random moments, rerun and check it: `python -m tests.faults.campaign --kills 100 --store s3`.

Every few seconds a process of the running job gets SIGKILL: the driver, an engine's process, a Ray worker, or rarely
Ray's own node process; or the driver gets SIGTERM, SIGHUP or SIGINT. Each run uses Ray or not, at random. A kill can
hit any phase; the campaign waits for the short ones (planning, starting, verifying, publishing). With `--store s3` the
input, output and model are in an object store behind a proxy that loses answers, returns 503, cuts bodies and resets
connections. When the driver exits, the campaign repeats the same command. When the job is finished, it compares the
rows with those of an undisturbed run and starts a new output, until it has done all kills. It fails at the first row
that is lost, doubled or different, and at an exit code that is not documented.
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
WEIGHTS = {"driver": 50, "engine": 25, "server": 25, "worker": 20, "node": 5}
BEHAVIOUR = {"slots": 8, "seconds_per_token": 0.004, "error": {"status": 503, "every": 31},
             "truncate": {"every": 47}}  # fmt: skip
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STOPPED = 0.7  # share of the driver's kills that are one of these instead of SIGKILL
RESUMABLE = (3, 75)  # exit codes after which the same command resumes
LONGEST_RUN_S = 900.0
SOON_AFTER_A_PART, IN_A_PHASE = 0.4, 0.4  # of the kills
PHASES = ("planning", "starting", "loading", "verifying", "publishing")
PATIENCE_S = 120.0
BUSY = {"lost_put": 0.05, "slow_down": 0.05, "server_error": 0.02, "conflict": 0.02, "error_body": 0.02,
        "truncated": 0.02, "reset": 0.02, "slow": 0.02}  # fmt: skip


@dataclass
class Campaign:
    """Counts of one campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # phases at the kills
    parts_at_kill: list[int] = field(default_factory=list)
    rounds: int = 0
    rows: int = 0  # of all rounds, each found once and equal
    runs: int = 0
    ended: Counter[int] = field(default_factory=Counter)  # exit codes of the runs
    wasted_tokens: int = 0
    restarts: int = 0

    def summary(self) -> str:
        kinds = ", ".join(f"{n} of {kind}" for kind, n in sorted(self.kills.items()))
        num_parts = sorted(self.parts_at_kill) or [0]
        return (
            f"{self.kills.total()} kills ({kinds}) in {self.runs} runs of {self.rounds} jobs, while "
            f"{', '.join(f'{phase} {n}' for phase, n in self.phases.most_common())}; parts that existed at a "
            f"kill: {num_parts[0]} to {num_parts[-1]}, median {num_parts[len(num_parts) // 2]}; {self.rows} rows: "
            f"0 lost, 0 doubled, 0 different; exit codes {dict(self.ended)}; {self.restarts} engine restarts, at least "
            f"{self.wasted_tokens} generated tokens computed in vain"
        )


class JobStorage:
    """Storage of the job's input, model and outputs: a folder, or a bucket behind a faulty store."""

    def __init__(self, folder: Path, bucket: Bucket | None, rows: int, server: Mapping | None = None) -> None:
        """server: the section `server`, instead of this project's engine."""
        self.folder, self.server = folder, server
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
        """Write the job file and return its path; `on_disk` uses local folders for the same job."""
        job = yaml.safe_load((ROOT / "jobs" / "summarize.yaml").read_text())
        if on_disk or self.bucket is None:
            job["input"]["path"] = str(ROOT / "jobs" / "data")
            job["output"]["path"] = str(self.folder / output)
        else:
            job["storage_options"] = {"s3": self.bucket.storage}
            for section, name in (("input", "in"), ("model", "model"), ("output", output)):
                job[section] |= {"path": self.url(name)}
        job["engine"] = {"dtype": "float32"}
        if self.server is not None:
            del job["model"]
            job["server"] = dict(self.server)
            del job["engine"]
        # one thread: on a busy machine two would wait for each other at every step
        job["output"]["rows_per_file"] = 16
        job["run"] = {"window_rows": 256, "cpus_per_actor": 1, "drain_timeout": "5 s"}
        path = self.folder / f"{output}.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML; yaml.dump would write repeated objects as references
        return path

    def parts(self, output: str) -> dict[str, str]:
        """Return each part's name -> its version: an entity tag, or its inode and modification time."""
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
    """Return (file, row) -> the row's results. Assert that each row exists once."""
    names = ("generated_text", "finish_reason", "error", "num_input_tokens", "num_generated_tokens")
    keys = list(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist(), strict=True))
    doubled = [key for key, n in Counter(keys).items() if n > 1]
    assert not doubled, f"duplicate rows: {doubled[:5]}"
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
    """Return the processes of the driver's tree that may be killed, by kind."""
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
    # the guard, and its fork, which runs the job
    found: dict[str, list[int]] = {"driver": [driver, *(p for p in parent if parent[p] == driver)]}
    for pid, line in words.items():
        above = pid
        while above and above != driver:
            above = parent.get(above, 0)
        if not above or pid == driver:
            continue
        if "process_group.py" in line or "tests.endpoint.fake_server" in line:
            found.setdefault("server", []).append(pid)
        elif "pipeline.job.process.main" in line:
            found.setdefault("engine", []).append(pid)
        elif "/raylet " in line or (line.startswith("ray::") and "Agent" in line):  # they end together
            found.setdefault("node", []).append(pid)
        elif line.startswith("ray::") and "IDLE" not in line:
            found.setdefault("worker", []).append(pid)
    return found


def strike(driver: int, draw: random.Random) -> str | None:
    """Kill or stop one process of the job; return its kind or the signal, or None if it had already ended."""
    processes = family(driver)
    kind = draw.choices(list(processes), [WEIGHTS[kind] for kind in processes])[0]
    pid, number = draw.choice(processes[kind]), signal.SIGKILL
    if kind == "driver" and draw.random() < STOPPED:
        pid, number = driver, draw.choice(STOPS)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    return kind if number == signal.SIGKILL else number.name


def run_campaign(
    storage: JobStorage, environment: Mapping[str, str], kills: int, seed: int, longest_s: float, log=lambda text: None
) -> Campaign:
    """Kill `kills` times, up to `longest_s` seconds apart, and check every finished job, at least one."""
    draw, campaign = random.Random(seed), Campaign()
    log("an undisturbed run, to compare with")
    job = command(storage.job("undisturbed", on_disk=True), storage.rows)
    undisturbed = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, check=False)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    expected = rows_of(storage.table("undisturbed", on_disk=True))
    assert len(expected) == storage.rows
    while campaign.rounds == 0 or campaign.kills.total() < kills:
        output = f"out-{campaign.rounds}"
        report = _one_job(storage, output, environment, kills, draw, longest_s, campaign, log)
        compare(expected, rows_of(storage.table(output)))
        assert sum(report["phases_us"].values()) == report["machine_us"]
        assert report["rows"]["written"] == report["rows"]["input"] == storage.rows
        campaign.rounds += 1
        campaign.rows += len(expected)
        campaign.restarts += report["work"]["engine_restarts"]
        campaign.wasted_tokens += report["work"]["wasted_generated_tokens"]
        log(f"job {campaign.rounds} is finished and equal; {campaign.kills.total()} kills so far")
    return campaign


def _one_job(
    storage: JobStorage,
    output: str,
    env: Mapping,
    kills: int,
    draw: random.Random,
    longest_s: float,
    campaign: Campaign,
    log,
) -> dict:
    """Run one job to its end through all kills; return its report."""
    job = storage.job(output)
    existing: dict[str, str] = {}
    while True:
        with tempfile.TemporaryFile("w+") as stdout, tempfile.NamedTemporaryFile("w+") as stderr:
            driver = subprocess.Popen(
                command(job, storage.rows, draw.choice((False, True))),
                cwd=ROOT,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **env},
            )
            campaign.runs += 1
            began, struck = time.monotonic(), []
            while driver.poll() is None:
                assert time.monotonic() - began < LONGEST_RUN_S, f"a run hangs; {_tail(stderr)}"
                if campaign.kills.total() >= kills:
                    _wait(driver, 5.0)
                elif _wait_for_moment(driver, storage, output, draw, longest_s, stderr):
                    phase, kind = _phase(stderr), strike(driver.pid, draw)
                    if kind is not None:
                        struck.append(kind)
                        campaign.kills[kind] += 1
                        campaign.phases[phase] += 1
                        campaign.parts_at_kill.append(len(storage.parts(output)))
                        log(f"{time.monotonic() - began:6.1f} s, {phase}: {kind}; {campaign.parts_at_kill[-1]} parts")
            campaign.ended[driver.returncode] += 1
            now = storage.parts(output)
            assert existing.items() <= now.items(), "an existing part was rewritten or removed"
            existing = now
            if len(struck) == 1 and struck[0] in {number.name for number in STOPS}:
                assert driver.returncode in (0, 75), f"{struck} gave {driver.returncode}: {_tail(stderr)}"
            if driver.returncode == 0:
                stdout.seek(0)
                return json.loads(stdout.read())
            assert driver.returncode in (-signal.SIGKILL, *RESUMABLE), f"{driver.returncode}: {_tail(stderr)}"
            if driver.returncode != -signal.SIGKILL:
                log(f"a run ended with {driver.returncode}: {_reason(_tail(stderr))}")


def _wait(driver: subprocess.Popen, seconds: float) -> bool:
    """Wait up to `seconds`; return True if the driver still runs."""
    try:
        driver.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wait_for_moment(
    driver: subprocess.Popen, storage: JobStorage, output: str, draw: random.Random, longest_s: float, stderr
) -> bool:
    """Wait for the next kill: soon after a new part is written, when a phase begins, or at any time. Without the first
    kind, a slow machine would never get as far as a part. Return False if the driver has ended."""
    when = draw.random()
    if when < IN_A_PHASE:
        phase = draw.choice(PHASES)
        while _phase(stderr) != phase:
            if not _wait(driver, 0.02):
                return False
        return _wait(driver, draw.uniform(0.0, 0.5))
    if when < IN_A_PHASE + SOON_AFTER_A_PART:
        num_parts, deadline = len(storage.parts(output)), time.monotonic() + PATIENCE_S
        while len(storage.parts(output)) == num_parts and time.monotonic() < deadline:
            if not _wait(driver, 0.5):
                return False
        return _wait(driver, draw.uniform(0.0, longest_s / 5))
    return _wait(driver, draw.uniform(0.0, longest_s))


def _phase(stderr) -> str:
    """Return the first word of the driver's last progress line, or "start" if there is none."""
    with open(stderr.name) as file:
        lines = [line for line in file.read().splitlines() if line.strip()]
    return re.split(r"[ :]", lines[-1])[0] if lines else "start"


def _tail(file) -> str:
    file.seek(0)
    return file.read()[-3000:]


def _reason(words: str) -> str:
    return next((line for line in words.splitlines() if line.startswith("Error: ")), words[-300:])


def fake_server() -> dict:
    """Return a section `server` that starts a fake server, which rejects some requests and cuts some answers."""
    serve = [sys.executable, "-m", "tests.endpoint.fake_server", "--model", "{model}"]
    return {"serve": [*serve, "--behaviour", json.dumps(BEHAVIOUR)], "model": "fake"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--longest-s", type=float, default=30.0, help="maximum time between two kills")
    parser.add_argument("--store", choices=("disk", "s3"), default="disk")
    parser.add_argument("--server", action="store_true", help="rows are computed by a fake server, also killed")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"[{time.monotonic() - began:7.1f} s] {text}", flush=True)

    log(f"seed {options.seed}, in {folder}")
    if options.store == "disk":
        storage = JobStorage(folder, None, options.rows, fake_server() if options.server else None)
        campaign = run_campaign(storage, {}, options.kills, options.seed, options.longest_s, log)
    else:
        with FaultyStore(seed=options.seed, chances=BUSY) as store:
            storage = JobStorage(folder, store.bucket, options.rows)
            environment = {"PIPELINE_CACHE": str(folder / "cache")}
            campaign = run_campaign(storage, environment, options.kills, options.seed, options.longest_s, log)
            print(f"the store's faults: {store.fault_counts()}")
    print(campaign.summary())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
