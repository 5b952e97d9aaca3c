"""A job on the real engine whose rows reason within budgets and have several samples as rows, killed in its middle."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.job.running.run import run_job
from tests.faults.campaign import family
from tests.job.conftest import runs, success
from tests.job.row.test_reasoning import MARKERS, PROMPTS, configured

ROOT = Path(__file__).parents[3]


def test_rows_of_a_job_whose_driver_and_engine_are_killed_are_those_of_an_undisturbed_run(job):
    """First the driver is killed when some units are written, then, as the job goes on, its engine's process."""
    prompts = PROMPTS * 3
    budgets = [(None, 0, 2, 5, 500)[i % 5] for i in range(len(prompts))]
    table = pa.table({"id": range(len(prompts)), "text": prompts, "most": budgets})
    pq.write_table(table, job.folder / "in" / "f.parquet")
    job.settings["run"] |= {"window_rows": 100}  # one window, so without Ray
    job.settings["output"] |= {"rows_per_file": 3}
    job.settings["engine"] = {"max_num_seqs": 6}
    job.settings["output"] |= {"samples": "rows"}
    asked = configured(job, reasoning=MARKERS, thinking_token_budget={"column": "most"}, n=2, temperature=0.8)
    whole = run_job(asked)
    assert whole.rows.output == 2 * len(prompts)
    expected = rows_of(job)
    assert len({row["reasoning"] for row in expected.values()}) > 5
    job.output.rename(job.folder / "undisturbed")

    command = [sys.executable, "-m", "pipeline", "run", str(job.folder / "job.yaml")]
    driver = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)  # fmt: skip
    wait_for_parts(job, 2)
    os.killpg(driver.pid, signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert 2 <= len(job.parts()) < len(prompts) // 3
    assert not (job.output / "_SUCCESS").exists()

    killed: list[int] = []
    killer = threading.Thread(target=kill_engine, args=(job, len(job.parts()) + 2, killed))
    killer.start()
    run_job(asked)
    killer.join()
    assert len(killed) == 1
    assert rows_of(job) == expected
    assert success(job)["output_rows"] == 2 * len(prompts)
    last = runs(job)[-1]
    assert last["actors"][0]["restarts"] == 1
    assert 0 < last["rows_written"] < len(prompts)


def wait_for_parts(job, num_parts: int) -> None:
    while len(job.parts()) < num_parts:
        time.sleep(0.01)


def kill_engine(job, num_parts: int, killed: list[int]) -> None:
    wait_for_parts(job, num_parts)
    killed += family(os.getpid())["engine"]
    os.kill(killed[0], signal.SIGKILL)


def rows_of(job) -> dict[tuple[int, int], dict]:
    """By row and sample, without what depends on the moment."""
    names = ("generated_text", "reasoning", "num_reasoning_tokens", "finish_reason", "num_generated_tokens", "error")
    table = job.table()
    rows = {(row["id"], row["sample_index"]): {name: row[name] for name in names} for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows
