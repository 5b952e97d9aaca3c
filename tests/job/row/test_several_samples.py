"""Jobs with several completions a row (`sampling.n`): their columns, their counts, and runs that are stopped."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.sample import _shown
from pipeline.config.jobfile import JobFileError
from pipeline.data.output.parts import PartStore
from pipeline.data.units import window_units
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.samples import sample_seed
from pipeline.errors import ConfigError, FingerprintError
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.output.audit import audit
from pipeline.job.output.read_output import divided_by
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from pipeline.job.running.sample import SampleRow
from pipeline.tokenization.tokenizer import Tokenizer
from tests.job.conftest import TEXTS, run, runs, success
from tests.job.fake_engine import answer, text_of

pytestmark = pytest.mark.usefixtures("without_ray")
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "n": 3}


def samples_of(i: int, text: str, n: int = 3, max_tokens: int = 6) -> list[list[int]]:
    seed = row_seed(0, "f0.parquet", i)
    return [answer(list(f"Say {text}".encode()), sample_seed(seed, index), max_tokens) for index in range(n)]


def check(job, texts, n=3):
    rows = {row["id"]: row for row in job.table().to_pylist()}
    assert job.table().num_rows == len(texts) == len(rows)
    for i, text in enumerate(texts):
        row = rows[i]
        if text is None:
            assert (row["error"], row["generated_text"], row["finish_reason"]) == ("null_prompt", None, None)
            continue
        samples = samples_of(i, text, n)
        assert row["generated_text"] == [text_of(ids) for ids in samples]
        assert row["finish_reason"] == ["length" if len(ids) == 6 else "stop" for ids in samples]
        assert row["num_generated_tokens"] == sum(map(len, samples))


def test_each_row_has_its_samples_in_lists_and_all_counts_are_of_all_samples(job):
    texts = [*TEXTS[:20], None, *TEXTS[21:30]]
    job.rows(texts)
    report, _ = run(job, sampling=SAMPLING | {"logprobs": 1})
    check(job, texts)
    table = job.table()
    for row in table.to_pylist():
        if row["error"] is None:
            assert sum(map(len, row["logprobs"])) == row["num_generated_tokens"]
            assert text_of([token["token_id"] for token in row["logprobs"][2]]) == row["generated_text"][2]
    generated = sum(n for n in table["num_generated_tokens"].to_pylist())
    assert success(job)["num_generated_tokens"] == report.tokens.generated == generated
    assert (report.rows.written, report.rows.errors) == (30, 1)
    (record,) = runs(job)
    stats = record["row_stats"]
    assert record["actors"][0]["stats"]["generated_tokens"] == generated
    assert sum(bucket["generated_tokens"] for bucket in stats["lengths"].values()) == generated
    assert sum(sum(h["counts"].values()) for h in stats["outputs"].values()) == 3 * 29, "lengths are those of samples"


def test_an_output_of_samples_is_verified_divided_and_resumed(job):
    texts = TEXTS[:24]
    job.rows(texts)
    report, _ = run(job, sampling=SAMPLING)
    store = PartStore(str(job.output))
    assert audit(store, deep=True, log=lambda text: None).sound
    (all_rows,) = divided_by(store, report, "error", 5).groups
    assert (all_rows.rows, all_rows.completed.generated_tokens) == (24, report.tokens.generated)
    with pytest.raises(ConfigError, match="finish_reason: is list<"):
        divided_by(store, report, "finish_reason", 5)
    job.parts()[1].unlink()
    (job.output / "_SUCCESS").unlink()
    run(job, sampling=SAMPLING)
    check(job, texts)


def test_n_from_a_column_and_rows_whose_samples_would_be_equal(job):
    table = pa.table({"id": list(range(4)), "text": TEXTS[:4], "n": [1, 3, None, 2], "t": [1.0, 0.5, None, 0.0]})
    pq.write_table(table, job.folder / "in" / "f0.parquet")
    job.fake()
    run(job, sampling={"max_tokens": 6, "n": {"column": "n"}, "temperature": {"column": "t"}})
    rows = {row["id"]: row for row in job.table().to_pylist()}
    assert rows[0]["generated_text"] == [text_of(ids) for ids in samples_of(0, TEXTS[0], 1)]
    assert rows[1]["generated_text"] == [text_of(ids) for ids in samples_of(1, TEXTS[1], 3)]
    assert len(rows[2]["generated_text"]) == 1
    assert (rows[3]["error"], rows[3]["generated_text"]) == ("invalid_sampling", None)
    assert rows[3]["error_message"].startswith("sampling.n = 2: expected 1 with temperature 0")
    job.output = job.folder / "constant"
    constant = {"max_tokens": 6, "n": 3, "temperature": {"column": "t"}}
    run(job, sampling=constant, output={"path": str(job.output)})
    rows = {row["id"]: row["error"] for row in job.table().to_pylist()}
    assert rows == {0: None, 1: None, 2: None, 3: "invalid_sampling"}


def test_a_job_file_that_requests_equal_samples_is_refused(job):
    for sampling, message in [
        ({"n": 8}, "8 with temperature 0 gives 8 equal texts; set sampling.temperature above 0"),
        ({"n": 8, "temperature": 0}, "8 with temperature 0 gives 8 equal texts"),
        ({"n": 0}, "an integer 1 to 1024; got 0"),
        ({"n": "many"}, "expected an integer, or {column: name}"),
    ]:
        with pytest.raises(JobFileError, match=r"sampling\.n") as refused:
            job.config(sampling=sampling)
        assert message in str(refused.value)


def test_n_of_1_is_no_other_job_and_another_n_is(job):
    job.rows(TEXTS[:8])
    run(job)
    run(job, sampling={"n": 1})
    with pytest.raises(FingerprintError, match=r"sampling\.n: 1 -> 3"):
        run(job, sampling=SAMPLING)


def test_the_plan_has_lists_and_units_weigh_all_samples(job):
    job.rows(TEXTS)
    schema = make_plan(job.config(sampling=SAMPLING), "cpu").schema
    types = [schema.field(name).type for name in ("generated_text", "finish_reason", "num_generated_tokens")]
    assert types == [pa.list_(pa.string()), pa.list_(pa.string()), pa.int32()]
    units = []
    for sampling in ({"max_tokens": 6}, SAMPLING):
        plan = make_plan(job.config(sampling=sampling), "cpu")
        spec = replace(plan.job.units, unit_tokens=100)
        units.append(sum(len(list(window_units(plan.source, window, spec))) for window in plan.windows))
    assert units[1] > 1.5 * units[0]


def test_error_rows_are_computed_again_with_all_their_samples(job):
    job.rows(TEXTS[:16])
    job.fake(kill="text 3 ", cured_by=str(job.folder / "cure"))
    run(job, sampling=SAMPLING)
    failed = [row["id"] for row in job.table().to_pylist() if row["error"]]
    assert failed == [3]
    (job.folder / "cure").touch()
    run(job, sampling=SAMPLING, retry_failed=True)
    check(job, TEXTS[:16])


def test_samples_of_the_real_model_are_those_of_separate_requests(job, engines_in_threads):
    texts = [f"The pump number {i} was repaired by the" for i in range(3)]
    job.rows(texts)
    sampling = {"max_tokens": 12, "temperature": 0.8, "n": 4}
    config = job.config(model={"path": "demo:target"}, engine={"dtype": "float32"}, sampling=sampling)
    run_job(config)
    rows = sorted(job.table().to_pylist(), key=lambda row: row["id"])
    assert all(len(set(row["generated_text"])) > 1 for row in rows)
    plan = make_plan(config, "cpu")
    tokenizer, params = Tokenizer.from_folder(str(plan.job.model)), replace(plan.job.params, n=1)
    requests = []
    for i, text in enumerate(texts):
        for index in range(4):
            own = replace(params, seed=sample_seed(row_seed(0, "f0.parquet", i), index))
            requests.append(Request((i, index), tokenizer.encode(f"Say {text}"), own))
    with Engine(config.engine_config(str(plan.job.model), None)) as engine:
        apart = {completion.row_id: completion.text for completion in engine.stream(requests)}
    assert [row["generated_text"] for row in rows] == [[apart[i, index] for index in range(4)] for i in range(3)]


def test_a_tried_row_shows_the_texts_of_all_its_samples() -> None:
    row = SampleRow("a.parquet", 3, "Hi", ["one", "two"], ["stop", "length"], 2, 5, None, None)
    assert _shown(row).splitlines() == [
        "a.parquet, row 3: 2 tokens in, 5 out",
        "  | Hi",
        "  > one",
        "  > two",
        "  (stop, length)",
    ]
