"""Reasoning in a job: columns, report, the checkpoint's markers, and a run that reuses rows of an earlier one."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.cli.sample import _shown
from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError
from pipeline.job.planning.plan import make_plan
from pipeline.job.preview.describe import describe
from pipeline.job.preview.validation import validate_job
from pipeline.job.running.run import run_job
from pipeline.job.running.sample import read_sample
from pipeline.report.render import html, markdown, text
from pipeline.report.run_report import RunReport
from tests.job.conftest import runs

MARKERS = {"start": ":", "end": ","}  # the embedded model does not reason: these are around the first part of its texts
PROMPTS = [
    f"Summarize the report in one sentence.\nOn May {1 + i % 28} at Solmo #{i}, Kanu Renni serviced boiler 8{i % 10}3 "
    "for weak flow caused by a blown fuse, tightened the joint, fitted part Ki-630.\nSummary:"
    for i in range(9)
]

pytestmark = pytest.mark.usefixtures("without_ray", "engines_in_threads")


def configured(job, **sampling):
    return job.config(
        model={"path": "demo:target"},
        engine={"dtype": "float32"},
        prompt={"template": "{text}"},
        sampling={"max_tokens": 24, **sampling},
        cost={"hourly_usd": 2.0},
    )


def test_columns_are_the_plain_completion_in_two_and_the_report_shows_what_each_cost(job):
    budgets = [None, None, None, 500, 0, 1, 3, None, None]
    table = pa.table({"id": range(len(PROMPTS)), "text": PROMPTS, "budget": budgets})
    pq.write_table(table, job.folder / "in" / "f.parquet")
    with Engine(EngineConfig("demo:target", device="cpu", kernels="reference", dtype="float32")) as engine:
        plain = engine.generate(PROMPTS, SamplingParams(max_tokens=24))
    settings = configured(job, reasoning=MARKERS, thinking_token_budget={"column": "budget"})
    run_job(settings, sample=4)  # kept, and reused by the next run
    shown = list(read_sample(PartStore(str(job.output)), runs(job)[-1]["run_id"]))
    assert len(shown) == 4
    for row in shown:
        assert row.results.keys() == {"reasoning", "num_reasoning_tokens"}
        assert f"  > reasoning: {row.results['reasoning']}\n" in _shown(row)
    report = run_job(settings)
    rows = {row["id"]: row for row in job.table().to_pylist()}
    for row, whole in zip((rows[i] for i in range(len(PROMPTS))), plain, strict=True):
        thought, comma, answer = whole.text.partition(",")
        assert comma, "the embedded model writes a place, then a comma"
        if budgets[row["id"]] in (None, 500):
            assert (row["reasoning"], row["generated_text"]) == (thought.strip(), answer.lstrip())
            assert row["num_generated_tokens"] == len(whole.token_ids)
            assert 3 < row["num_reasoning_tokens"] < row["num_generated_tokens"]
        else:
            assert row["num_reasoning_tokens"] == budgets[row["id"]]
            assert thought.strip().startswith(row["reasoning"] or "")
            assert (row["reasoning"] is None, row["error"]) == (budgets[row["id"]] == 0, None)
    tokens, cost = sum(row["num_reasoning_tokens"] for row in rows.values()), report.reasoning
    assert cost is not None
    assert (cost.rows, cost.tokens) == (len(PROMPTS) - 1, tokens)
    assert cost.share == tokens / report.tokens.generated
    assert cost.usd == pytest.approx((report.cost.generated_usd or 0) * cost.share)
    assert runs(job)[-1]["row_stats"]["reasoned"] == {"rows": cost.rows, "tokens": tokens}
    for page in (text(report), markdown(report), html(report)):
        assert f"{tokens} generated tokens before the answers of {cost.rows} rows" in " ".join(page.split())
    assert RunReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_its_markers_are_the_checkpoints_and_part_of_the_jobs_identity(job):
    job.rows(PROMPTS)

    def identity(**sampling):
        return make_plan(configured(job, **sampling), "cpu").fingerprint.identity["sampling"]

    assert (identity()["reasoning"], identity()["thinking_token_budget"]) == (None, None)
    assert identity() == identity(reasoning=None, thinking_token_budget=-1)
    assert identity(reasoning=MARKERS)["reasoning"] == MARKERS
    named = {"start": "<|im_start|>", "end": "<|im_end|>"}  # added tokens are markers too
    assert identity(reasoning=named, thinking_token_budget=5)["thinking_token_budget"] == 5
    special = {"start": "<|im_start|>", "end": "two words"}
    for reasoning, message in (("auto", "has no known start-of-reasoning token"), (special, "is a special token")):
        settings = configured(job, reasoning=reasoning)
        with pytest.raises(ConfigError, match=rf"sampling\.reasoning.*{message}"):
            make_plan(settings, "cpu")
        (mistake,) = validate_job(settings).mistakes
        assert (mistake.key, mistake.location.endswith("job.yaml:0")) == ("sampling.reasoning", False)
        assert message in mistake.problem
    several = {"start": ":", "end": "two words"}
    assert identity(reasoning=several)["reasoning"] == several
    with pytest.raises(ConfigError, match=r"sampling\.thinking_token_budget: needs markers that are one token each"):
        make_plan(configured(job, reasoning=several, thinking_token_budget={"column": "id"}), "cpu")
    settings = configured(job, reasoning=MARKERS, thinking_token_budget=7)
    found = validate_job(settings)
    assert not found.mistakes
    assert "reasoning between ':' and ','" in describe(found)
    assert list(found.facts["output_columns"])[-2:] == ["reasoning", "num_reasoning_tokens"]


def test_a_mistake_in_the_job_file_is_reported_with_its_key(job):
    for given, key, message in [
        ({"reasoning": True}, "sampling.reasoning", "expected auto, or"),
        ({"reasoning": {"start": "a"}}, "sampling.reasoning", "expected auto, or"),
        ({"thinking_token_budget": 9}, "sampling", "needs reasoning"),
        ({"reasoning": "auto", "thinking_token_budget": -2}, "sampling.thinking_token_budget", "at least 0"),
        ({"reasoning_effort": "low"}, "sampling.reasoning_effort", "sampling.thinking_token_budget"),
    ]:
        with pytest.raises(ConfigError, match=message) as raised:
            job.config(sampling=given)
        assert key in str(raised.value)
