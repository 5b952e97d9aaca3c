"""Texts of a dataset: the first ones or some by a seed, in order, as a job sends them; and the line of progress."""

from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import job_from_flags
from pipeline.demo import demo_model
from pipeline.errors import InputError
from pipeline.formatting import Remaining
from pipeline.job.planning.resolution import resolve_prompts
from pipeline.job.preview.dataset_tokens import read_samples
from pipeline.tokenization.tokenizer import Tokenizer
from tests.job.fake_engine import FakeTokenizer


def text_of(row: int) -> str:
    """Return a text of one of several lengths, so that units order rows differently from the input."""
    return f"row {row}" + " and so on" * (row % 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(str(demo_model("target")))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two files of several row groups, 3,000 rows in all, every tenth without text."""
    for name, first in (("a", 0), ("b", 1500)):
        rows = range(first, first + 1500)
        table = pa.table({"text": [None if i % 10 == 3 else text_of(i) for i in rows], "n": list(rows)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=400)
    return tmp_path


def config_of(data: Path, **keys):
    flags = {"model.path": ("demo:target", ""), "input.path": (str(data), ""), "output.path": ("-", "")}
    keys = {"prompt.column": "text"} | {key.replace("__", "."): value for key, value in keys.items()}
    return job_from_flags(flags | {key: (value, "") for key, value in keys.items() if value is not None})


def prompts_of(data: Path, **keys):
    return resolve_prompts(config_of(data, **keys), demo_model("target"))


def test_all_rows_come_in_the_order_of_the_dataset(data, tokenizer):
    samples = read_samples(prompts_of(data), tokenizer, 100, expected="n")
    assert samples.expected == [str(i) for i in range(3000) if i % 10 != 3]
    assert samples.token_ids == tokenizer.encode_batch([text_of(i) for i in range(3000) if i % 10 != 3])
    assert samples.left_out == {"null_prompt": 300}
    first = read_samples(prompts_of(data, input__limit=15), tokenizer, 100, expected="n")
    assert first.expected == samples.expected[:13]


def test_a_seed_chooses_rows_from_everywhere_and_the_same_ones_again(data, tokenizer):
    some = read_samples(prompts_of(data), tokenizer, 100, expected="n", chosen=(200, 7))
    numbers = [int(text or 0) for text in some.expected]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + some.left_out["null_prompt"] == 200
    assert [sum(a <= n < a + 1000 for n in numbers) > 40 for a in (0, 1000, 2000)] == [True] * 3
    assert some == read_samples(prompts_of(data), tokenizer, 100, expected="n", chosen=(200, 7))
    assert some.expected != read_samples(prompts_of(data), tokenizer, 100, expected="n", chosen=(200, 8)).expected
    assert some.token_ids == tokenizer.encode_batch([text_of(n) for n in numbers]), "each row has its own text"
    every = read_samples(prompts_of(data), tokenizer, 100, chosen=(5000, 7))
    assert len(every.token_ids) == 2700


def test_chats_and_templates_are_sent_as_a_job_sends_them(data, tokenizer):
    config = config_of(
        data, prompt__column=None, prompt__template="Say {text}", prompt__chat={"system": "s"}, input__limit=1
    )
    [ids] = read_samples(resolve_prompts(config, demo_model("target")), tokenizer, 100).token_ids
    assert ids == tokenizer.encode_chat([{"role": "user", "content": "Say row 0"}], "s")


def test_chats_get_one_date(data, monkeypatch):
    clock = (datetime(2026, 11, 23, 23, 59, 59) + timedelta(seconds=n) for n in count())
    monkeypatch.setattr("pipeline.job.preview.dataset_tokens.wall_time", lambda: next(clock))
    dates = []
    monkeypatch.setattr(FakeTokenizer, "encode_chat", lambda self, *chat: dates.append(chat[-1]) or [1])
    read_samples(prompts_of(data, prompt__chat={}, input__limit=1500), FakeTokenizer(), 100)  # two windows
    assert set(dates) == {datetime(2026, 11, 23, 23, 59, 59)}


def test_texts_that_are_too_long_are_counted_and_none_at_all_is_an_error(data, tokenizer):
    length = len(tokenizer.encode("row 1"))
    samples = read_samples(prompts_of(data), tokenizer, length)
    assert samples.left_out["prompt_too_long"] == 2700 - len(samples.token_ids) > 0
    assert max(map(len, samples.token_ids)) == length
    whole = read_samples(prompts_of(data), tokenizer, 100)
    some = read_samples(prompts_of(data), tokenizer, length, cut=True)
    assert some.token_ids == [ids[:length] for ids in whole.token_ids], "cut texts are the beginnings of all"
    with pytest.raises(
        InputError, match=r"no row has a text of at most 1 tokens \(null_prompt 300, prompt_too_long 2,700"
    ):
        read_samples(prompts_of(data), tokenizer, 1)


def test_the_line_of_progress_counts_what_was_done_now():
    lines, now = [], [0.0]
    remaining = Remaining(lines.append, "layers", 40, first=20, clock=lambda: now[0])
    remaining(20)
    now[0] = 10.0
    remaining(20)
    remaining(24)
    now[0] = 12.0
    remaining(25)
    now[0] = 100.0
    remaining(30)
    now[0] = 200.0
    remaining(40)
    assert lines == ["layers: 24 of 40, 60% (about 40 s left)", "layers: 30 of 40, 75% (about 1 min 40 s left)"]
