"""Drafts with a real model, and the options of an engine that configure them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.config import EngineConfig
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError
from pipeline.kernels.cpu.layer_loop import CompiledLayerLoop
from tests.engine.drafts.proposers import Recorded, draft_with
from tests.engine.drafts.random_rows import same
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("speculation"), Family("llama3", "llama"), seed=8)


REAL_KINDS = [
    {},
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40, "logprobs": 1},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3, "logprobs": 3},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(100))},
    {"stop": ("e",), "temperature": 0.8},
]


def test_the_real_model_gives_the_same_tokens(folder: Path) -> None:
    """Prompts that repeat themselves, so that the proposer drafts all the time; and drafts that are mostly right."""
    rng = np.random.default_rng(5)
    prompts = [(rng.integers(0, 255, int(rng.integers(1, 20))).tolist() * 4)[:70] for _ in range(32)]
    params = [
        SamplingParams(**{"max_tokens": 12 + row % 5, "ignore_eos": True, "seed": row} | REAL_KINDS[row % 8])
        for row in range(32)
    ]
    with float32_engine(folder) as engine:
        plain = engine.generate(prompts, params)
        num_plain_steps = engine.stats.num_steps
    with float32_engine(
        folder, speculation={"method": "lookup", "num_speculative_tokens": 3, "forced": True}
    ) as engine:
        assert engine.resolved["speculation"] == "lookup, up to 3 tokens, in every step"
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        assert sum(engine.stats.drafted_by_position[:3]) == sum(engine.stats.drafted_by_position) > 100
    with float32_engine(folder, kv_cache_memory_bytes=1 << 18, max_model_len=96) as engine:
        outputs = {row: completion.token_ids for row, completion in enumerate(plain)}
        draft_with(engine, Recorded(engine.table, outputs, rng, vocab_size=250))
        engine.scheduler.admission.expected_output = 1
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        drafted, accepted = sum(engine.stats.drafted_by_position), sum(engine.stats.accepted_by_position)
        assert accepted > 100
        assert engine.stats.rejected_drafts == drafted - accepted > 0
        assert 0 < engine.stats.drafts_us < engine.stats.decode_us
        assert engine.stats.num_steps < num_plain_steps


def test_steps_with_drafts_run_through_all_layers_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that also compute prompts do not, since their last layer computes only some tokens."""
    prompts = [([7, 8, 9, 7] * 6)[:length] for length in (5, 18, 23)]
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    drafted: list[int] = []
    run = CompiledLayerLoop.run

    def seen(self: CompiledLayerLoop, x_TH: torch.Tensor, *others: Any) -> None:
        attn_metadata = others[2]
        drafted.append(len(x_TH) - len(attn_metadata.context_len_S))
        run(self, x_TH, *others)

    monkeypatch.setattr(CompiledLayerLoop, "run", seen)
    with float32_engine(folder, quantization="int4-rtn", speculation="off") as engine:
        plain = engine.generate(prompts, params)
        assert drafted
        assert not any(drafted)
    drafted.clear()
    speculation = {"method": "lookup", "num_speculative_tokens": 6, "forced": True}
    with float32_engine(folder, quantization="int4-rtn", speculation=speculation) as engine:
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        assert sum(map(bool, drafted)) >= engine.stats.num_draft_steps - len(prompts) > 10
        assert max(drafted) > 6


@pytest.mark.parametrize("speculation", ["auto", "lookup", {"method": "lookup"}])
def test_lookup_is_the_default(folder: Path, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numba it is off, and the engine reports that."""
    with float32_engine(folder, speculation=speculation) as engine:
        assert isinstance(engine.spec_decoder and engine.spec_decoder.proposer, NgramProposer)
        assert engine.resolved["speculation"] == "lookup, up to 6 tokens, where it pays"
    assert EngineConfig("x").speculation_config.method == "auto"
    for module in ("resolve", "build"):
        monkeypatch.setattr(f"pipeline.engine.startup.{module}.numba_unavailable_reason", lambda: "is not installed")
    for given, resolved in (
        (speculation, "off: lookup needs numba, which is not installed"),
        ("off", "off"),
        (False, "off"),
    ):
        with float32_engine(folder, speculation=given) as engine:
            assert engine.spec_decoder is None
            assert engine.resolved["speculation"] == resolved


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ("on", "speculation.method = 'on': expected one of auto, off, lookup, draft_model"),
        (True, "expected auto, off, lookup, draft_model, or a mapping"),
        ({"method": "eagle"}, "expected one of auto, off, lookup, draft_model"),
        ("draft_model", "speculation.model: required by method draft_model"),
        ({"model": "x"}, "speculation.model: only for method draft_model, but the method is auto"),
        ({"method": "lookup", "forced": 1}, "expected true or false"),
        ({"method": "lookup", "most": 3}, "a mapping with keys among method, model, num_speculative_tokens, forced"),
        ({"method": "lookup", "num_speculative_tokens": 0}, "from 1 to 32"),
        ({"method": "lookup", "num_speculative_tokens": True}, "from 1 to 32"),
    ],
)
def test_speculation_that_is_not_known_is_refused(speculation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig("x", speculation=speculation)
