"""Tasks beside completions, through whole jobs: columns, error rows, stops and resumes, what commands tell of them."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.parts import PartStore
from pipeline.engine.tasks import Choice, Embed, Score
from tests.job.conftest import TEXTS, Job, run, runs, success
from tests.job.fake_engine import HIDDEN_SIZE, result_of

pytestmark = pytest.mark.usefixtures("without_ray")
LABELS = ("billing", "bug", "question")
MODEL = {  # as much of a config.json as planning reads
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


class TaskJob(Job):
    """A job of a task: no keys of sampling."""

    def __init__(self, folder, task: str, **section) -> None:
        super().__init__(folder)
        del self.settings["sampling"]
        self.settings |= {"task": task, task: section} if section else {"task": task}

    def of_model(self, **more) -> "TaskJob":
        """With a config.json that planning can read."""
        config = json.loads((self.folder / "model" / "config.json").read_text())
        (self.folder / "model" / "config.json").write_text(json.dumps({**MODEL, **more, **config}))
        return self

    def by_id(self) -> dict[int, dict]:
        return {row["id"]: row for row in self.table().to_pylist()}


@pytest.fixture
def of(tmp_path):
    def make(task: str, **section) -> TaskJob:
        return TaskJob(tmp_path, task, **section)

    return make


def prompt_of(text: str) -> list[int]:
    return list(f"Say {text}".encode())


def test_choice_tells_the_likeliest_label_and_all_probabilities(of):
    texts = [*TEXTS[:12], None]
    job = of("choice", labels=list(LABELS)).rows(texts)
    report, _ = run(job)
    table = job.table()
    assert table.column_names == ["id", "label", "label_probability", "label_probabilities", *COMMON]
    assert table.schema.field("label_probability").type == pa.float64()
    for i, text in enumerate(texts[:-1]):
        row = job.by_id()[i]
        expected = result_of(prompt_of(text), Choice(tuple(tuple(label.encode()) for label in LABELS)))
        assert row["label"] == LABELS[expected.best]
        assert row["label_probability"] == max(expected.probabilities)
        each = zip(LABELS, expected.probabilities, expected.logprobs)
        assert row["label_probabilities"] == [{"label": x, "probability": p, "logprob": q} for x, p, q in each]
        assert (row["num_generated_tokens"], row["num_input_tokens"]) == (0, len(prompt_of(text)))
    last = job.by_id()[12]
    assert (last["label"], last["label_probabilities"], last["error"]) == (None, None, "null_prompt")
    assert success(job)["errors"] == {"null_prompt": 1}
    assert report.rows.completed == 12
