"""Whole quantized checkpoints through the engine: logits and tokens are those that transformers computes from the
dequantized weights in float32."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.resolve import quantized_on_load, resolve
from pipeline.errors import ConfigError, ModelError
from pipeline.kernels.activations.act_quant import ACT_QUANT_SCHEMES, Activations
from pipeline.model.config import read_config
from pipeline.model.load import WeightReader
from pipeline.weights.round_to_nearest import METHODS
from tests.model_folders import FAMILIES, VOCAB, Family, load_reference, small_config, write_checkpoint
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    greedy_reference,
    our_logits,
    own_error,
    reference_logits,
)
from tests.weights.packers import (
    AWQ,
    Pack,
    awq_gemm,
    awq_gemv,
    fp8,
    gptq,
    int_quantized,
    mxfp4,
    mxfp4_experts,
    nvfp4,
    pack_experts,
    pack_pair,
    pack_quantized,
    write_pair,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def group(form: str, bits: int, strategy: str, targets: list[str], **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float" if "float" in form else "int", "strategy": strategy} | more
    return {"targets": targets, "format": form, "weights": weights}


def compressed(*groups: dict[str, Any]) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {f"group_{i}": one for i, one in enumerate(groups)}}


LINEAR = ["Linear"]
W8A8 = group("int-quantized", 8, "channel", LINEAR) | {"input_activations": TOKEN}
ORDERED = group("pack-quantized", 4, "group", LINEAR, group_size=32, symmetric=True, actorder="group")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NVFP4 = group("nvfp4-pack-quantized", 4, "tensor_group", LINEAR, type="float", group_size=16)
FP4_INPUTS = {"input_activations": NVFP4["weights"] | {"dynamic": "local"}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
WHOLE: dict[str, tuple[dict[str, Any], Pack | None, str]] = {
    "awq gemm": (AWQ | {"group_size": 64, "zero_point": True}, awq_gemm(64, True), "AWQ int4, groups of 64"),
    "awq gemm, symmetric": (
        AWQ | {"group_size": 32, "zero_point": False}, awq_gemm(32, False), "AWQ int4, groups of 32"),
    "awq gemv": (
        AWQ | {"group_size": 64, "version": "GEMV", "zero_point": True}, awq_gemv(64), "AWQ int4, groups of 64"),
    "gptq": (GPTQ, gptq(4, 32, False, False, 1), "GPTQ int4, groups of 32"),
    "gptq in order of activation": (
        GPTQ | {"desc_act": True}, gptq(4, 32, False, True, 1),
        "GPTQ int4, groups of 32, inputs ordered by activation"),
    "gptq v2, int8, one group": (
        GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, gptq(8, -1, False, False, 2),
        "GPTQ int8, a scale for each output"),
    "gptq int8 in order of activation": (
        GPTQ | {"bits": 8, "desc_act": True, "sym": True}, gptq(8, 32, True, True, 1),
        "GPTQ int8, groups of 32, inputs ordered by activation"),
    "compressed int4": (
        compressed(group("pack-quantized", 4, "group", LINEAR, group_size=64, symmetric=False)),
        pack_quantized(4, 64, False), "compressed-tensors int4, groups of 64"),
    "compressed int4, ordered": (
        compressed(ORDERED), pack_quantized(4, 32, True, ordered=True), "compressed-tensors int4, groups of 32"),
    "compressed w8a8": (
        compressed(W8A8), int_quantized(True),
        "compressed-tensors int8, a scale for each output, activations not quantized"),
    "compressed fp8, naive": (
        compressed(group("naive-quantized", 8, "channel", LINEAR, type="float")),
        fp8(None, "weight_scale", per_output=True), "compressed-tensors fp8 (e4m3)"),
    "compressed int8, naive": (
        compressed(group("naive-quantized", 8, "tensor", LINEAR, symmetric=False)), int_quantized(False),
        "compressed-tensors int8, a scale for each output"),
    "compressed fp8": (
        compressed(group("float-quantized", 8, "block", LINEAR, block_structure=[64, 32])),
        fp8((64, 32), "weight_scale"), "compressed-tensors fp8 (e4m3), blocks of 64x32"),
    "compressed nvfp4": (
        compressed(NVFP4 | FP4_INPUTS), nvfp4("weight_packed", "weight_global_scale", divides=True),
        "compressed-tensors nvfp4, groups of 16, activations not quantized"),
    "compressed mxfp4": (
        compressed(group("mxfp4-pack-quantized", 4, "group", LINEAR, type="float", group_size=32)), mxfp4(),
        "compressed-tensors mxfp4, groups of 32"),
    "modelopt nvfp4": (
        MODELOPT | {"quant_algo": "W4A16_NVFP4"}, nvfp4("weight", "weight_scale_2", divides=False),
        "Model Optimizer nvfp4, groups of 16"),
    "modelopt fp8": (
        MODELOPT | {"quant_algo": "FP8"}, fp8(None, "weight_scale"),
        "Model Optimizer fp8 (e4m3), activations not quantized"),
    "mxfp4 without experts": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, None, "mxfp4 experts, groups of 32"),
    "fp8, blocks": (
        FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128), "weight_scale_inv"),
        "fp8 (e4m3), blocks of 128x128, activations not quantized"),
    "fp8, whole": (
        FP8 | {"activation_scheme": "static"}, fp8(None, "weight_scale"),
        "fp8 (e4m3), activations not quantized"),
}  # fmt: skip


def check(quantized: Path, dense: Path, weights: str) -> None:
    model = load_reference(dense)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 31)]
    seen = Agreement()
    with float32_engine(quantized, activation_dtype="none") as engine:
        assert engine.resolved["weights"] == weights
        for prompt in prompts:
            expected = reference_logits(model, prompt)
            difference = float((our_logits(engine, prompt) - expected).abs().max())
            tolerance = LOGIT_TOLERANCE * max(1.0, float(expected.abs().max()) / 10)
            assert difference < tolerance or difference < tolerance + 2 * own_error(dense, prompt)
        for prompt, ours in zip(prompts, engine.generate(prompts, greedy(16))):
            compare_greedy(model, prompt, ours.token_ids, greedy_reference(model, prompt, 16, ours.token_ids), seen)
    assert seen.near_ties == 0


@pytest.mark.parametrize("name", WHOLE)
def test_logits_and_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    quantization, pack, weights = WHOLE[name]
    check(*write_pair(tmp_path, quantization, lambda stem: pack), weights)


NEWER = [f for f in FAMILIES if f.model_type not in ("llama", "mistral", "qwen2", "qwen3", "gpt2")]


DELTA_SIZES = {"num_hidden_layers": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.mark.parametrize("name", ["awq gemm, symmetric", "gptq in order of activation"])
@pytest.mark.parametrize("family", NEWER, ids=lambda family: family.name)
def test_each_family_with_quantized_weights(family: Family, name: str, tmp_path: Path) -> None:
    """Also those that store fused linears, and the one whose rows are reordered because a part of a head rotates."""
    quantization, pack, weights = WHOLE[name]
    config = small_config(64, 96, 1, 4, 2, initializer_range=0.2) | family.options
    if "linear_num_key_heads" in config:
        config |= DELTA_SIZES
    elif "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    plain = write_checkpoint(tmp_path / "plain", family, config, seed=4)
    check(*pack_pair(plain, tmp_path / "quantized", quantization, lambda stem: pack, seed=7), weights)


@pytest.mark.parametrize("name", ["fp8, blocks", "compressed int4, ordered"])
@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-next"])
def test_gated_delta_nets_as_published(family: str, name: str, tmp_path: Path) -> None:
    """The linear of few outputs stays in 16 bits next to quantized ones."""
    quantization, pack, weights = WHOLE[name]
    chosen = next(each for each in FAMILIES if each.name == family)
    config = small_config(64, 96, 2, 4, 2) | chosen.options | DELTA_SIZES
    plain = write_checkpoint(tmp_path / "plain", chosen, config, seed=4)
    check(*pack_pair(plain, tmp_path / "quantized", quantization, lambda stem: pack, seed=7), weights)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "gpt-oss")
    config = small_config(64, 96, 2, 4, 2, initializer_range=0.2) | family.options
    plain = write_checkpoint(tmp_path / "plain", family, config, seed=4)
    check(*mxfp4_experts(plain, tmp_path / "quantized", seed=7), "mxfp4 experts, groups of 32")


@pytest.mark.parametrize("name", ["compressed int4 in one tensor", "awq gemm, symmetric", "compressed nvfp4"])
def test_experts_of_gemma4_as_published(name: str, tmp_path: Path) -> None:
    in_one = compressed(group("pack-quantized", 4, "group", LINEAR, group_size=32))
    int4 = in_one, pack_quantized(4, 32, True), "compressed-tensors int4, groups of 32"
    quantization, pack, weights = WHOLE.get(name, int4)
    assert pack is not None
    family = next(family for family in FAMILIES if family.name == "gemma4-moe")
    config = small_config(64, 96, 2, 4, 2, initializer_range=0.2) | family.options
    plain = write_checkpoint(tmp_path / "plain", family, config, seed=4)
    pair = pack_pair(plain, tmp_path / "quantized", quantization, lambda stem: pack, seed=7)
    check(*pack_experts(pair, pack, name not in WHOLE, seed=8), weights)
    if name not in WHOLE:
        tensors = load_file(pair[0] / "model.safetensors")
        scales = "model.layers.0.experts.down_proj_scale"
        save_file(tensors | {scales: tensors[scales][:5]}, pair[0] / "model.safetensors")
        with pytest.raises(ModelError, match=rf"^{scales}: found \(5, 64, 1\), expected those of 6 experts"):
            list(WeightReader(pair[0], read_config(pair[0])).layers())


def test_modules_not_converted_and_mixed_ones_are_fused_as_they_are(tmp_path: Path) -> None:
    """q and k of int4, v of int8, o in 16 bits; gate left as it is next to a quantized up; a tied output embedding."""
    int4 = group("pack-quantized", 4, "group", [r"re:.*[qk]_proj$", r"re:.*mlp.*"], group_size=32)
    int8 = group("pack-quantized", 8, "channel", LINEAR, symmetric=False)
    quantization = compressed(int4, int8) | {"ignore": ["lm_head", "re:.*o_proj", "model.layers.0.mlp.gate_proj"]}

    def pack(stem: str) -> Pack | None:
        if re.search(r"o_proj|0\.mlp\.gate", stem):
            return None
        return pack_quantized(8, None, False) if "v_proj" in stem else pack_quantized(4, 32, True)

    folders = write_pair(tmp_path, quantization, pack, {"tie_word_embeddings": True})
    kinds = "compressed-tensors int4, groups of 32 and int8, a scale for each output"
    check(*folders, kinds)


def test_overrides_of_gptqmodel(tmp_path: Path) -> None:
    wider = {"bits": 8, "group_size": 64}
    dynamic = {"-:.*down_proj": {}, r"+:.*\.mlp\.": wider, r".*\.[qkv]_proj": {"group_size": -1}}

    def pack(stem: str) -> Pack | None:
        if "down_proj" in stem:
            return None
        if "mlp" in stem:
            return gptq(8, 64, False, False, 1)
        return gptq(4, 32 if "o_proj" in stem else -1, False, False, 1)

    folders = write_pair(tmp_path, GPTQ | {"dynamic": dynamic}, pack)
    check(*folders, "GPTQ int4, groups of 32, some linears otherwise")


def test_a_checkpoint_quantized_on_load_computes_what_its_weights_say(tmp_path: Path) -> None:
    """Against a dense checkpoint of what each method makes of the weights, computed here in another way."""
    from pipeline import Engine, EngineConfig
    from tests.weights.test_round_to_nearest import rounded

    _, plain = write_pair(tmp_path, {"quant_method": "none"}, lambda stem: None)
    for method in METHODS:
        dense = rounded(plain, tmp_path / method, method)
        model, prompt = load_reference(dense), list(range(40, 70))
        options = {"max_model_len": 256, "max_num_seqs": 2, "block_size": 8, "dtype": "float32", "device": "cpu"}
        with Engine(EngineConfig(model=str(plain), quantization=method, **options)) as engine:
            assert engine.resolved["weights"].startswith(f"{method} made on load, ")
            difference = (our_logits(engine, prompt) - reference_logits(model, prompt)).abs().max()
            assert float(difference) < LOGIT_TOLERANCE
            assert engine.runner.vocab_size == VOCAB


def test_in_bfloat16_the_same_checkpoints_are_served(tmp_path: Path) -> None:
    from pipeline import Engine, EngineConfig

    prompt = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    for name in (
        "awq gemm",
        "gptq in order of activation",
        "gptq int8 in order of activation",
        "fp8, blocks",
        "modelopt nvfp4",
    ):
        quantization, pack, _ = WHOLE[name]
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        quantized, dense = write_pair(folder, quantization, lambda stem, pack=pack: pack)
        options = {"model": str(quantized), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "block_size": 8}
        with Engine(EngineConfig(**options, dtype="bfloat16")) as engine:
            ours = our_logits(engine, prompt)
        exact = reference_logits(load_reference(dense), prompt)
        assert float((ours - exact).abs().mean() / exact.std()) < 0.15, name


def test_whether_linears_take_rounded_activations_is_known_before_they_are_read(tmp_path: Path) -> None:
    """Memory is planned, and activations are refused, by the format alone."""
    plain = write_pair(tmp_path, {"quant_method": "none"}, lambda stem: None)[1]
    models = [quantized_on_load(read_config(plain), method) for method in METHODS]
    folders = [plain] * len(models)
    for number, (quantization, pack, _) in enumerate(WHOLE.values()):
        (tmp_path / str(number)).mkdir()
        folders.append(write_pair(tmp_path / str(number), quantization, lambda stem, pack=pack: pack)[0])
        models.append(read_config(folders[-1]))
    for folder, model in zip(folders, models):
        layer = next(WeightReader(folder, model).layers())
        linears = [weight for weight in (layer.qkv, layer.o, layer.gate_up, layer.down) if weight is not None]
        for name, scheme in ACT_QUANT_SCHEMES.items():
            rounded = {scheme.as_multiplied(weight) is not None for weight in linears}
            covered = Activations.for_all_weights(name).cover(model.quantization)
            assert covered == (rounded == {True}), (str(model.quantization), name)
            if rounded == {False}:
                with pytest.raises(ConfigError, match=f"'{name}': not supported by the model's weights"):
                    resolve(EngineConfig(str(folder), device="cpu", activation_dtype=name), model)
            else:
                resolve(EngineConfig(str(folder), device="cpu", activation_dtype=name), model)


def test_what_is_known_of_a_format_without_its_weights(tmp_path: Path) -> None:
    from pipeline.engine.startup.memory import weight_bytes

    sizes, gpu = {}, torch.device("cuda")
    for name in ("gptq", "gptq v2, int8, one group", "fp8, blocks", "compressed nvfp4"):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        quantized, _ = write_pair(folder, WHOLE[name][0], lambda stem: None)
        config = read_config(quantized)
        embeddings = 2 * config.vocab_size * config.hidden_size * 4
        linears = weight_bytes(config, torch.device("cpu"), torch.float32) - embeddings
        sizes[name] = linears / config.num_linear_parameters()
        assert config.quantization is not None
        is_dense = weight_bytes(config, gpu, torch.bfloat16, keeps_dense=False) == 2 * config.num_parameters()
        assert is_dense == (name not in ("gptq", "fp8, blocks")), "only 4-bit integers and fp8 stay quantized"
    assert sizes == {
        "gptq": 0.75, "gptq v2, int8, one group": 1.0, "fp8, blocks": 1.03125, "compressed nvfp4": 0.75,
    }  # fmt: skip
