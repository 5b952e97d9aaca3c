"""Adapters in whole jobs: rows with different ones equal jobs with one each, resumes, identity, error rows."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo import demo_model
from pipeline.errors import FingerprintError
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from tests.adapters import write_adapter
from tests.job.conftest import Job
from tools.demo.measure import load

pytestmark = pytest.mark.usefixtures("without_ray", "engines_in_threads")
STYLES = ["a", None, "b", "a", "c", "b", None, "b", "a", "a"]


@pytest.fixture
def adapter_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of the embedded model with two adapters, over rows of which each names one, none, or an unknown one."""
    monkeypatch.chdir(job.folder)
    base = load(demo_model("target"))[0]
    for i, name in enumerate("ab"):
        write_adapter(job.folder / name, base, seed=i, targets="q_proj|down_proj", strength=0.1)
    columns = {"id": range(len(STYLES)), "text": [f"pump {i} leaks" for i in range(len(STYLES))], "style": STYLES}
    pq.write_table(pa.table(columns), job.folder / "in" / "a.parquet")
    job.settings |= {
        "model": {"path": "demo:target-awq", "adapters": {"a": "a", "b": "b"}},
        "engine": {"device": "cpu", "dtype": "float32"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "out", "rows_per_file": 3},
    }
    return job


def results(job: Job, **sections: object) -> dict[int, tuple[str | None, str | None]]:
    config = job.config(**sections)
    run_job(config)
    parts = sorted(Path(config.output.path).glob("part-*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert len(rows) == len(STYLES)
    return {row["id"]: (row["generated_text"], row["error"]) for row in rows}


def test_rows_equal_those_of_jobs_with_one_adapter_each(adapter_job: Job) -> None:
    by_column = {"adapter": {"column": "style"}}
    mixed = results(adapter_job, model=by_column)
    alone = {
        name: results(adapter_job, model={"adapter": name}, output={"path": f"out-{name}"}) for name in ("a", "b")
    } | {None: results(adapter_job, model={"adapters": {}}, output={"path": "out-base"})}
    for i, style in enumerate(STYLES):
        assert mixed[i] == ((None, "unknown_adapter") if style == "c" else alone[style][i])
    assert len({alone[name][0] for name in alone}) == 3, "the adapters change nothing"
    # A run that resumes in the middle of an adapter's rows.
    parts = adapter_job.parts()
    adapters_of = [{STYLES[i] for i in pq.read_table(part)["id"].to_pylist()} for part in parts]
    assert adapters_of == [{None, "a"}, {"a"}, {"b"}, {"c"}], "units are not cut by adapter"
    parts[1].unlink()
    (adapter_job.output / "_SUCCESS").unlink()
    assert results(adapter_job, model=by_column) == mixed


def test_prompts_of_a_row_function_use_the_adapter_of_their_row(adapter_job: Job) -> None:
    async def again(row, generate):
        own, made = await generate(), await generate(f"Say {row['text']}")
        return {"same": own.text == made.text}

    config = adapter_job.config(model={"adapter": {"column": "style"}}, input={"limit": 4})
    run_job(config, row_fn=again, version="1", columns={"same": "bool"})
    rows = [row for part in adapter_job.parts() for row in pq.read_table(part).to_pylist()]
    assert [row["same"] for row in rows] == [True] * 4


def test_an_adapter_is_part_of_the_identity(adapter_job: Job) -> None:
    def digest(**model: object) -> str:
        return make_plan(adapter_job.config(model=model), "cpu").fingerprint.digest

    plain, one = digest(adapters={}), digest(adapter="a")
    assert len({plain, one, digest(adapter="b"), digest(adapter={"column": "style"})}) == 4
    shutil.copytree("a", "copied")
    assert digest(adapter="a", adapters={"a": "copied", "b": "b"}) == one, "a path is not"
    assert digest(adapter="a", adapters={"a": "a"}) == one, "nor an adapter that no row may use"
    results(adapter_job, model={"adapter": "a"})
    config = Path("a/adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    assert digest(adapter="a") != one
    with pytest.raises(FingerprintError, match=r"adapters\.files\.a\.adapter_config\.json: "):
        results(adapter_job, model={"adapter": "a"})


def test_a_job_without_adapters_keeps_its_identity(adapter_job: Job) -> None:
    """Outputs of earlier versions can be resumed."""
    identity = make_plan(adapter_job.config(model={"adapters": {}}), "cpu").fingerprint.identity
    assert "adapters" not in identity
    assert set(identity["model"]) == {path.name for path in demo_model("target-awq").iterdir()}
