"""Kernels are compiled before a job: all that the engine launches, in steps of any kind, was compiled ahead.

The engine runs on the kernels for NVIDIA GPUs in Triton's interpreter, which compiles nothing; `variant` identifies
what would be compiled.
"""

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.startup.build import captured_shapes
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.resolve import Resolved, resolve
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.compile_ahead import DistinctLaunches, variant
from pipeline.kernels.triton.launch import Launch, recording
from pipeline.model.config import read_config
from tests.adapters import write_adapter
from tests.engine.test_gpu_kernels import DRAWN, QWEN3, capture
from tests.kernels.triton.problems import DEVICE
from tests.model_folders import Family, load_reference, write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]
SIZES = {"max_model_len": 160, "max_num_seqs": 5, "max_num_batched_tokens": 64, "block_size": 16}
MIXED = 32  # tokens of captured steps with prompts; larger ones are launched kernel by kernel
SPECULATION = {"method": "lookup", "num_speculative_tokens": 2, "forced": True}
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "drafts, fp8 cache": {"speculation": SPECULATION, "kv_cache_dtype": "fp8"},
    "deterministic": {"deterministic": True},
    "fp8 activations": {"activation_dtype": "fp8"},
    "adapters": {},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[Hashable, str]:
    """Return a dict that receives the variants that were run, with the names of their kernels."""
    found: dict[Hashable, str] = {}
    run = Launch.run

    def noted(self: Launch) -> Any:
        found[variant(self)] = self.kernel.__name__
        return run(self)

    monkeypatch.setattr(Launch, "run", noted)
    return found


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", dtype="float32", kernels="triton", **SIZES | options)


def loaded(config: EngineConfig) -> tuple[LoadedModel, Resolved]:
    shape = read_config(Path(config.model))
    resolved = resolve(config, shape)
    return LoadedModel.load(Path(config.model), shape, resolved, config.adapters), resolved


def compile_into(launches: DistinctLaunches, model: LoadedModel, resolved: Resolved) -> None:
    """Record what an engine compiles ahead, captured steps included, without compiling it."""

    def record(steps: Callable[[], None], log: Any, num_threads: int) -> None:
        with recording(launches.add):
            steps()

    model = replace(model, kernels=replace(model.kernels, compile_ahead=record))
    model.compile_kernels(resolved, captured_shapes(resolved, MIXED)[0], resolved.kv_pages, 1, lambda text: None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_steps_launch_was_compiled(
    kind: str, int4_folder: Path, launched: dict[Hashable, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)
    options, adapter = KINDS[kind], None
    if kind == "adapters":
        base = load_reference(int4_folder.parent / "plain")
        options, adapter = {"adapters": {"a": write_adapter(tmp_path / "a", base, 0, targets=".*_proj")}}, "a"
    config = config_of(int4_folder, **options)
    ahead = DistinctLaunches()
    compile_into(ahead, *loaded(config))
    assert all(variant(launch) == key for key, launch in ahead.of_variant.items()), "small tensors compile alike"
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 20 if kind == "deterministic" else 130).tolist()  # 128 keys are read together
    prompts = [stem + rng.integers(0, 255, n).tolist() for n in (1, 2)] + [[5, 6], rng.integers(0, 255, 20).tolist()]
    with Engine(config) as engine:
        launched.clear()  # loading widens weights, before anything is compiled ahead
        engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), adapter=adapter)
        shape = captured_shapes(resolve(config, read_config(int4_folder)), MIXED)[0]
        capture(engine, max_num_seqs=5, **shape._asdict())
        drawn = enumerate([{}, *DRAWN])
        params = [SamplingParams(max_tokens=2 + n % 2, ignore_eos=True, **own) for n, own in drawn]
        engine.generate(prompts, params)
    assert len(launched) >= 7
    missing = {name for key, name in launched.items() if key not in ahead.of_variant}
    assert not missing, f"compiled while a job runs: {missing}"
    kernels = set(launched.values())
    assert ("_cascade" in kernels) == (kind != "deterministic"), "prompts share a beginning"


def test_compiling_ahead_keeps_no_tensor_of_a_step(tmp_path: Path) -> None:
    """An 8B model's steps of 16,384 tokens, all layers kept, would take more memory than a card has."""
    counts = []
    for num_layers in (2, 6):
        shape = QWEN3 | {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
        path = write_checkpoint(tmp_path / str(num_layers), Family("qwen3", "qwen3"), shape, seed=4)
        model, resolved = loaded(config_of(path))
        launches, launched = DistinctLaunches(), list[weakref.ref[torch.Tensor]]()
        add = launches.add

        def noted(launch: Launch, add: Any = add, launched: Any = launched) -> None:
            launched.extend(weakref.ref(each) for each in launch.arguments if isinstance(each, torch.Tensor))
            add(launch)

        launches.add = noted  # type: ignore[method-assign]
        compile_into(launches, model, resolved)
        del model
        gc.collect()
        assert launched
        assert not any(tensor() is not None for tensor in launched)
        counts.append(len(launches.of_variant))
    assert counts[0] == counts[1]
