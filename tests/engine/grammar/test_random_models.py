"""500 random schemas, 100 on each of five random models: every output parses and is valid, whatever the model's weights
are stored in, and however its steps are cut, drafted and preempted."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from tests.engine.grammar.test_grammar_rows import PARAMS, random_schema
from tests.model_folders import FAMILIES, Family, small_config, write_checkpoint

FAMILY = {family.name: family for family in FAMILIES}
NUM_SCHEMAS = 100
# Preempts, and cuts prompts and runs of forced tokens.
TIGHT = {"kv_cache_memory_bytes": 120_000, "block_size": 4, "max_num_batched_tokens": 64}
LOOKUP = {"speculation": {"method": "lookup", "num_speculative_tokens": 4, "forced": True}}
DRAFT = {"speculation": {"method": "draft_model", "num_speculative_tokens": 3, "forced": True}}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32, preempted": ("llama3", {"dtype": "float32", **TIGHT}),
    "int4, lookup": ("qwen3", {"quantization": "int4-rtn", **LOOKUP}),
    "int8, fp8 cache": ("qwen2-tied", {"quantization": "int8", "kv_cache_dtype": "fp8", "dtype": "float32"}),
    "nf4, draft model": ("mistral-window", {"quantization": "nf4", "dtype": "float32", **DRAFT}),
    "int4, 8-bit activations, lookup, preempted": (
        "llama-linear-bias-tied", {"quantization": "int4-rtn", "activation_dtype": "int8", **LOOKUP, **TIGHT},
    ),
}  # fmt: skip


def checkpoint(folder, family: Family, seed: int) -> str:
    config = small_config(64, 128, 2, 4, 2, max_position_embeddings=1024) | family.options
    return str(write_checkpoint(folder, family, config, seed))


@pytest.mark.parametrize("number", range(len(ENGINES)), ids=list(ENGINES))
def test_every_output_parses_and_is_valid(number: int, tmp_path) -> None:
    name, (family, options) = list(ENGINES.items())[number]
    rng = np.random.default_rng([17, number])
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    requests = []
    for row, schema in enumerate(schemas):
        params = SamplingParams(max_tokens=900, seed=row, **PARAMS[row % len(PARAMS)])  # type: ignore[arg-type]
        prompt = rng.integers(0, 255, int(rng.integers(1, 40))).tolist()
        requests.append(Request(row, prompt, replace(params, structured_outputs={"json": schema})))
    if "draft" in name:
        options = options | {
            "speculation": options["speculation"] | {"model": checkpoint(tmp_path / "draft", FAMILY[family], 99)}
        }
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_threads": 1, "speculation": "off"} | options
    model = checkpoint(tmp_path / "model", FAMILY[family], number)
    with Engine(EngineConfig(model, device="cpu", **settings)) as engine:
        done = {c.row_id: c for c in engine.stream(requests)}
        stats = engine.stats
    for row, schema in enumerate(schemas):
        assert (done[row].finish_reason, done[row].error) == ("stop", None), done[row]
        jsonschema.validate(json.loads(done[row].text), schema)
    assert len({c.text for c in done.values()}) > NUM_SCHEMAS * 0.5  # the smallest models repeat themselves
    assert (stats.num_preemptions > 0) == ("preempted" in name)
    assert (sum(stats.drafted_by_position) > 0) == ("lookup" in name or "draft" in name)
