"""A short campaign of kills, over a store that fails: see `campaign`. The long one is run by hand."""

import pytest

from tests.faults.campaign import BUSY, Place, run_campaign
from tests.faults.store import FaultyStore


@pytest.mark.timeout(1200)
def test_faults_01_08_10_and_11_rows_survive_kills_of_whatever_runs(tmp_path) -> None:
    with FaultyStore(seed=1, chances=BUSY) as store:
        place = Place(tmp_path, store.bucket, rows=96)
        happened = run_campaign(
            place, {"PIPELINE_CACHE": str(tmp_path / "cache")}, kills=6, seed=8, longest_s=14.0, say=print
        )
        assert happened.kills.total() == 6
        assert happened.rows == 96 * happened.rounds > 0
        assert store.proxy.done
