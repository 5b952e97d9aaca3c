"""Shipped adapters: small, and right about unseen reports on the int4 model."""

from pipeline.demo import ADAPTERS, demo_adapter, demo_model
from pipeline.model.config import read_config
from pipeline.model.lora import read_adapter
from tools.demo.adapters import measure


def test_they_are_small_and_change_every_linear() -> None:
    for name in ADAPTERS:
        assert sum(path.stat().st_size for path in demo_adapter(name).iterdir()) < 150_000
        layers = read_adapter(demo_adapter(name), read_config(demo_model("target-awq")))
        assert all(set(updates) == {"qkv", "o", "gate_up", "down"} for updates in layers)


def test_unseen_reports_are_summarized_in_their_form() -> None:
    shares = measure({name: f"demo:{name}" for name in ADAPTERS}, "demo:target-awq", 16)
    assert min(shares.values()) >= 15 / 16, shares
