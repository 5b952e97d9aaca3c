"""Shares of every family's weights: their sum is the whole model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.config import EngineConfig
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.resolve import quantized_on_load, resolve
from pipeline.errors import ConfigError
from pipeline.kernels.ranks import ONE_RANK, OneRank, ProcessRanks
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.kv_cache import single_kv_pages
from pipeline.model.load import as_stored
from pipeline.model.sharding import exchanges_of_step
from tests.adapters import write_adapter
from tests.model.ranks import ThreadRanks, on_ranks
from tests.model_folders import FAMILIES, Family, draw_config, load_reference, write_checkpoint

TOLERANCE = 1e-4  # sums are split
NUM_TOKENS = 24


def checkpoint(folder: Path, name: str, **options: Any) -> Path:
    """Write a tiny checkpoint of a family that 4 ranks can share, with an odd vocabulary."""
    family = next(family for family in FAMILIES if family.name == name)
    config = draw_config(family, np.random.default_rng(sum(name.encode())))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    heads = 12 if kv_heads < 4 else 4 if family.options.get("num_key_value_heads") else 8
    width = config["hidden_size"] if "head_dim" in config else heads * head_dim
    config |= {"num_attention_heads": heads, "hidden_size": width, "vocab_size": 321} | options
    if name == "gpt2":  # transformers computes its width from hidden_size
        config.pop("intermediate_size")
    return write_checkpoint(folder, Family(name, family.model_type), config, seed=5)


def load(folder: Path, ranks: OneRank, config: ModelConfig, **options: Any) -> LoadedModel:
    engine = EngineConfig(str(folder), device="cpu", dtype="float32", max_model_len=256, **options)
    return LoadedModel.load(folder, config, resolve(engine, config.local(ranks.size)), engine.adapters, ranks)


def config_of(folder: Path, quantization: str = "none") -> ModelConfig:
    return quantized_on_load(as_stored(read_config(folder), folder), quantization)


def one_step(num_rows: int = NUM_TOKENS, adapter: int = -1) -> StepInput:
    """Return a prompt of random tokens, of which the last `num_rows` have logits."""
    step = dummy_step(
        count_S=np.array([NUM_TOKENS]),
        context_len_S=np.array([NUM_TOKENS]),
        block_table_SM=np.arange(3, dtype=np.int32)[None],
        block_size=8,
        row_R=np.arange(NUM_TOKENS - num_rows, NUM_TOKENS),
    )
    token_id_T = np.random.default_rng(1).integers(0, 321, NUM_TOKENS)
    return replace(step, token_id_T=token_id_T, adapter_S=np.array([adapter]) if adapter >= 0 else None)


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return loaded.runner(4, single_kv_pages(loaded.config, 8, loaded.kv_dtype), 256)


def logits_of(load: Callable[[OneRank], LoadedModel], step: StepInput, size: int) -> torch.Tensor:
    """Return the leader's logits, with `size` ranks."""

    def run(ranks: OneRank) -> torch.Tensor:
        return runner_of(load(ranks)).execute(step)

    return run(ONE_RANK) if size == 1 else on_ranks(size, run)[0]


NOT_DIVIDED = "olmo", "gemma4-moe", "qwen3-5", "qwen3-next"


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if not family.name.startswith(NOT_DIVIDED)])
def test_logits_of_every_family_equal_those_of_one_rank(name: str, tmp_path: Path) -> None:
    """12 heads over 4 ranks are an odd number each; one or two KV heads are replicated."""
    folder = checkpoint(tmp_path, name)
    config, step = config_of(folder), one_step()
    whole = logits_of(lambda ranks: load(folder, ranks, config), step, 1)
    for size in (2, 4):
        shared = logits_of(lambda ranks: load(folder, ranks, config), step, size)
        assert shared.shape == whole.shape
        assert (shared - whole).abs().max() < TOLERANCE * max(1.0, float(whole.abs().max())), size


@pytest.mark.parametrize("quantization", ["int8", "int4-rtn", "nf4"])
@pytest.mark.parametrize("name", ["llama-linear-bias-tied", "qwen3-moe-mixed"])
def test_quantized_weights(name: str, quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "head_dim": 16, "intermediate_size": 384, "moe_intermediate_size": 192}
    folder = checkpoint(tmp_path, name, num_attention_heads=12, num_key_value_heads=2, **sizes)
    config, step = config_of(folder, quantization), one_step()
    whole, *shared = (logits_of(lambda ranks: load(folder, ranks, config), step, size) for size in (1, 2, 4))
    for each in shared:
        assert (each - whole).abs().max() < TOLERANCE * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("name", ["llama-linear-bias-tied", "phi3", "gpt2"])
def test_adapters(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", name)
    adapter = write_adapter(tmp_path / "adapter", load_reference(folder), 3, targets=".*_proj|c_attn|c_fc|c_proj",
                            fan_in_fan_out=name == "gpt2")  # fmt: skip
    config, step, options = config_of(folder), one_step(adapter=0), {"adapters": {"one": str(adapter)}}
    base = logits_of(lambda ranks: load(folder, ranks, config), one_step(), 1)
    whole, *shared = (logits_of(lambda ranks: load(folder, ranks, config, **options), step, size) for size in (1, 2, 4))
    assert (base - whole).abs().max() > 0.1
    for each in shared:
        assert (each - whole).abs().max() < TOLERANCE * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("num_rows", [NUM_TOKENS, 3, 0])
def test_exchanges_of_a_step_are_known_before(num_rows: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "llama3")
    config = config_of(folder)

    def run(ranks: Any) -> list[Any]:
        runner_of(load(folder, ranks, config)).execute(one_step(num_rows))
        return ranks.sent

    for sent in on_ranks(2, run):
        assert [each for each in sent if each.rows] == exchanges_of_step(config, 2, NUM_TOKENS, num_rows, num_rows)


@pytest.mark.parametrize("size", [2, 4])
def test_hidden_states_are_the_same_bits_on_all_ranks(size: int, tmp_path: Path) -> None:
    """Otherwise ranks would drift apart from layer to layer. gloo adds in one order for all."""
    folder = checkpoint(tmp_path, "llama3")
    config = config_of(folder)

    def run(thread: ThreadRanks) -> torch.Tensor:
        ranks = ProcessRanks(thread.rank, size, str(tmp_path / "store"), torch.device("cpu"), lambda error: error)
        hidden_NH = runner_of(load(folder, ranks, config)).execute_and_read(one_step(), np.arange(NUM_TOKENS))[1]
        ranks.close()
        return hidden_NH

    first, *others = on_ranks(size, run)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("name", "size", "options", "reason"),
    [
        ("llama3", 5, {}, "its 12 query heads are not divisible by it. This model allows 1, 2, 3, 4"),
        ("llama3", 2, {"num_key_value_heads": 3}, "its 3 KV heads can neither be divided nor replicated"),
        ("qwen2-moe", 4, {"shared_expert_intermediate_size": 66}, "feed-forward widths of 66 are not divisible"),
        ("olmo2", 2, {}, "its norms of queries and keys go over all heads"),
        ("gemma4-moe", 2, {}, "norms of its experts' outputs need whole sums"),
        (
            "gemma4",
            2,
            {"num_attention_heads": 12, "num_global_key_value_heads": 3},
            "its 3 KV heads can neither be divided nor replicated",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    name: str, size: int, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read_config(checkpoint(tmp_path, name, **options))
    with pytest.raises(ConfigError, match=f"engine.tensor_parallel_size = {size}: .*{reason}"):
        config.local(size)
