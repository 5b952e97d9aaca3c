"""The prompts' own log-probabilities as a column (`sampling.prompt_logprobs`), once for each row of the input."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.engine import Engine
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import FingerprintError
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from pipeline.tokenization.tokenizer import Tokenizer
from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")


def check(job, texts):
    for row in job.table().to_pylist():
        if row["error"] is not None or row.get("sample_index"):
            assert row["prompt_logprobs"] is None
            continue
        ids = list(f"Say {texts[row['id']]}".encode())
        assert row["prompt_logprobs"] == [
            None,
            *({"token_id": i, "logprob": -0.5, "top": [{"token_id": i, "logprob": -0.5}]} for i in ids[1:]),
        ]


@pytest.mark.parametrize("form", ["lists", "rows"])
def test_each_row_has_them_once_whatever_samples_it_has_and_where_it_was_kept(job, form):
    texts = [*TEXTS[:9], None, *TEXTS[10:16]]
    job.rows(texts)
    job.settings |= {"sampling": {"max_tokens": 6, "n": 2, "temperature": 1.0, "prompt_logprobs": 1}}
    job.settings["output"]["samples_as"] = form
    schema = make_plan(job.config(), "cpu").schema
    token = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
    assert schema.field("prompt_logprobs").type == pa.list_(pa.struct([*token, ("top", pa.list_(token))]))
    run(job, sample=5)
    run(job)
    check(job, texts)
    assert runs(job)[-1]["actors"][0]["resumed_rows"] == 5
    assert job.table()["prompt_logprobs"].null_count == (1 if form == "lists" else 1 + 15)
    with pytest.raises(FingerprintError, match=r"sampling\.prompt_logprobs: 1 -> nothing"):
        run(job, sampling={"prompt_logprobs": None})


def test_each_row_may_have_its_own_number_in_a_column(job):
    """The number of log-probabilities for its completion and for its prompt; null is none."""
    texts, of_prompt, of_answer = TEXTS[:4], [None, 0, 2, 101], [1, None, 0, 0]
    columns = {"id": range(4), "text": texts, "p": of_prompt, "a": of_answer}
    pq.write_table(pa.table(columns), job.folder / "in" / "f0.parquet")
    wanted = {"max_tokens": 6, "prompt_logprobs": {"column": "p"}, "logprobs": {"column": "a"}}
    run(job, sampling=wanted)
    rows = sorted(job.table().to_pylist(), key=lambda row: row["id"])
    assert [row["error"] for row in rows] == [None, None, None, "invalid_sampling"]
    tops = [row["prompt_logprobs"] and len(row["prompt_logprobs"][1]["top"] or ()) for row in rows]
    assert tops == [None, 0, 2, None]
    assert [row["logprobs"] and len(row["logprobs"][0]["top"] or ()) for row in rows] == [1, None, 0, None]


def test_a_job_without_them_keeps_its_identity(job):
    job.rows(TEXTS[:4])
    run(job)
    assert "prompt_logprobs" not in job.table().column_names
    identity = json.loads((job.output / "_pipeline" / "job.json").read_text())["identity"]
    assert identity["sampling"]["prompt_logprobs"] is None
    run(job, sampling={"max_tokens": 6, "prompt_logprobs": None})
    with pytest.raises(FingerprintError, match=r"sampling\.prompt_logprobs: nothing -> 0"):
        run(job, sampling={"max_tokens": 6, "prompt_logprobs": 0})


def test_they_are_the_engines_also_of_prompts_that_share_a_beginning(job, engines_in_threads):
    """The prefix of other rows is cached but not used: all tokens of each prompt have log-probabilities."""
    start = "The pump in the hall was repaired by the team of the night, and the report says that it "
    texts = [f"{start}ran {i} hours" for i in range(4)] + ["ran"]
    job.rows(texts)
    engine = {"dtype": "float32", "max_num_seqs": 1}
    sampling = {"max_tokens": 3, "prompt_logprobs": 2}
    config = job.config(model={"path": "demo:target"}, engine=engine, sampling=sampling)
    run_job(config)
    rows = sorted(job.table().to_pylist(), key=lambda row: row["id"])
    plan = make_plan(config, "cpu")
    tokenizer = Tokenizer.from_folder(str(plan.job.model))
    prompts = [tokenizer.encode(f"Say {text}") for text in texts]
    with Engine(config.engine_config(str(plan.job.model), None)) as engine:
        apart = [engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=2))[0] for ids in prompts]
        shared = engine.generate(prompts[0], SamplingParams(max_tokens=1))[0]
    assert shared.num_cached_tokens > 0, "the prefix was in the cache"
    for row, ids, one in zip(rows, prompts, apart):
        assert row["num_cached_tokens"] == 0
        found = row["prompt_logprobs"]
        assert (len(found), found[0]) == (row["num_input_tokens"], None)
        assert [token["token_id"] for token in found[1:]] == ids[1:]
        assert one.prompt_logprobs is not None
        for token, expected in zip(found[1:], one.prompt_logprobs, strict=True):
            assert token["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
            assert [t["logprob"] for t in token["top"]] == pytest.approx([p for _, p in expected.top], abs=1e-4)
            assert token["top"][0]["token_id"] == expected.top[0][0]
