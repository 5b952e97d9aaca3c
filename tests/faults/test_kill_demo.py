"""The real demonstration job, killed by SIGKILL and run again: see kill_demo."""

from pathlib import Path

from tests.faults.kill_demo import run_campaign


def test_the_demonstration_job_survives_kills(tmp_path: Path) -> None:
    happened = run_campaign(tmp_path / "out", kills=3, seed=4, limit=96, unit_rows=8, longest_s=22.0)
    assert happened.rows == 96
    assert happened.kills_s
