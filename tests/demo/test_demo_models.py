"""The shipped models: they load in transformers and summarize unseen reports right, in 16 bit and in int4."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.demo import MODELS, NAMES, demo_model
from tools.demo.measure import AWQ_NIBBLE_COLUMN, chat_text, load, measure, unpack_awq
from tools.demo.tokenizer import EOS, IM_END


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(KeyError, match="target-awq"):
        demo_model("teacher")


def test_they_are_small_enough_to_ship() -> None:
    assert sorted(path.name for path in MODELS.iterdir()) == sorted(NAMES)
    assert sum(path.stat().st_size for path in MODELS.rglob("*")) < 12_000_000


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_a_folder_of_the_machine_it_was_made_on(name: str) -> None:
    for path in demo_model(name).glob("*.json"):
        values = [value for value in _strings(json.loads(path.read_text())) if value.startswith(("/", "~"))]
        # In tokenizer.json these are tokens; none is a path.
        assert all(len(value) <= 2 for value in values), (path, values)
        assert not {"_name_or_path", "name_or_path", "is_local"} & set(json.loads(path.read_text()))


def _strings(content: object) -> list[str]:
    if isinstance(content, dict):
        return [text for value in content.values() for text in _strings(value)]
    if isinstance(content, list):
        return [text for value in content for text in _strings(value)]
    return [content] if isinstance(content, str) else []


@pytest.mark.parametrize("name", NAMES)
def test_all_share_one_tokenizer(name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (demo_model(name) / file).read_bytes() == (demo_model("target") / file).read_bytes()
    tokenizer_json = json.loads((demo_model(name) / "tokenizer.json").read_text())
    assert tokenizer_json["padding"] is None
    assert tokenizer_json["truncation"] is None


@pytest.mark.parametrize("text", ["", "Größe 12 €", "日本語 🚀\n\tx", " a  b ", "pump 4711.50"])
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_generation_stops_at_the_end_of_text_and_of_the_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    stop = [tokenizer.get_vocab()[token] for token in (EOS, IM_END)]
    for name in NAMES:
        config = json.loads((demo_model(name) / "config.json").read_text())
        assert config["eos_token_id"] == stop
        assert config["bos_token_id"] == tokenizer.bos_token_id


def test_awq_words_are_unpacked_in_their_order() -> None:
    values = torch.arange(16, dtype=torch.int64).reshape(1, 16)
    words = torch.zeros(1, 2, dtype=torch.int64)
    for column in range(16):
        words[0, column // 8] |= values[0, column] << 4 * AWQ_NIBBLE_COLUMN.index(column % 8)
    words = words.where(words < 2**31, words - 2**32).to(torch.int32)
    assert unpack_awq(words).tolist() == values.tolist()


@pytest.mark.parametrize("name", ["target", "target-awq"])
def test_unseen_reports_are_summarized_right(name: str) -> None:
    result = measure(*load(demo_model(name)), num_reports=16)
    assert result.num_right >= 15, result


def test_a_chat_is_written_as_chatml() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    assert chat_text(tokenizer, "Hello") == "<|bos|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_is_answered_right() -> None:
    result = measure(*load(demo_model("target")), num_reports=16, chat=True)
    assert result.num_right >= 15, result


def test_a_damaged_model_is_told_from_a_sound_one() -> None:
    model, tokenizer = load(demo_model("target"))
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    assert measure(model, tokenizer, num_reports=16).num_right < 8


def test_the_draft_has_one_layer_and_the_same_vocabulary() -> None:
    draft = AutoModelForCausalLM.from_pretrained(demo_model("draft"))
    assert draft.config.num_hidden_layers == 1
    assert draft.config.vocab_size == AutoModelForCausalLM.from_pretrained(demo_model("target")).config.vocab_size
    assert draft.dtype == torch.bfloat16
