"""16-bit copies of 4-bit weights on a GPU, and other decisions that all ranks must make alike."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.demo import demo_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.engine.startup import build, loaded
from pipeline.engine.startup import resolve as resolving
from pipeline.engine.startup.memory import SLACK_BYTES, cache_before_dense, weight_bytes
from pipeline.kernels.ranks import OneRank
from pipeline.model.config import read_config
from pipeline.tokenization.tokenizer import Tokenizer

GPU = torch.device("cuda", 0)
FOLDER = demo_model("target-awq")


class SelectedError(Exception):
    """Raised in place of loading, with `keep_dense`."""


class TightRank(OneRank):
    """Another rank has no memory for the copies."""

    def least(self, value: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(device: torch.device, dtype: torch.dtype, kernels: str, keep_dense: bool, *_: object) -> None:
        raise SelectedError(keep_dense)

    properties = SimpleNamespace(total_memory=24 << 30, major=9, minor=0)
    monkeypatch.setattr(resolving, "find_device", lambda name: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(loaded, "select_kernels", select)


def keeps_dense(
    monkeypatch: pytest.MonkeyPatch, free: int, draft: str | None = None, ranks: OneRank | None = None
) -> bool:
    monkeypatch.setattr(loaded, "gpu_share_bytes", lambda *_: free)
    drafts = SpeculationConfig("draft_model", draft, 3) if draft else SpeculationConfig("off")
    config = EngineConfig(str(FOLDER), max_num_seqs=4, max_model_len=256, speculation=drafts)
    model = read_config(FOLDER)
    spec = build.LoadSpec(config, FOLDER, model, resolving.resolve(config, model), None)
    with pytest.raises(SelectedError) as selected:
        build.load_runner(spec, ranks or OneRank(), lambda text: None, Tokenizer.from_folder(str(FOLDER)))
    return selected.value.args[0]


def need_of(folder: str, with_copies: bool) -> int:
    model = read_config(demo_model(folder))
    cache = cache_before_dense(4, 256) * model.kv_bytes_per_token(torch.bfloat16)
    return weight_bytes(model, GPU, torch.bfloat16, keeps_dense=with_copies) + cache


def test_a_draft_model_and_its_cache_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    target = need_of("target-awq", with_copies=True) + SLACK_BYTES
    assert keeps_dense(monkeypatch, target)
    assert not keeps_dense(monkeypatch, target - 1)
    both = target + need_of("draft", with_copies=False)
    assert keeps_dense(monkeypatch, both, "demo:draft")
    assert not keeps_dense(monkeypatch, both - 1, "demo:draft")


def test_ranks_keep_copies_only_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keeps_dense(monkeypatch, 24 << 30, ranks=TightRank())


@pytest.mark.parametrize(("multiprocessors", "agreed"), [((132, 132), 40), ((132, 114), 0)])
def test_prompts_are_captured_only_alike(
    multiprocessors: tuple[int, int], agreed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles of a captured step depend on the GPU, and with them which steps are captured."""
    own, other = multiprocessors
    ranks = OneRank()
    monkeypatch.setattr(ranks, "size", 2)
    monkeypatch.setattr(ranks, "least", lambda value: min(value, {own: other, -own: -other}.get(value, value)))
    monkeypatch.setattr(build, "max_mixed_tokens", lambda *_: 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=own))
    resolved: Any = SimpleNamespace(device=GPU)
    assert build._max_mixed_tokens(read_config(FOLDER), resolved, ranks) == agreed
