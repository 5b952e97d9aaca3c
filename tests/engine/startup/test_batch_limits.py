"""Rows and tokens of a step by default: by the device, the same for the engine, `pipeline plan`, doctor and presets."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.batch_limits import CPU_LIMITS, BatchLimits, max_default_seqs
from pipeline.engine.startup.resolve import Resolved, resolve
from pipeline.estimate.fit import ServedModel
from pipeline.model.config import ModelConfig, read_config
from pipeline.roofline.cards import Card, load_cards

CARDS = {card.name: card for card in load_cards()}
DEMO = read_config(Path("pipeline/demo/models/target"))
EIGHT_B = replace(DEMO, hidden_size=4096, intermediate_size=14336,
                  layers=DEMO.layers[:1] * 32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256,
                  tie_embeddings=False, dtype=torch.bfloat16)  # fmt: skip
THIRTY_TWO_B = replace(EIGHT_B, hidden_size=5120, intermediate_size=27648, layers=DEMO.layers[:1] * 64, num_heads=40)
EXPECTED = {
    "H200": BatchLimits(1024, 16384),
    "H100 80GB SXM": BatchLimits(1024, 16384),
    "A100 80GB SXM": BatchLimits(512, 8192),
    "A100 40GB SXM": BatchLimits(512, 8192),
    "L40S": BatchLimits(512, 8192),
    "L4": BatchLimits(256, 8192),
    "RTX 4090": BatchLimits(256, 8192),
}
PRESETS = {"h200": "H200", "h100": "H100 80GB SXM", "a100": "A100 80GB SXM", "l4": "L4"}


def resolved_on(card: Card, model: ModelConfig, monkeypatch: pytest.MonkeyPatch, **options: int) -> Resolved:
    major, minor = card.compute_capability
    properties = SimpleNamespace(total_memory=card.memory_bytes, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return resolve(EngineConfig("nowhere", device="cuda", **options), model)  # type: ignore[arg-type]


def limits_of(resolved: Resolved) -> BatchLimits:
    return BatchLimits(resolved.max_num_seqs, resolved.max_num_batched_tokens)


@pytest.mark.parametrize("name", CARDS)
def test_the_engine_uses_the_limits_of_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARDS[name]
    assert limits_of(resolved_on(card, EIGHT_B, monkeypatch)) == EXPECTED[name]
    for model in (EIGHT_B, THIRTY_TWO_B):
        assert ServedModel(model, EngineConfig("")).on_card(card, 1).limits == limits_of(
            resolved_on(card, model, monkeypatch)
        )


def test_large_steps_need_room_next_to_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of(resolved_on(CARDS["H100 80GB SXM"], THIRTY_TWO_B, monkeypatch)) == BatchLimits(512, 8192)
    assert limits_of(resolved_on(CARDS["H200"], THIRTY_TWO_B, monkeypatch)) == BatchLimits(1024, 16384)


def test_one_given_limit_changes_the_other_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARDS["H100 80GB SXM"]
    for options, expected in (
        ({"max_num_batched_tokens": 700}, BatchLimits(700, 700)),
        ({"max_num_seqs": 20_000}, BatchLimits(20_000, 20_000)),
        ({"max_num_seqs": 64}, BatchLimits(64, 16384)),
    ):
        assert limits_of(resolved_on(card, EIGHT_B, monkeypatch, **options)) == expected
        assert ServedModel(EIGHT_B, EngineConfig("", **options)).on_card(card, 1).limits == expected


def test_limits_of_a_cpu_and_of_presets_are_those_of_the_engine() -> None:
    assert limits_of(resolve(EngineConfig("nowhere", device="cpu"), EIGHT_B)) == CPU_LIMITS == BatchLimits(64, 2048)
    assert max_default_seqs(on_gpu=True) == 1024
    for preset, card in PRESETS.items():
        engine = yaml.safe_load(Path(f"configs/{preset}.yaml").read_text())["engine"]
        assert BatchLimits(engine["max_num_seqs"], engine["max_num_batched_tokens"]) == EXPECTED[card], preset
