"""Tasks other than completions, in whole jobs: columns, error rows, stops, resumes and the output of commands."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from pipeline.cli.sample import _shown
from pipeline.data.output.compact import compact
from pipeline.data.output.parts import PartStore
from pipeline.data.units import make_units
from pipeline.engine.completion import Completion
from pipeline.engine.tasks import Choice, Classify, Embed, Score, VectorResult
from pipeline.errors import ConfigError, FingerprintError, OutputError
from pipeline.estimate.job_estimate import estimate_job
from pipeline.estimate.render import text as estimate_text
from pipeline.job.actor.tasks import ClassifyTask
from pipeline.job.output.audit import audit
from pipeline.job.output.convert import convert
from pipeline.job.output.read_output import divided_by
from pipeline.job.running.run import run_job
from pipeline.job.running.sample import read_sample
from pipeline.report.render import html, markdown, text
from pipeline.tokenization.tokenizer import Tokenizer
from tests.job.conftest import TEXTS, Job, run, runs, success, units_as_written
from tests.job.fake_engine import HIDDEN_SIZE, FakeTokenizer, result_of
from tests.model_folders import small_config, write_tokenizer

pytestmark = pytest.mark.usefixtures("without_ray")
LABELS = ("billing", "bug", "question")
MODEL = {  # the part of config.json that planning reads
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
HEAD = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good", "1": "bad", "2": "neither"}}
COMMON = ["error", "error_message", "num_input_tokens", "num_cached_tokens", "num_generated_tokens", "source_file",
          "source_row"]  # fmt: skip
EACH = {"choice": {"labels": list(LABELS)}, "score": {"token_logprobs": 1}, "embed": {}, "classify": {}}


class TaskJob(Job):
    """A job of a task over the column `text` and those that `columns` adds."""

    def __init__(self, folder, task: str, **section) -> None:
        self.model = {**MODEL, **(HEAD if task == "classify" else {})}
        super().__init__(folder)
        del self.settings["sampling"]
        self.settings["task"] = {"type": task, **section}

    def fake(self, **behaviour) -> "TaskJob":
        super().fake(**behaviour)
        path = self.folder / "model" / "config.json"
        path.write_text(json.dumps({**self.model, **json.loads(path.read_text())}))
        return self

    def columns(self, **columns) -> "TaskJob":
        table = pa.table({"id": pa.array(range(len(next(iter(columns.values())))), pa.int64()), **columns})
        pq.write_table(table, self.folder / "in" / "f0.parquet")
        return self

    def by_id(self) -> dict[int, dict]:
        return {row["id"]: row for row in self.table().to_pylist()}


@pytest.fixture
def make_job(tmp_path):
    def make(task: str, **section) -> TaskJob:
        folder = tmp_path / f"{task}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return TaskJob(folder, task, **section)

    return make


def prompt_of(text: str) -> list[int]:
    return list(f"Say {text}".encode())


def test_choice_returns_the_likeliest_label_and_all_probabilities(make_job):
    texts = [*TEXTS[:12], None]
    job = make_job("choice", labels=list(LABELS)).rows(texts)
    report, _ = run(job)
    table = job.table()
    assert table.column_names == ["id", "label", "label_probability", "label_probabilities", *COMMON]
    assert table.schema.field("label_probability").type == pa.float64()
    for i, text_i in enumerate(texts[:-1]):
        row = job.by_id()[i]
        expected = result_of(prompt_of(text_i), Choice(tuple(tuple(label.encode()) for label in LABELS)))
        assert row["label"] == LABELS[expected.best]
        assert row["label_probability"] == max(expected.probabilities)
        each = zip(LABELS, expected.probabilities, expected.logprobs)
        assert row["label_probabilities"] == [{"label": x, "probability": p, "logprob": q} for x, p, q in each]
        assert (row["num_generated_tokens"], row["num_input_tokens"]) == (0, len(prompt_of(text_i)))
    last = job.by_id()[12]
    assert (last["label"], last["label_probabilities"], last["error"]) == (None, None, "null_prompt")
    assert success(job)["errors"] == {"null_prompt": 1}
    assert report.rows.completed == 12


def test_each_row_may_have_its_own_labels_and_bad_ones_are_error_rows_by_name(make_job):
    options = [["yes", "no"], ["no", "not sure"], None, [], ["a", None], ["a", ""], ["same", "same"]]
    job = make_job("choice", labels={"column": "options"}).columns(text=["hello"] * 7, options=options)
    run(job, run={"max_error_rate": 1.0})
    rows = job.by_id()
    ends = [*(tuple(b"no\0"), tuple(b"not sure\0"))]  # each with its end, without which the longer one could never win
    for i, tokens in ((0, [tuple(b"yes"), tuple(b"no")]), (1, ends)):
        expected = result_of(prompt_of("hello"), Choice(tuple(tokens)))
        assert [each["label"] for each in rows[i]["label_probabilities"]] == options[i]
        assert [each["logprob"] for each in rows[i]["label_probabilities"]] == list(expected.logprobs)
        assert rows[i]["label"] == options[i][expected.best]
    for i, message in {2: "'options' is null", 3: "an empty list", 4: "a null among the labels", 5: "an empty label",
                   6: "task.labels: 'same' occurs twice"}.items():  # fmt: skip
        assert (rows[i]["error"], rows[i]["label"]) == ("invalid_labels", None)
        assert message in rows[i]["error_message"]


def test_a_completion_is_scored_after_its_prompt(make_job):
    answers = ["fine", "a longer answer", None, "", " \n"]
    job = make_job("score", completion="{answer}", token_logprobs=2).columns(text=["hi"] * 5, answer=answers)
    run(job, run={"max_error_rate": 1.0})
    assert job.table().column_names == ["id", "logprob", "num_scored_tokens", "perplexity", "token_logprobs", *COMMON]
    assert [job.table().schema.field(name).type for name in ("logprob", "num_scored_tokens", "perplexity")] == [
        pa.float64(), pa.int32(), pa.float64()]  # fmt: skip
    rows = job.by_id()
    for i in (0, 1):
        ids = prompt_of("hi") + list(answers[i].encode())
        expected = result_of(ids, Score(len(prompt_of("hi")), 2))
        row = rows[i]
        assert (row["logprob"], row["num_scored_tokens"]) == (expected.logprob, len(answers[i]))
        assert row["perplexity"] == expected.perplexity
        assert row["num_input_tokens"] == len(ids)
        assert [t["token_id"] for t in row["token_logprobs"]] == list(answers[i].encode())
        assert len(row["token_logprobs"][0]["top"]) == 2
    for i, message in {2: "column 'answer' is null", 3: "only whitespace", 4: "only whitespace"}.items():
        assert (rows[i]["error"], rows[i]["logprob"]) == ("invalid_completion", None)
        assert rows[i]["error_message"].startswith("task.completion: ")
        assert message in rows[i]["error_message"]


def test_a_text_is_scored_from_its_second_token_on(make_job):
    job = make_job("score").columns(text=["some text", "x"])
    run(job, prompt={"template": None, "column": "text"})
    rows = job.by_id()
    assert rows[0]["num_scored_tokens"] == len("some text") - 1
    assert "token_logprobs" not in rows[0]
    assert (rows[1]["error"], rows[1]["error_message"]) == (
        "empty_prompt", "the text has 1 tokens; a text is scored from its second token on")  # fmt: skip


@pytest.mark.parametrize(("section", "length"), [({}, HIDDEN_SIZE), ({"dimensions": 3, "normalize": False}, 3)])
def test_vectors_are_lists_of_a_fixed_size(make_job, section, length):
    job = make_job("embed", **section).rows(["one", None, "three"])
    run(job)
    field = job.table().schema.field("embedding")
    assert field.type == pa.list_(pa.float32(), length)
    task = Embed("last", section.get("normalize", True), section.get("dimensions"))
    rows = job.by_id()
    assert rows[0]["embedding"] == result_of(prompt_of("one"), task).values.tolist()
    assert rows[2]["embedding"] == result_of(prompt_of("three"), task).values.tolist()
    assert (rows[1]["embedding"], rows[1]["error"]) == (None, "null_prompt")


def test_vectors_are_pooled_as_the_checkpoint_specifies_and_that_is_in_the_identity(make_job):
    job = make_job("embed").rows(["one"])
    folder = job.folder / "model"
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    run(job)
    assert job.by_id()[0]["embedding"] == result_of(prompt_of("one"), Embed("mean", normalize=False)).values.tolist()
    identity = json.loads((job.output / "_pipeline" / "job.json").read_text())["identity"]
    assert (identity["task"]["pooling"], identity["task"]["normalize"]) == ("mean", False)
    with pytest.raises(FingerprintError, match=r"task\.pooling"):
        run(job, task={"pooling": "last"})


@pytest.mark.parametrize("activation", ["auto", "sigmoid", "none"])
def test_classes_come_with_the_labels_of_the_head(make_job, activation):
    job = make_job("classify", activation=activation).rows(["one", None])
    run(job)
    row, empty = (job.by_id()[i] for i in (0, 1))
    logits = result_of(prompt_of("one"), Classify()).values.tolist()
    names = ["good", "bad", "neither"]
    assert row["label"] == names[logits.index(max(logits))]
    assert empty["label"] is None
    if activation == "none":
        assert row["label_logits"] == [{"label": x, "logit": y} for x, y in zip(names, logits)]
        assert row["label_logit"] == max(logits)
        return
    total = sum(each["probability"] for each in row["label_probabilities"])
    assert [each["logit"] for each in row["label_probabilities"]] == logits
    assert (total == pytest.approx(1)) == (activation == "auto")
    assert row["label_probability"] == max(each["probability"] for each in row["label_probabilities"])


def test_a_head_of_one_label_gives_a_score():
    done = [Completion(0, [], "", "stop", 3, result=VectorResult(np.array([2.0], dtype=np.float32)))]
    assert ClassifyTask(("LABEL_0",), "sigmoid").fields == (pa.field("score", pa.float64()),)
    assert ClassifyTask(("LABEL_0",), "sigmoid").columns(done, [None]) == [[pytest.approx(0.880797)]]
    assert ClassifyTask(("LABEL_0",), "none").columns(done, [None]) == [[2.0]]


def test_error_rows_are_computed_again_into_parts_with_vectors(make_job):
    job = make_job("embed").rows(TEXTS[:20])
    report, _ = run(job, run={"max_error_rate": 1.0}, engine={"max_model_len": len(prompt_of(TEXTS[10]))})
    assert report.rows.errors > 0
    assert {row["embedding"] is None for row in job.by_id().values()} == {True, False}
    report, _ = run(job, retry_failed=True, engine={"max_model_len": 100})
    assert report.rows.errors == 0
    for i, row in job.by_id().items():
        assert row["embedding"] == result_of(prompt_of(TEXTS[i]), Embed()).values.tolist()


@pytest.mark.parametrize("task", EACH)
def test_a_finished_job_is_reported_verified_divided_and_compacted_without_generated_tokens(make_job, task, tmp_path):
    job = make_job(task, **EACH[task]).rows([*TEXTS, None])
    report, _ = run(job, cost={"hourly_usd": 3.0})
    for page in (text(report), markdown(report), html(report)):
        assert "per 1,000 rows" in page
        assert "rows/s" in page
        assert "per 1M generated" not in page
    assert report.cost.per_1m_prompt_usd > 0
    assert report.to_json()["rows_per_s"] > 0
    store = PartStore(str(job.output))
    assert audit(store, True, lambda text: None).sound
    if task in ("choice", "classify"):
        divided = divided_by(store, report, "label", 10)
        assert sum(group.rows for group in divided.groups) == 51
        assert sum(group.machine_us for group in divided.groups) == report.machine_us
        assert divided.to_text()
    with pytest.raises(OutputError, match="no column custom_id" if task == "embed" else f"task of its job is {task}"):
        convert(store, str(tmp_path / "answers.jsonl"), str(tmp_path / "errors.jsonl"), {})
    target = tmp_path / f"compact-{task}"
    compact(store, PartStore(str(target)), "input", 2**20, lambda text: None)
    whole = pa.concat_tables([pq.read_table(file) for file in sorted(target.glob("*.parquet"))])
    assert whole.schema.types == job.table().schema.types
    assert sorted(whole.to_pylist(), key=str) == sorted(job.table().to_pylist(), key=str)


@pytest.mark.parametrize("task", EACH)
def test_a_sample_shows_the_results_of_the_task_and_the_run_reuses_them(make_job, task):
    undisturbed = make_job(task, **EACH[task]).rows(TEXTS)
    run(undisturbed)
    job = make_job(task, **EACH[task]).rows(TEXTS)
    run(job, sample=9)
    rows = list(read_sample(PartStore(str(job.output)), runs(job)[-1]["run_id"]))
    assert len(rows) == 9
    assert (rows[0].text, rows[0].finish_reason) == (None, None)
    expected = {"choice": "> label: ", "score": "> perplexity: 1.6", "embed": "> embedding: ", "classify": "> label: "}
    assert expected[task] in _shown(rows[0])
    assert "None" not in _shown(rows[0])
    report, _ = run(job)
    assert report.work.resumed_rows == 9
    assert sorted(job.table().to_pylist(), key=str) == sorted(undisturbed.table().to_pylist(), key=str)


def test_a_sample_shows_errors_and_the_beginning_of_long_lists(make_job):
    job = make_job("embed").rows(["a", None])
    run(job, sample=2)
    fine, failed = read_sample(PartStore(str(job.output)), runs(job)[-1]["run_id"])
    long = replace(fine, results={"embedding": [0.25] * 1024})
    assert "> embedding: 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, ... (1,024 in all)" in _shown(long)
    assert "(null_prompt: column 'text' is null)" in _shown(failed)
    assert "embedding" not in _shown(failed)


def test_result_columns_of_a_task_can_be_renamed_and_others_cannot(make_job):
    job = make_job("choice", labels=list(LABELS)).rows(["a"])
    run(job, output={"rename": {"label": "category", "error": "failed"}})
    assert {"category", "failed"} < set(job.table().column_names)
    with pytest.raises(ConfigError, match=r"output\.rename: 'generated_text' is not a result column"):
        run(job, output={"rename": {"generated_text": "a"}})


def test_units_are_cut_by_prompts_and_completions_alone(make_job):
    """A row of a task takes no room for tokens that it never generates."""
    table = pa.table({"text": ["x" * 40] * 8, "answer": ["y" * 400] * 8, "source_file": ["f"] * 8,
                      "source_row": list(range(8))})  # fmt: skip
    for section, units in (({}, 1), ({"completion": "{answer}"}, 4)):
        spec = units_as_written(make_job("score", **section).config())
        assert len(make_units(table, replace(spec, unit_tokens=230), 0)) == units


def test_a_plan_expects_no_generated_tokens(make_job, monkeypatch):
    monkeypatch.setattr("pipeline.tokenization.tokenizer.Tokenizer.from_folder", lambda *given: FakeTokenizer())
    job = make_job("embed").rows(TEXTS)
    found = estimate_job(job.config(), sample=50, hardware=("h100",), log=lambda text: None)
    assert found.generated.expected == 0
    assert found.cards
    assert "a task that generates nothing" in estimate_text(found)


@pytest.mark.usefixtures("engines_in_threads")
@torch.inference_mode()
def test_a_real_engine_classifies_as_transformers_does(tmp_path):
    """A random checkpoint with a head, through a whole job: chats, batches and the activation of config.json."""
    torch.manual_seed(3)
    config = small_config(32, 48, 2, 4, 2, num_labels=3, initializer_range=0.3, pad_token_id=0)
    named = {"id2label": {0: "good", 1: "bad", 2: "neither"}, "problem_type": "multi_label_classification"}
    auto = AutoConfig.for_model("qwen3", **config, **named)
    reference = AutoModelForSequenceClassification.from_config(auto).float().eval()
    job = TaskJob(tmp_path, "classify").rows(TEXTS[:6])
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    reference.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    run_job(job.config(engine={"dtype": "float32"}))
    tokenizer = Tokenizer.from_folder(str(tmp_path / "model"))
    for i, row in job.by_id().items():
        logits = reference(torch.tensor([tokenizer.encode(f"Say {TEXTS[i]}")])).logits[0]
        probabilities = row["label_probabilities"]
        assert [each["label"] for each in probabilities] == ["good", "bad", "neither"]
        assert [each["logit"] for each in probabilities] == pytest.approx(logits.tolist(), abs=1e-4)
        assert [each["probability"] for each in probabilities] == pytest.approx(logits.sigmoid().tolist(), abs=1e-4)
        assert row["label"] == probabilities[int(logits.argmax())]["label"]
