"""The cards: every figure is a number with a source, of a size that such cards have, and the wheel brings the file."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from pipeline.roofline.cards import FILE, load_cards, price_source

ROOT = Path(__file__).parents[2]


def test_every_card_is_whole_and_of_a_likely_size():
    cards = load_cards()
    assert [card.name for card in cards] == [
        "H200", "H100 80GB SXM", "A100 80GB SXM", "A100 40GB SXM", "L40S", "L4", "RTX 4090"
    ]  # fmt: skip
    assert len({card.device for card in cards}) == len(cards)
    for card in cards:
        assert 20e9 < card.memory_bytes < 200e9
        assert 2e11 < card.bandwidth_bytes_per_s < 1e13
        assert 1e14 < card.bf16_flops < 2e15
        assert (card.fp8_flops is not None) == (card.compute_capability >= (8, 9))
        assert card.fp8_flops is None or 1.9 < card.fp8_flops / card.bf16_flops < 2.1
        assert all(isinstance(v, int) for v in (card.memory_bytes, card.bandwidth_bytes_per_s, card.bf16_flops))
        assert card.nvlink_bytes_per_s is None or 2e11 < card.nvlink_bytes_per_s < 1e12
        assert (card.nvlink_bytes_per_s is not None) == ("SXM" in card.source)
        assert card.pcie_bytes_per_s == (64e9 if card.compute_capability >= (9, 0) else 32e9)
        assert "NVIDIA" in card.source
        assert "20" in card.source
        assert card.on_demand_usd is None or 0 < card.spot_usd < card.on_demand_usd < 10
    assert re.search(r", 20\d\d-\d\d-\d\d$", price_source())


def test_the_file_belongs_to_the_package():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert FILE.name in packaged["pipeline.roofline"]


def test_reading_it_loads_neither_torch_nor_ray():
    code = (
        "import sys, pipeline.roofline.cards as h; h.load_cards(); sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
