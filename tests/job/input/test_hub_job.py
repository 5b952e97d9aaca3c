"""A job over a dataset of the Hugging Face Hub: its output records the commit, and a branch that moved is noticed."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import FingerprintError
from pipeline.stores.hub_files import HubFiles
from tests.data.fake_hub import Dataset, running_hub
from tests.job.conftest import TEXTS, Started, run

pytestmark = pytest.mark.usefixtures("without_ray")


def parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), sink)
    return sink.getvalue()


def test_a_resumed_run_reads_the_first_runs_rows_or_names_both_commits(job):
    with running_hub() as hub:
        dataset = hub.datasets["org/name"] = Dataset()
        url = "hf://datasets/org/name"
        settings = {"storage_options": {"hf": {"endpoint": hub.url}}}
        first = dataset.commit({"f0.parquet": parquet(TEXTS)})
        run(job, input={"path": url}, **settings)
        job.check(TEXTS)
        recorded = json.loads((job.output / "_pipeline" / "job.json").read_text())
        assert recorded["free"]["input"]["path"] == f"{url}@{first}"
        job.parts()[0].unlink()
        dataset.commit({"f0.parquet": parquet(TEXTS), "README.md": b"a new commit with the same rows"})
        run(job, input={"path": url}, **settings)
        job.check(TEXTS)
        job.parts()[0].unlink()
        started = Started.count
        last = dataset.commit({"f0.parquet": parquet([*TEXTS[:-1], "another row"])})
        with pytest.raises(FingerprintError) as refused:
            run(job, input={"path": url}, **settings)
        assert "files.f0.parquet: " in str(refused.value)
        assert f"The first run read {url}@{first}, this one reads {url}@{last}." in str(refused.value)
        assert Started.count == started
        run(job, input={"path": f"{url}@{first}"}, **settings)
        job.check(TEXTS)
    HubFiles.clear_instance_cache()
