"""A short campaign of kills on a failing store: see `campaign`. The long one is run by hand."""

import pytest

from tests.faults.campaign import BUSY, JobStorage, run_campaign
from tests.faults.store import FaultyStore


@pytest.mark.timeout(1200)
def test_faults_01_08_10_and_11_rows_survive_kills_of_any_process(tmp_path) -> None:
    with FaultyStore(seed=1, chances=BUSY) as store:
        storage = JobStorage(tmp_path, store.bucket, rows=96)
        campaign = run_campaign(
            storage, {"PIPELINE_CACHE": str(tmp_path / "cache")}, kills=6, seed=8, longest_s=14.0, log=print
        )
        assert campaign.kills.total() == 6
        assert campaign.rows == 96 * campaign.rounds > 0
        assert store.proxy.done
