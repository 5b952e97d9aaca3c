"""Shipped models: they load in transformers and summarize unseen reports right, in 16 bit and in int4."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.demo import MODELS, NAMES, demo_model
from tools.demo.measure import chat_text, load, measure
from tools.demo.tokenizer import EOS, IM_END


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(KeyError, match="target-awq"):
        demo_model("teacher")


def test_they_are_small_enough_to_ship() -> None:
    assert sorted(path.name for path in MODELS.iterdir()) == sorted(NAMES)
    assert sum(path.stat().st_size for path in MODELS.rglob("*")) < 12_000_000


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_a_folder_of_the_build_machine(name: str) -> None:
    for path in demo_model(name).glob("*.json"):
        text = path.read_text()  # tokens in tokenizer.json are not paths
        assert not re.search(r'"[/~][^"]{2,}"(?!:)|"_?name_or_path"|"is_local"', text), path


@pytest.mark.parametrize("name", NAMES)
def test_all_share_one_tokenizer(name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (demo_model(name) / file).read_bytes() == (demo_model("target") / file).read_bytes()
    tokenizer_json = json.loads((demo_model(name) / "tokenizer.json").read_text())
    assert tokenizer_json["padding"] is None
    assert tokenizer_json["truncation"] is None


def test_the_tokenizer_round_trips_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    for text in ("", "Größe 12 €", "日本語 🚀\n\tx", " a  b ", "pump 4711.50"):
        ids = tokenizer(text)["input_ids"]
        assert (ids[0], tokenizer.decode(ids[1:])) == (tokenizer.bos_token_id, text)


def test_generation_stops_at_the_end_of_text_and_of_the_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    stop = [tokenizer.get_vocab()[token] for token in (EOS, IM_END)]
    for name in NAMES:
        config = json.loads((demo_model(name) / "config.json").read_text())
        assert config["eos_token_id"] == stop
        assert config["bos_token_id"] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["target", "target-awq"])
def test_unseen_reports_are_summarized_right(name: str) -> None:
    result = measure(*load(demo_model(name)), num_reports=16)
    assert result.num_right >= 15, result


def test_a_chat_is_written_as_chatml_and_answered_right() -> None:
    model, tokenizer = load(demo_model("target"))
    assert chat_text(tokenizer, "Hello") == "<|bos|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    result = measure(model, tokenizer, num_reports=16, chat=True)
    assert result.num_right >= 15, result


def test_the_draft_has_one_layer_and_the_same_vocabulary() -> None:
    draft = AutoModelForCausalLM.from_pretrained(demo_model("draft"))
    assert draft.config.num_hidden_layers == 1
    assert draft.config.vocab_size == AutoModelForCausalLM.from_pretrained(demo_model("target")).config.vocab_size
    assert draft.dtype == torch.bfloat16
