"""Pages that layers with and without a window share: no two layers write to the same memory, and a row holds what the
formula says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import Request
from pipeline.kernels.cache import FP8
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.kv_cache import KVCache, shared_kv_pages, single_kv_pages
from pipeline.model.layer_spec import Heads, LayerSpec
from pipeline.roofline.kv_pages import KVPages
from tests.model_folders import FAMILIES, small_config, write_checkpoint
from tests.parity.harness import float32_engine, greedy

BLOCK, CPU = 4, torch.device("cpu")
KINDS = {  # numbers of layers with a window before each layer without one
    "one to one": [1, 1, 1],
    "five to one": [5, 5],
    "more than five to one": [5, 1, 7],
    "uneven": [2, 1, 0],
}
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 99, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "model_type": "llama"}  # fmt: skip


def config_of(tmp_path: Path, windowed: list[int], heads: Heads | None = None) -> ModelConfig:
    """Return a config with these layers. heads: of those without a window, if they differ."""
    num_layers = sum(windowed) + len(windowed)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    config = read_config(tmp_path)
    layers = list[LayerSpec]()
    for count in windowed:
        layers += [replace(config.layers[0], window=64)] * count + [replace(config.layers[0], heads=heads)]
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("heads", [None, Heads(1, 16), Heads(1, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_two_layers_write_to_the_same_memory(
    kind: str, heads: Heads | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = config_of(tmp_path, KINDS[kind], heads)
    pages = shared_kv_pages(config, BLOCK, dtype, 4096)
    assert pages.window is not None
    num_pages = 4
    kv = KVCache.allocate(config, num_pages, pages, dtype, CPU)
    owners = {False: np.array([0, 2]), True: np.array([1, 3])}  # of each kind of layers
    written = []
    for layer, windowed in zip(kv.layers, kv.is_windowed):
        for block in pages.block_ids(owners[windowed], windowed).tolist():
            for tensor in layer.tensors:
                value = len(written) % 251 + 1
                bits = tensor[block].view(torch.uint8)
                bits.fill_(value)
                written.append((bits, value))
    assert all((bits == value).all() for bits, value in written)
    storages = {tensor.untyped_storage().data_ptr(): tensor for layer in kv.layers for tensor in layer.tensors}
    assert sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) == num_pages * pages.page_bytes
    kv.fill([1, 2], 0.0)
    for layer, windowed in zip(kv.layers, kv.is_windowed):
        for block in pages.block_ids(owners[windowed] if windowed else owners[False], windowed).tolist():
            is_cleared = block in pages.block_ids(np.array([1, 2]), windowed)
            values = layer.k_CBKD[block].float()
            scale = 1.0 if layer.k_scale_CKB is None else layer.k_scale_CKB[block].abs().sum()
            assert bool((values * scale == 0).all()) == is_cleared


@pytest.mark.parametrize("pages", [KVPages(4, 1), KVPages(4, 1, 9, 3), KVPages(16, 1, 1024, 5), KVPages(2, 1, 2, 1)])
def test_no_sequence_holds_more_pages_than_the_formula(pages: KVPages) -> None:
    rng = np.random.default_rng(pages.block_size)
    for _ in range(300):
        end = int(rng.integers(1, 9000))
        new = int(rng.integers(1, end + 1))
        held = -(-end // pages.page_size)
        if pages.window is not None:
            held += -(-end // pages.block_size) - int(pages.first_seen(end - new))
        assert held <= pages.num_pages(end, new)
        num_pages = int(rng.integers(1, 900))
        longest = pages.max_tokens(num_pages)
        assert longest == 0 or pages.num_pages(longest) <= num_pages
        assert pages.num_pages(longest + 1) > num_pages


def test_layers_share_pages_only_where_that_saves(tmp_path: Path) -> None:
    config = config_of(tmp_path, [5, 5])
    alone = single_kv_pages(config, BLOCK, torch.float32)
    assert shared_kv_pages(config, BLOCK, torch.float32, 64) == alone
    shared = shared_kv_pages(config, BLOCK, torch.float32, 4096)
    assert (shared.window, shared.blocks_per_page, shared.page_size) == (64, 5, 5 * BLOCK)
    assert shared.num_pages(4096) * shared.page_bytes < 0.25 * alone.num_pages(4096) * alone.page_bytes
    only_windows = replace(config, layers=config.layers[:5])
    assert shared_kv_pages(only_windows, BLOCK, torch.float32, 4096).window is None
    odd = config_of(tmp_path, [5, 5], Heads(3, 16))
    assert shared_kv_pages(odd, BLOCK, torch.float32, 4096).window is None


def test_a_row_of_ten_windows_holds_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """Each step leaves at most the pages of the formula, some steps all of them: far less than pages that keep all
    tokens."""
    window, block = 32, 8
    family = next(family for family in FAMILIES if family.name == "gemma3")
    types = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": window}
    config = small_config(32, 48, 3, 2, 1, max_position_embeddings=512) | family.options | types
    folder = write_checkpoint(tmp_path / "model", family, config, seed=1)
    prompt = np.random.default_rng(0).integers(0, 255, 5 * window).tolist()
    spare, before = list[int](), 0
    with float32_engine(
        folder, max_model_len=16 * window, max_num_batched_tokens=40, block_size=block, speculation="off"
    ) as engine:
        table, pages = engine.table, engine.table.pages
        engine.add(Request("row", prompt, greedy(5 * window)))
        while not engine.step():
            (slot,) = engine.scheduler.running
            computed = int(table.num_computed[slot])
            spare.append(pages.num_pages(computed, computed - before) - engine.pool.num_held)
            before = computed
        assert len(spare) == 4 + 5 * window - 2
        assert str(engine.resolved["kv_cache"]).endswith(f", 8 rows of {16 * window} tokens")
        alone = single_kv_pages(read_config(folder), block, torch.float32)
        longest = 10 * window - 1
        assert pages.num_pages(longest) * pages.page_bytes < 0.45 * alone.num_pages(longest) * alone.page_bytes
    assert min(spare) == min(spare[-window:]) == 0
