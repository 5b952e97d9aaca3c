"""The training examples: what the model learns from is what it is asked with later."""

from itertools import islice
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.demo import demo_model
from pipeline.demo.reports import make_report
from tools.demo.measure import chat_text
from tools.demo.tokenizer import EOS, IM_END
from tools.demo.train import batches, build_model, encode, learning_rate, loss_of


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_model("target"))


def test_an_example_is_the_prompt_as_it_is_sent_then_the_summary(tokenizer: PreTrainedTokenizerFast) -> None:
    report = make_report("train", 5)
    ids, num_prompt = encode(tokenizer, report, chat=False)
    assert ids[:num_prompt] == tokenizer(report.prompt)["input_ids"]
    assert tokenizer.decode(ids[num_prompt:]) == f" {report.summary}{EOS}"


def test_a_chat_example_has_one_start_and_ends_the_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    report = make_report("train", 5)
    ids, num_prompt = encode(tokenizer, report, chat=True)
    assert tokenizer.decode(ids[:num_prompt]) == chat_text(tokenizer, report.prompt)
    assert ids.count(tokenizer.get_vocab()[str(tokenizer.bos_token)]) == 1
    assert tokenizer.decode(ids[num_prompt:]) == report.summary + IM_END


def test_batches_keep_to_their_size_and_use_no_report_twice(tokenizer: PreTrainedTokenizerFast) -> None:
    found = list(islice(batches(tokenizer, Random(0), fillers=True, start=0, tokens_per_step=2048), 80))
    assert all(len(batch) * max(len(ids) for ids, _ in batch) <= 2048 for batch in found)
    examples = [tuple(ids) for batch in found for ids, _ in batch]
    assert len(examples) == len(set(examples)) > 512


def test_padding_does_not_change_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer, 1)
    short, long = sorted(
        (encode(tokenizer, make_report("train", i), chat=False) for i in range(2)), key=lambda e: len(e[0])
    )
    assert len(short[0]) < len(long[0])
    with torch.no_grad():
        alone = [loss_of(model, [example], 0.1).item() for example in (short, long)]
        together = loss_of(model, [short, long], 0.1).item()
    weight = [0.1 * (prompt - 1) + (len(ids) - prompt) for ids, prompt in (short, long)]  # the first token is given
    mean = sum(w * loss for w, loss in zip(weight, alone, strict=True)) / sum(weight)
    assert together == pytest.approx(mean, rel=1e-5)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, step / 1000) for step in range(1000)]
    peak = rates.index(max(rates))
    assert 50 < peak < 150
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.03 * max(rates)
