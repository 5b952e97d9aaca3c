"""Run jobs under kills and changes, and check every row: `python -m tests.faults.campaign --kills 500 --rows 1000000`.

Each job has thousands of rows and an engine whose answer is a hash of the row's text (`fakes`), so that a right answer
is known without an undisturbed run. The job is the real command, in processes of its own, with threads, Ray, a Ray
cluster of four nodes, an S3 store behind a proxy that fails, or a server. A job is a list of turns. In each turn a
change is made, as in CHANGES, the command is started, and processes are struck: killed, stopped by a signal, or paused.
A failpoint can kill the driver at an exact point. Then the same command is repeated.

If a run refuses its output with exit code 2, the campaign undoes the change, as the message says, and continues. At
the end of each job every row of the input must be in the output once with the right answer, or as an error row if its
row group was damaged; `_SUCCESS` must exist, `pipeline verify --deep` must find nothing, and the report's accounts
must add up. No run may rewrite or remove a part or exit with an undocumented code.

All draws follow from --seed; the moments of the kills follow from the machine too. --job N plays one job again.
"""

import argparse
import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipeline.data.output.parts import PartStore
from pipeline.job.output.audit import audit
from tests.endpoint.fake_server import answer_text
from tests.faults.disk import Disk
from tests.faults.driver import CUTS
from tests.faults.fakes import answer
from tests.faults.processes import alive, choose, family, pause, send
from tests.faults.store import Bucket, FaultyStore

ROOT = Path(__file__).parents[2]
RESUMABLE = (3, 75)  # exit codes after which the same command resumes
KILLED = -signal.SIGKILL
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LONGEST_RUN_S, LONGEST_STOP_S, LONGEST_END_S = 600.0, 90.0, 60.0
DRAIN_S = 3
PATIENCE_S = 60.0  # wait for a new part

CHANGES = {
    "other cut": "an upgrade cuts the input into other units; later the old version runs again",
    "new cut version": "an upgrade says that it cuts the input into other units; later the old version runs again",
    "damage": "bytes of a data page are overwritten",
    "repair": "all damaged files are restored from a backup",
    "another file": "a file is replaced by one with other rows; later the file is restored",
    "append": "a file is added, and --append is given",
    "other limit": "--limit has another value; later the first one again",
    "two runs": "the same command runs twice at the same time",
    "full disk": "a write fails because the disk is full",
    "jumping clock": "each reading of the wall clock is years off",
}
OTHER_CODE = ("other cut", "new cut version")
REFUSED = ("new cut version", "another file", "other limit")  # the run must exit with 2
UNSTRUCK = (*REFUSED, "other cut")  # runs to their own end
POINTS = ("part.serialized", "part.synced", "part.linked", "part.dir_synced", "file.synced", "file.linked")
STORE_POINTS = ("part.serialized", "part.linked")

SETUPS = ("threads",) * 3 + ("ray",) + ("threads",) * 3 + ("s3",) + ("threads",) * 3 + ("server", "threads", "nodes")
ROWS = {"threads": (16_000, 40_000), "ray": (8_000, 16_000), "nodes": (8_000, 12_000), "s3": (3_000, 6_000),
        "server": (1_500, 3_000)}  # fmt: skip
LONGEST_WAIT_S = {"threads": 5.0, "ray": 20.0, "nodes": 15.0, "s3": 8.0, "server": 8.0}
VICTIMS = {"threads": ("any", "engine"), "ray": ("any", "engine", "worker", "node"), "s3": ("any", "engine"),
           "nodes": ("any", "engine", "worker", "node", "node"), "server": ("any", "engine", "server")}  # fmt: skip
EARLY_PHASES, LATE_PHASES = ("planning", "starting", "loading", "running"), ("verifying", "publishing", "finished")
BUSY = {"lost_put": 0.03, "slow_down": 0.03, "server_error": 0.02, "conflict": 0.02, "error_body": 0.02,
        "truncated": 0.02, "reset": 0.02, "slow": 0.02}  # fmt: skip
BEHAVIOUR = {"slots": 64, "error": {"status": 503, "every": 97}, "truncate": {"every": 131}}
NODE: dict[str, Any] = {
    "num_cpus": 2,
    "num_gpus": 1,
    "object_store_memory": 100 * 2**20,
}  # room for one actor and one reader


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A signal to a process, or a pause (number None). when: "any", "part" (after the next new part), or a phase;
    delay_s: from then on."""

    when: str
    delay_s: float
    victim: str = "any"
    number: signal.Signals | None = signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A change and a run. cut: of "other cut". failpoint: where the driver is killed, as `name=action@n`."""

    change: str = ""
    cut: str = "another order"
    strikes: tuple[Strike, ...] = ()
    failpoint: str = ""
    with_ray: bool = False


@dataclass(frozen=True, kw_only=True)
class JobDraw:
    """Everything about a job that is drawn in advance."""

    seed: str
    setup: str  # of SETUPS
    num_rows: int
    turns: tuple[Turn, ...]
    num_files: int = 4
    group_rows: int = 1000
    window_rows: int = 8000
    rows_per_file: int = 500
    seconds_per_step: float = 0.0
    on_corrupt: str = "skip"


def draw_job(seed: int, index: int, num_turns: int, without: tuple[str, ...] = ()) -> JobDraw:
    """Draw job `index` of a campaign."""
    draw, setup = random.Random(f"{seed} {index}"), SETUPS[index % len(SETUPS)]
    if setup in ("ray", "nodes"):  # which take long to start
        num_turns = max(3, num_turns // 2)
    others = [name for name in CHANGES if name not in ("damage", "repair", "other cut")]
    draw.shuffle(others)
    changes = ["damage", *others[: num_turns // 2]]
    changes.insert(draw.randint(1, 2), "repair")
    changes.insert(draw.randint(0, 2), "other cut")
    if draw.random() < 0.5:
        changes += ["damage", "repair"]
    if setup == "nodes":  # their drivers share one cluster
        changes = [name for name in changes if name != "two runs"]
    turns = []
    for i in range(num_turns):
        # before a run can finish the job, and only then, the changes are due
        change = changes.pop(0) if changes and draw.random() < (0.5 if i else 0.0) + 0.2 else ""
        turn = _draw_turn(draw, setup, change, is_late=i >= num_turns - 2)
        cut = draw.choice([cut for cut in CUTS if cut != "another version"])
        turns.append(dataclasses.replace(turn, change="" if change in without else change, cut=cut))
    return JobDraw(
        seed=f"{seed} {index}",
        setup=setup,
        num_rows=draw.randint(*ROWS[setup]),
        turns=tuple(turns),
        num_files=draw.randint(2, 6),
        group_rows=draw.choice((300, 700, 1500)),
        window_rows=draw.choice((2500, 5000, 10_000)),
        rows_per_file=draw.choice((200, 500)),
        seconds_per_step=draw.choice((0.0, 0.01, 0.03)),
        on_corrupt="skip" if draw.random() < 0.8 else "fail",
    )


def _draw_turn(draw: random.Random, setup: str, change: str, is_late: bool) -> Turn:
    with_ray = setup == "nodes" or (setup == "ray" and draw.random() < 0.7)
    if not with_ray and draw.random() < 0.15:
        point = draw.choice(STORE_POINTS if setup == "s3" else POINTS)
        return Turn(change=change, failpoint=f"{point}=kill@{draw.randint(1, 8)}")
    strikes = [_draw_strike(draw, setup, is_late) for _ in range(draw.choice((0, 0, 1, 2)))]
    last = _draw_strike(draw, setup, is_late)
    number = draw.choice(STOPS) if draw.random() < 0.35 else signal.SIGKILL
    strikes.append(dataclasses.replace(last, victim="driver", number=number))
    return Turn(change=change, strikes=tuple(strikes), with_ray=with_ray)


def _draw_strike(draw: random.Random, setup: str, is_late: bool) -> Strike:
    victim, number = draw.choice(VICTIMS[setup]), None if draw.random() < 0.12 else signal.SIGKILL
    kind = draw.random()
    if is_late:
        when, delay_s = draw.choice(LATE_PHASES[:2]), draw.uniform(0.0, 0.2)
    elif kind < 0.35:
        when, delay_s = draw.choice(EARLY_PHASES), draw.uniform(0.0, 0.5)
    elif kind < 0.85:
        when, delay_s = "part", draw.uniform(0.0, 0.5)
    else:
        when, delay_s = "any", draw.uniform(0.0, LONGEST_WAIT_S[setup])
    return Strike(when=when, delay_s=delay_s, victim=victim, number=number)


@dataclass
class Figures:
    """Counts of a campaign, or of one of its jobs."""

    jobs: Counter[str] = field(default_factory=Counter)  # by setup
    rows: int = 0  # checked at the end of their jobs
    error_rows: int = 0
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)  # and signals, by victim
    pauses: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # at the kills
    parts_at_kill: list[int] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by change
    ended: Counter[int] = field(default_factory=Counter)  # exit codes of the runs
    engine_restarts: int = 0
    nodes_lost: int = 0
    longest_stop_s: float = 0.0
    store_faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Figures") -> None:
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name == "longest_stop_s" else mine + theirs)

    def text(self) -> str:
        parts = sorted(self.parts_at_kill) or [0]
        lines = [
            f"jobs: {self.jobs.total()} ({_counts(self.jobs)}), {self.runs} runs, exit codes {_counts(self.ended)}",
            f"rows: {self.rows:,}, each once and right; {self.error_rows:,} of them error rows of damaged row groups",
            f"kills: {self.kills.total()} ({_counts(self.kills)})",
            f"paused: {_counts(self.pauses)}",
            f"phases at the kills: {_counts(self.phases)}",
            f"parts at the kills: {parts[0]} to {parts[-1]}, median {parts[len(parts) // 2]}",
            f"changes: {_counts(self.changes)}",
            f"refused with exit code 2, then undone: {_counts(self.refused)}",
            f"engines restarted: {self.engine_restarts}, nodes lost: {self.nodes_lost}, longest stop by a signal: "
            f"{self.longest_stop_s:.1f} s",
            f"faults of the store: {_counts(self.store_faults)}",
        ]
        return "\n".join(lines)


def _counts(counter: Counter) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counter.most_common()) or "none"


class Run:
    """One process of the command."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        stderr, self._stderr = tempfile.mkstemp(dir=folder, suffix=".stderr")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, **env}
        )
        os.close(stderr)
        self.began_s = time.monotonic()
        self.struck: list[str] = []
        self.stopped_s: float | None = None  # time of the first signal that stops it
        self.children: set[int] = set()  # engines and servers

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return True if it still runs."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def messages(self) -> str:
        return Path(self._stderr).read_text(errors="replace")

    def phase(self) -> str:
        """Return the phase of the last progress line, or "start" if there is none."""
        words = [re.split(r"[ :]", line)[0] for line in self.messages().splitlines()]
        return next((word for word in reversed(words) if word in (*EARLY_PHASES, *LATE_PHASES)), "start")

    def reason(self) -> str:
        lines = self.messages().splitlines()
        return next((line for line in lines if line.startswith("Error: ")), "\n".join(lines[-30:]))

    def end(self) -> int:
        """Wait for the end of the process and of its children; return the exit code."""
        limit_s = LONGEST_RUN_S if self.stopped_s is None else LONGEST_STOP_S
        assert not self.wait(limit_s), f"a run does not end: {self.messages()[-2000:]}"
        deadline = time.monotonic() + LONGEST_END_S
        while left := alive(self.children, ("engine", "server")):
            assert time.monotonic() < deadline, f"processes outlive their run: {left}"
            time.sleep(0.05)
        return self.process.returncode


class PlayedJob:
    """A job while it is played: its input, its output, and what was changed."""

    def __init__(self, job: JobDraw, folder: Path, log=print) -> None:
        self.job, self.folder, self.log = job, folder, log
        self.draw = random.Random(f"{job.seed} played")
        self.figures = Figures()
        self.cluster: Any = None
        self.bucket: Bucket | None = None
        self.files: dict[str, bytes] = {}  # undamaged
        self.texts: dict[str, list[str]] = {}
        self.damaged: set[str] = set()  # files
        self.once_damaged: set[tuple[str, int]] = set()  # row groups
        self.patches: dict[str, Any] = {}
        self.options: list[str] = []
        self.is_appended = False
        self.parts: dict[str, str] = {}

    # -- the job's files

    def begin(self, stack: ExitStack) -> None:
        self.files_at: Disk | Bucket = Disk(self.folder)
        storage: dict[str, Any] = {}
        if self.job.setup == "s3":
            self.store = stack.enter_context(FaultyStore(seed=self.draw.randrange(1 << 30), chances=BUSY))
            self.files_at = self.bucket = self.store.bucket
            storage = {"storage_options": {"s3": dict(self.store.bucket.storage)}}
        if self.job.setup == "nodes":
            self.cluster = _cluster(stack)
        for i in range(self.job.num_files):
            self._add_file(f"f{i}.parquet", self.job.num_rows // self.job.num_files)
        is_server = self.job.setup == "server"
        model = Disk(self.folder)
        model.put("model/config.json", json.dumps({"seconds_per_step": self.job.seconds_per_step}).encode())
        model.put("model/tokenizer.json", b"{}")
        serve = [sys.executable, "-m", "tests.endpoint.fake_server", "--model", "{model}"]
        engine = {"model": {"path": model.url("model")}, "engine": {"device": "cpu"}}
        server = {"server": {"serve": [*serve, "--behaviour", json.dumps(BEHAVIOUR)], "model": "fake"}}
        run = {"window_rows": self.job.window_rows, "max_error_rate": 1.0, "drain_timeout": f"{DRAIN_S} s",
               "cpus_per_actor": 1}  # fmt: skip
        if self.job.setup == "ray":
            run["actors"] = 2
        if self.job.setup == "nodes":
            run |= {"actors": 3, "gpus_per_actor": 1}
        settings = {
            "input": {"path": self.files_at.url("in"), "on_corrupt": self.job.on_corrupt},
            "prompt": {"template": "{text}"},
            "sampling": {"max_tokens": 16, "temperature": 0.0},
            "output": {"path": self.files_at.url("out"), "rows_per_file": self.job.rows_per_file},
            "run": run,
            **(server if is_server else engine),
            **storage,
        }
        (self.folder / "job.yaml").write_text(json.dumps(settings))

    def _add_file(self, name: str, num_rows: int) -> None:
        self.texts[name] = list(_texts(f"{self.job.seed} {name}", num_rows))
        self.files[name] = _parquet(self.texts[name], self.job.group_rows)
        self.files_at.put(f"in/{name}", self.files[name])

    def _restore(self) -> None:
        """Undo all changes of the input files."""
        for name in self.damaged:
            self.files_at.put(f"in/{name}", self.files[name])
        self.damaged.clear()

    def _parts(self) -> dict[str, str]:
        return {name: tag for name, tag in self.files_at.tags("out/").items() if name.startswith("part-")}

    # -- changes

    def _change(self, turn: Turn) -> str:
        """Make the turn's change; return its name, or "" if it cannot be made now."""
        name = turn.change
        has_claimed = "_pipeline/job.json" in self.files_at.tags("out/")
        if name in UNSTRUCK and not has_claimed:
            return ""
        match name:
            case "other cut":
                self.patches["cut"] = turn.cut
            case "new cut version":
                self.patches["cut"] = "another version"
            case "damage":
                self._damage()
            case "repair":
                self._restore()
            case "another file":
                file = self.draw.choice(sorted(set(self.files) - self.damaged) or sorted(self.files))
                texts = list(_texts(f"{self.job.seed} another", len(self.texts[file]) - 1))
                self.files_at.put(f"in/{file}", _parquet(texts, self.job.group_rows))
                self.damaged.add(file)
            case "append" if not self.is_appended:
                self.is_appended = True
                self._add_file("e-appended.parquet", self.job.num_rows // 8)
            case "other limit":
                self.options = ["--limit", str(self.draw.randrange(1, self.job.num_rows // 2))]
            case "jumping clock":
                self.patches["clock"] = self.draw.randrange(1 << 30)
            case "append":
                return ""
        return name

    def _damage(self) -> None:
        """Overwrite some bytes of a row group's page; size and footer stay the same."""
        name = self.draw.choice(sorted(self.files))
        metadata = pq.read_metadata(io.BytesIO(self.files[name]))
        group = self.draw.randrange(metadata.num_row_groups)
        column = metadata.row_group(group).column(0)
        middle = column.data_page_offset + column.total_compressed_size // 2
        data = bytearray(self.files_at.get(f"in/{name}"))
        data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
        self.files_at.put(f"in/{name}", bytes(data))
        self.damaged.add(name)
        self.once_damaged.add((name, group))

    # -- runs

    def _start(self, turn: Turn, change: str) -> Run:
        patches = {"ray": turn.with_ray and change not in UNSTRUCK, **self.patches}
        if self.job.setup == "nodes" and "cut" not in patches:
            patches["ray"] = True
        env = {"CAMPAIGN_PATCHES": json.dumps(patches), "PIPELINE_CACHE": str(self.folder / "cache")}
        failpoint = turn.failpoint
        if change == "full disk":
            failpoint = f"part.serialized=enospc@{self.draw.randint(1, 5)}"
        if failpoint:
            env |= {"PIPELINE_ALLOW_FAILPOINTS": "1", "PIPELINE_FAILPOINTS": failpoint}
        options = [*self.options, *(["--append"] if self.is_appended else [])]
        if self.job.setup == "nodes":
            env["RAY_ADDRESS"] = self.cluster.address
        elif patches["ray"] and self.job.setup == "ray":
            env["RAY_ADDRESS"] = "local"
        job = str(self.folder / "job.yaml")
        command = [sys.executable, "-m", "tests.faults.driver", "run", job, "--json", *options]
        self.figures.runs += 1
        return Run(command, env, self.folder)

    def play(self, turn: Turn) -> bool:
        """Play a turn; return True if the job is finished afterwards."""
        change = self._change(turn)
        if change:
            self.figures.changes[change] += 1
            self.log(f"change: {change}")
        runs = [self._start(turn, change) for _ in range(2 if change == "two runs" else 1)]
        for strike in () if change in UNSTRUCK else turn.strikes:
            self._strike(self.draw.choice(runs), strike)
        codes = [run.end() for run in runs]
        self.figures.ended.update(codes)
        now = self._parts()
        lost = [name for name, tag in self.parts.items() if now.get(name) != tag]
        assert not lost, f"existing parts were rewritten or removed: {lost[:5]}"
        assert change not in REFUSED or now == self.parts, "a refused run wrote parts"
        self.parts = now
        for run, code in zip(runs, codes, strict=True):
            self._check_end(run, code, turn, change)
        self.patches, self.options = {}, []
        if 2 in codes and change not in ("other limit", *OTHER_CODE):
            self._restore()
        return codes[0] == 0 and change not in UNSTRUCK

    def _check_end(self, run: Run, code: int, turn: Turn, change: str) -> None:
        """Assert that the exit code is right for what happened."""
        shown = f"exit code {code} after {change or 'no change'} and {run.struck or 'no strike'}: {run.reason()}"
        if change in REFUSED:
            assert code == 2, shown
        if code == 2:
            assert change in UNSTRUCK or self.damaged, shown
            self.figures.refused[change or "damage"] += 1
            self.log(f"refused: {run.reason()[:300]}")
            return
        if -code in STOPS and run.phase() == "start":  # it came before Python handled signals
            return
        assert code in (0, KILLED, *RESUMABLE), shown
        if run.stopped_s is not None:
            self.figures.longest_stop_s = max(self.figures.longest_stop_s, time.monotonic() - run.stopped_s)
        names = {number.name for number in STOPS}
        if run.struck and all(kind in names for kind in run.struck) and change != "full disk":
            assert code in (0, 75, 3 if change == "two runs" else 0), shown
        if turn.failpoint and code == 3 and "killed by SIGKILL" in run.messages():
            self._count_kill(f"driver at {turn.failpoint.partition('=')[0]}", run.phase(), len(self.parts))
        elif not run.struck and not turn.with_ray and change not in ("full disk", "two runs"):
            assert code == 0, shown  # Ray may not start in time on a busy machine
        if code == 3 and not run.struck and not turn.failpoint:
            self.log(f"ended with 3: {run.reason()[:200]}")

    def _strike(self, run: Run, strike: Strike) -> None:
        if not self._wait_for(run, strike):
            return
        found = family([run.process.pid])
        run.children.update(found.get("engine", []) + found.get("server", []))
        if self.cluster is not None:
            found |= family(node.all_processes["raylet"][0].process.pid for node in self.cluster.worker_nodes)
        phase, chosen = run.phase(), choose(found, strike.victim, self.draw)
        if chosen is None:
            return
        kind, pid = chosen
        if strike.number is None:
            if pause(pid, self.draw.uniform(0.2, 3.0)):
                self.figures.pauses[kind] += 1
            return
        if strike.number in STOPS:
            kind, pid, run.stopped_s = strike.number.name, run.process.pid, run.stopped_s or time.monotonic()
        if kind == "node" and self.cluster is not None:
            self._lose_node()
        elif not send(pid, strike.number):
            return
        run.struck.append(kind)
        self._count_kill(kind, phase, len(self._parts()))

    def _lose_node(self) -> None:
        self.cluster.remove_node(self.draw.choice(sorted(self.cluster.worker_nodes, key=id)), allow_graceful=False)
        self.cluster.add_node(**NODE)

    def _count_kill(self, kind: str, phase: str, num_parts: int) -> None:
        self.figures.kills[kind] += 1
        self.figures.phases[phase] += 1
        self.figures.parts_at_kill.append(num_parts)
        self.log(f"kill: {kind} while {phase}, {num_parts} parts")

    def _wait_for(self, run: Run, strike: Strike) -> bool:
        """Wait for the moment of a strike; return False if the run has ended."""
        poll_s = 0.02 if self.bucket is None else 0.2
        if strike.when == "part":
            num_parts, deadline = len(self._parts()), time.monotonic() + PATIENCE_S
            while len(self._parts()) == num_parts and time.monotonic() < deadline:
                if not run.wait(poll_s):
                    return False
        elif strike.when != "any":
            phases = [*EARLY_PHASES, *LATE_PHASES]
            later = phases[phases.index(strike.when) :]
            while run.phase() not in later:
                if not run.wait(0.02):
                    return False
        return run.wait(strike.delay_s)

    # -- the end

    def check(self) -> None:
        """Check every row, `_SUCCESS`, the audit and the report."""
        assert "_SUCCESS" in self.files_at.tags("out/"), "no _SUCCESS"
        folder = self.folder / "out"
        if self.bucket is not None:
            self.store.proxy.calm()
            self.bucket.download("out/", folder)
            self.figures.store_faults.update(self.store.proxy.done)
        table = ds.dataset(sorted(map(str, folder.glob("part-*.parquet")))).to_table()
        self.check_rows(table)
        storage = self.bucket.storage if self.bucket is not None else None
        found = audit(PartStore(self.files_at.url("out"), storage), deep=True, log=lambda text: None)
        assert found.sound, found.to_text()
        report = json.loads((folder / "_pipeline" / "report.json").read_text())
        success = json.loads((folder / "_SUCCESS").read_text())
        errors = sum(error is not None for error in table["error"].to_pylist())
        rows = report["rows"]
        assert sum(report["phases_us"].values()) == report["machine_us"]
        assert rows["input"] == rows["written"] == table.num_rows == success["input_rows"], rows
        assert (rows["errors"], rows["completed"]) == (errors, table.num_rows - errors), rows
        for key, column in (("input", "num_input_tokens"), ("generated", "num_generated_tokens")):
            completed = [n for n, error in zip(table[column].to_pylist(), table["error"].to_pylist()) if error is None]
            assert report["tokens"][key] == sum(completed), key
        self.figures.jobs[self.job.setup] += 1
        self.figures.rows += table.num_rows
        self.figures.error_rows += errors
        self.figures.engine_restarts += report["work"]["engine_restarts"]
        self.figures.nodes_lost += report["work"]["nodes_lost"]

    def check_rows(self, table: pa.Table) -> None:
        right = answer if self.job.setup != "server" else lambda text: answer_text(text, 16)
        names = ("source_file", "source_row", "generated_text", "error")
        found = list(zip(*(table[name].to_pylist() for name in names), strict=True))
        keys = Counter((file, row) for file, row, _, _ in found)
        expected = {(file, row) for file, texts in self.texts.items() for row in range(len(texts))}
        lost, doubled = sorted(expected - keys.keys()), [key for key, n in keys.items() if n > 1]
        assert not lost, f"{len(lost)} rows lost, the first {lost[:3]}; {len(doubled)} doubled"
        assert not doubled, f"{len(doubled)} rows doubled, the first {doubled[:3]}"
        assert keys.keys() == expected, f"unknown rows: {sorted(keys.keys() - expected)[:3]}"
        wrong = []
        for file, row, text, error in found:
            if error == "corrupt_input" and (file, row // self.job.group_rows) in self.once_damaged:
                continue
            if error is not None or text != right(self.texts[file][row]):
                wrong.append((file, row, text, error))
        assert not wrong, f"{len(wrong)} rows are wrong, the first {wrong[:3]}"


def _texts(seed: str, num_rows: int) -> Iterator[str]:
    """Yield row texts of many lengths. Many rows share a short prefix, and none a long one."""
    draw = random.Random(seed)
    mark = hashlib.sha256(seed.encode()).hexdigest()[:8]
    for row in range(num_rows):
        yield f"{draw.randrange(30):02d} is the topic of {mark} {row}" + " word" * draw.randrange(9)


def _parquet(texts: list[str], group_rows: int) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": texts})
    pq.write_table(table, sink, row_group_size=group_rows, write_page_checksum=True, use_dictionary=False)
    return sink.getvalue()


def _cluster(stack: ExitStack) -> Any:
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112 - two jobs and what they run on may keep the machine busy
    head = {"num_cpus": 0, "object_store_memory": 100 * 2**20, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": quick})
    stack.callback(cluster.shutdown)
    for _ in range(3):
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    return cluster


def play_job(job: JobDraw, log=print) -> Figures:
    """Play all turns of a job, finish it and check it. Its folder is kept if a check fails."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    played = PlayedJob(job, folder, log)
    log(f"{job.setup}, {job.num_rows:,} rows, on_corrupt {job.on_corrupt}, in {folder}")
    with ExitStack() as stack:
        played.begin(stack)
        is_finished = False
        for turn in job.turns:
            if not is_finished or turn.change == "append":
                is_finished = played.play(turn)
        last = Turn(with_ray=any(turn.with_ray for turn in job.turns))
        for _ in range(3):  # refused because of damage, and perhaps by a store
            if played.play(last):
                break
        played.check()
    log(f"finished and right: {_counts(played.figures.kills)}")
    shutil.rmtree(folder)
    return played.figures


def _play_logged(job: JobDraw, index: int, began_s: float) -> Figures | str:
    """Play a job in a process of its own; return its figures, or why it failed."""

    def log(text: str) -> None:
        print(f"[{time.time() - began_s:7.1f} s] job {index}: {text}", flush=True)

    try:
        return play_job(job, log)
    except Exception:
        log(f"FAILED\n{traceback.format_exc()}")
        return traceback.format_exc()


def run_campaign(options: argparse.Namespace) -> tuple[Figures, dict[int, str]]:
    """Play jobs until there are enough rows and kills; return the figures and the failed jobs."""
    began_s, figures, failed, index = time.time(), Figures(), {}, 0
    planned_rows = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.at_once, mp_context=spawn, max_tasks_per_child=1) as pool:
        open_jobs: dict[Future[Figures | str], int] = {}
        while True:
            is_late = time.time() - began_s > 60 * options.minutes
            while len(open_jobs) < options.at_once and not is_late:
                if planned_rows >= options.rows and figures.kills.total() + 4 * len(open_jobs) >= options.kills:
                    break
                job = draw_job(options.seed, index, options.turns, tuple(options.without))
                planned_rows += job.num_rows
                open_jobs[pool.submit(_play_logged, job, index, began_s)] = index
                index += 1
            if not open_jobs:
                return figures, failed
            for future in wait(open_jobs, return_when=FIRST_COMPLETED).done:
                number, result = open_jobs.pop(future), future.result()
                if isinstance(result, Figures):
                    figures.add(result)
                else:
                    failed[number] = result
            print(f"[{time.time() - began_s:7.1f} s] {figures.jobs.total()} jobs, {figures.rows:,} rows, "
                  f"{figures.kills.total()} kills, {len(failed)} failed", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="in all jobs together, at least")
    parser.add_argument("--kills", type=int, default=50, help="in all jobs together, at least")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=1e9, help="start no more jobs after this time")
    parser.add_argument("--turns", type=int, default=14, help="of each job")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at the same time")
    parser.add_argument("--without", action="append", default=[], choices=list(CHANGES), help="a change to leave out")
    parser.add_argument("--job", type=int, help="play only this job of the seed")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.job is not None:
        job = draw_job(options.seed, options.job, options.turns, tuple(options.without))
        result = _play_logged(job, options.job, time.time())
        figures, failed = (result, {}) if isinstance(result, Figures) else (Figures(), {options.job: result})
    else:
        figures, failed = run_campaign(options)
    print(figures.text())
    for index, reason in failed.items():
        print(f"job {index} failed (--seed {options.seed} --job {index}): {reason.strip().splitlines()[-1]}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
