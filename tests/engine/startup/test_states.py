"""Memory of models whose layers keep states: rows at once, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import Engine, EngineConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.estimate.fit import ServedModel
from pipeline.roofline.cards import load_cards
from tests.model_folders import FAMILIES, draw_config, write_checkpoint
from tests.parity.harness import state_bytes

ONE_ROW = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = next(each for each in FAMILIES if each.name == "qwen3-5")
    config = draw_config(family, np.random.default_rng(1))
    return write_checkpoint(tmp_path_factory.mktemp("model"), family, config, seed=1)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_rows_at_once_follow_from_the_memory_of_their_states(folder: Path, state_dtype: str) -> None:
    given = EngineConfig(model=str(folder), state_dtype=state_dtype)
    config = ServedModel.read(folder, given).config
    of_row, of_token = config.state_bytes(torch.float32), config.kv_bytes_per_token(torch.float32)
    budget = 20 * (of_row + 128 * of_token)
    with Engine(replace(given, kv_cache_memory_bytes=budget, **ONE_ROW)) as engine:
        assert engine.resolved["state_dtype"] == state_dtype
        kept = {str(state.state_LVKD.dtype) for state in engine.runner.kv.states if state}  # type: ignore[attr-defined]
        assert kept == {f"torch.{state_dtype}"}
        num_rows, num_pages = int(engine.resolved["max_num_seqs"]), engine.pool.num_blocks
        assert 16 <= num_rows < 20  # two or three states are for prefixes
        held = state_bytes(engine) + num_pages * engine.table.pages.page_bytes
        assert budget - 8 * of_token < held <= budget
        assert num_pages * 8 >= num_rows * 128
    with pytest.raises(ConfigError, match=rf"max_num_seqs = 400: the states of a row take .* use at most {num_rows}, "):
        Engine(replace(given, kv_cache_memory_bytes=budget, max_num_seqs=400, **ONE_ROW))
    wide = ServedModel.read(folder, replace(given, state_dtype="float32")).config.state_bytes(torch.float32)
    states = sum(layer.mixer.num_outputs * layer.mixer.key_dim for layer in config.layers if layer.mixer)
    assert wide - of_row == (2 * states if state_dtype == "bfloat16" else 0)


def test_the_fit_on_a_card_counts_states(folder: Path) -> None:
    card = next(card for card in load_cards() if card.name == "L4")
    served = ServedModel.read(folder, EngineConfig(model=str(folder)))
    fit = served.on_card(card, 1)
    of_row = served.config.state_bytes(fit.dtype)
    for length in (8, 512):
        num_rows, of_cache = fit.num_sequences(length), fit.pages.num_pages(length) * fit.pages.page_bytes
        states = num_rows + num_rows // 16 + 2
        assert 0 <= fit.kv_bytes - num_rows * of_cache - states * of_row < of_cache + 2 * of_row


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deterministic": True}, ConfigError, "engine.deterministic: not supported for models with states"),
        ({"state_dtype": "fp8"}, ConfigError, "engine.state_dtype = .fp8.: expected one of float32, bfloat16"),
        ({"state_dtype": "bfloat16", "model": "demo:target"}, ConfigError, "this model keeps no states"),
        ({"tensor_parallel_size": 2}, ConfigError, r"layers with states \(Gated DeltaNet\).*allows 1$"),
        ({"speculation": {"method": "draft_model", "model": "FOLDER"}}, ModelError, "a draft model with states"),
    ],
    ids=str,
)
def test_what_states_do_not_support_is_refused(folder: Path, options: dict, error: type, message: str) -> None:
    if "speculation" in options:
        options = {"speculation": options["speculation"] | {"model": str(folder)}}
    with pytest.raises(error, match=message):
        Engine(EngineConfig(**{"model": str(folder)} | ONE_ROW | options))
