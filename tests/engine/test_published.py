"""Checkpoints that declare 8-bit activations or an 8-bit KV cache run as declared where the device multiplies them, and
keep a byte per weight elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.memory import weight_bytes
from pipeline.engine.startup.resolve import resolve
from pipeline.kernels.activations.act_quant import Activations
from pipeline.kernels.cache import FP8
from pipeline.kernels.cpu.linear.linear_int8 import Int8Linear, has_vnni
from pipeline.kernels.select import native_activations
from pipeline.kernels.triton.linear.dispatch import TorchLinear, TwoPathLinear
from pipeline.kernels.triton.linear.fp8 import Fp8Linear
from pipeline.model.config import read_config
from tests.engine.test_activations import completed
from tests.engine.test_gpu_kernels import engine_of
from tests.kernels.triton.problems import DEVICE, recorded_launches
from tests.model_folders import Family, small_config, write_checkpoint
from tests.weights.packers import Pack, fp8, int_quantized, pack_pair

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
STATIC = FLOAT | {"strategy": "tensor", "dynamic": False}
PER_TOKEN = {"strategy": "token", "dynamic": True}
CPU = torch.device("cpu")


def compressed(weights: dict[str, Any], inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the options that llm-compressor writes."""
    form = "int-quantized" if weights["type"] == "int" else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | more


@dataclass(frozen=True)
class Layout:
    """Options of a published checkpoint, how its linears are stored, and bytes of a weight with fp8 activations."""

    options: dict[str, Any]
    pack: Pack
    weight_bytes: float = 1.0
    file: str = "config.json"


WHOLE, CHANNELS = fp8(None, "weight_scale"), fp8(None, "weight_scale", per_output=True)
LAYOUTS = {
    "FP8 dynamic": Layout(
        compressed(FLOAT | {"strategy": "channel", "dynamic": False}, FLOAT | PER_TOKEN), CHANNELS
    ),
    "FP8 static": Layout(compressed(STATIC, STATIC, kv_cache_scheme=STATIC), WHOLE),
    "fp8 in blocks": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8((128, 128), "weight_scale_inv"),
        1 + 4 / 128,
    ),
    "fp8, static": Layout({"quant_method": "fp8", "activation_scheme": "static"}, WHOLE),
    "Model Optimizer": Layout(
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        WHOLE,
        file="hf_quant_config.json",
    ),
}  # fmt: skip
WITH_CACHE = ("FP8 static", "Model Optimizer")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(256, 384, 1, 4, 2, head_dim=64, initializer_range=0.2)
    return write_checkpoint(tmp_path_factory.mktemp("published") / "plain", Family("qwen3", "qwen3"), config, seed=3)


def write_options(folder: Path, options: dict[str, Any], file: str = "config.json") -> None:
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    values |= {"quantization_config": options} if file == "config.json" else {}
    (folder / "config.json").write_text(json.dumps(values))
    if file != "config.json":
        (folder / file).write_text(json.dumps(options))


def add_cache_scales(folder: Path) -> None:
    path = folder / "model.safetensors"
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale")]
    save_file(load_file(path) | {name: torch.tensor(0.02) for name in names}, path)


@pytest.fixture(scope="module")
def folders(plain: Path) -> dict[str, Path]:
    found = {}
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        folder = plain.with_name(name.replace(" ", "-"))
        pack_pair(plain, folder, {}, lambda stem, pack=layout.pack: pack, seed=seed)
        write_options(folder, layout.options, layout.file)
        if name in WITH_CACHE:
            add_cache_scales(folder)
        found[name] = folder
    return found


def linears_of(engine: Engine) -> list[Any]:
    runner: Any = engine.runner
    layer = runner.decoder.layers[0]
    return [layer.qkv, layer.o, layer.gate_up, layer.down]


@pytest.mark.parametrize("name", LAYOUTS)
def test_declared_activations_and_cache_are_used(name: str, folders: dict[str, Path]) -> None:
    """Tokens are those of the definition in plain torch, on a cache of the same form."""
    cache = "fp8" if name in WITH_CACHE else "none"
    expected = completed(engine_of(folders[name], "reference", activation_dtype="fp8", kv_cache_dtype=cache))
    engine = engine_of(folders[name], "triton")
    assert engine.resolved["activation_dtype"] == "fp8"
    assert engine.resolved["kv_cache_dtype"] == ("float8_e4m3fn" if cache == "fp8" else "float32")
    assert "inputs of 4 of 5 linears in fp8" in str(engine.resolved["weights"])
    linears = linears_of(engine)
    assert all(isinstance(linear, Fp8Linear) for linear in linears)
    assert {linear.weight.per_token for linear in linears} == {name != "fp8 in blocks"}
    tokens, likelihoods = completed(engine)
    assert tokens == expected[0]
    assert np.median(abs(likelihoods - expected[1])) < 1e-4


def test_int8_activations_of_w8a8(plain: Path) -> None:
    if not has_vnni():
        pytest.skip("this processor has no AVX2")
    folder = plain.with_name("w8a8")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    options = compressed(weights, weights | PER_TOKEN)
    pack_pair(plain, folder, options, lambda stem: int_quantized(True), seed=1)
    expected = completed(engine_of(folder, "reference", activation_dtype="int8"))
    engine = engine_of(folder, "cpu")
    assert engine.resolved["activation_dtype"] == "int8"
    assert all(isinstance(linear, Int8Linear) for linear in linears_of(engine))
    assert completed(engine)[0] == expected[0]
    with engine_of(folder, "triton") as on_gpu:
        assert on_gpu.resolved["activation_dtype"] == "none", "a GPU has no such products"


def test_a_cache_that_is_declared_alone(plain: Path) -> None:
    folder = plain.with_name("cache-alone")
    pack_pair(plain, folder, {}, lambda stem: None, seed=1)
    write_options(folder, {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": STATIC})
    add_cache_scales(folder)
    with engine_of(folder, "cpu") as engine:
        assert (engine.resolved["kv_cache_dtype"], engine.resolved["weights"]) == ("float8_e4m3fn", "dense")
    with engine_of(folder, "cpu", kv_cache_dtype="none") as engine:
        assert engine.resolved["kv_cache_dtype"] == "float32"
    write_options(folder, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, "hf_quant_config.json")
    assert resolve(EngineConfig(str(folder), device="cpu"), read_config(folder)).kv_dtype == FP8


@pytest.mark.parametrize("name", ["FP8 dynamic", "fp8 in blocks"])
def test_without_rounding_weights_keep_a_byte(name: str, folders: dict[str, Path]) -> None:
    """The path of a card that does not multiply fp8."""
    expected = completed(engine_of(folders[name], "reference"))
    engine = engine_of(folders[name], "triton", activation_dtype="none")
    assert engine.resolved["activation_dtype"] == "none"
    assert str(engine.resolved["weights"]).endswith("activations not quantized")
    linears = linears_of(engine)
    assert all(isinstance(linear, TwoPathLinear) for linear in linears)
    num_weights = sum(np.prod(linear.shape_NK) for linear in linears)
    assert sum(linear.tiled.num_bytes for linear in linears) == num_weights * (1 + 4 / 128)
    tokens, likelihoods = completed(engine)
    assert tokens == expected[0]
    assert np.median(abs(likelihoods - expected[1])) < 1e-4


def test_when_auto_rounds(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders["FP8 dynamic"]
    model = read_config(folder)

    def activations(**options: Any) -> Activations:
        return resolve(EngineConfig(str(folder), device="cpu", **options), model).activations

    assert activations(kernels="triton").forms == {"fp8"}
    for options in ({"kernels": "triton", "deterministic": True}, {"kernels": "reference"}, {"kernels": "cpu"}):
        assert activations(**options).dtype == "none"
    for capability, native in (((8, 0), set()), ((8, 9), {"fp8"}), ((9, 0), {"fp8"})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert native_activations(torch.device("cuda"), "auto") == native


def test_schemes_of_one_form_must_all_declare_it(folders: dict[str, Path], plain: Path) -> None:
    """Linears of other forms stay as they are."""
    fp8_weights = FLOAT | {"strategy": "channel", "dynamic": False}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    rounding = {"targets": ["re:.*mlp.*"], "weights": fp8_weights, "input_activations": FLOAT | PER_TOKEN}
    others = {
        "weights alone": {"targets": ["re:.*attn.*"], "weights": fp8_weights},
        "another form": {"targets": ["re:.*attn.*"], "weights": int4, "format": "pack-quantized"},
    }
    folder = plain.with_name("mixed")
    folder.mkdir()
    (folder / "config.json").write_text((plain / "config.json").read_text())
    found = {}
    for name, other in others.items():
        write_options(folder, compressed(fp8_weights, {}) | {"config_groups": {"a": rounding, "b": other}})
        found[name] = resolve(
            EngineConfig(str(folder), device="cpu", kernels="triton"), read_config(folder)
        ).activations
    assert found == {"weights alone": Activations(), "another form": Activations("fp8", frozenset({"fp8"}))}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("activation_dtype", ["auto", "none"])
def test_planned_bytes_are_those_of_the_loaded_weights(
    name: str, activation_dtype: str, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    options: dict[str, Any] = {"kernels": "triton", "dtype": "bfloat16", "activation_dtype": activation_dtype}
    config, model = EngineConfig(str(folder), device="cpu", max_model_len=64, **options), read_config(folder)
    resolved = resolve(config, model)
    with recorded_launches():
        decoder = LoadedModel.load(folder, model, resolved).decoder
    layer, head = decoder.layers[0], decoder.lm_head
    assert isinstance(head, TorchLinear)
    loaded = decoder.embedding.weight_NK.nbytes + head.weight_NK.nbytes
    for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
        loaded += linear.weight.num_bytes if isinstance(linear, Fp8Linear) else 0
        loaded += linear.tiled.num_bytes + linear.kept_NK.nbytes if isinstance(linear, TwoPathLinear) else 0
    planned = weight_bytes(model, torch.device("cuda"), resolved.dtype, True, resolved.activations)
    assert planned == pytest.approx(loaded, rel=0.02)
    if activation_dtype == "auto":
        linears = model.num_linear_parameters()
        rest = 2 * (model.num_parameters() - linears)
        assert planned == pytest.approx(rest + LAYOUTS[name].weight_bytes * linears, abs=1)
