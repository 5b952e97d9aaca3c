"""Wrong configs and tensors raise a ModelError that names the key or the tensor: never a crash, never other weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ModelError
from pipeline.weights.formats import READERS, read_format
from pipeline.weights.packed import DenseWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, input_order
from tests.model_folders import Named
from tests.weights.packers import (
    Pack,
    awq_gemm,
    awq_gemv,
    fp8,
    gptq,
    int_quantized,
    mxfp4,
    named,
    nvfp4,
    pack_quantized,
)
from tests.weights.test_model_folders import GPTQ, LINEAR, MODELOPT, NVFP4, TOKEN, compressed, group

PATH = Path("config.json")
SHAPE = (48, 64)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
INT4 = compressed(group("pack-quantized", 4, "group", LINEAR, group_size=32, symmetric=False))


def weights(**change: Any) -> dict[str, Any]:
    one = group("pack-quantized", 4, "group", LINEAR, group_size=32)
    return compressed(one | {"weights": one["weights"] | change})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {},
            "quant_method = None is not supported; expected one of awq, gptq, compressed-tensors, fp8, modelopt, mxfp4,"
            " gguf, or a 16-",
        ),
        (
            {"quant_method": "squeezellm"},
            "'squeezellm' is not supported: SqueezeLLM stores .*; expected one",
        ),
        ({"quant_method": "quip_sharp"}, "'quip_sharp' is not supported: .* lattice .*model.quantization: int4-rtn"),
        (AWQ | {"bits": True}, "bits = True"),
        (AWQ | {"bits": 8}, "bits = 8"),
        (AWQ | {"version": "gemv_fast"}, "version = 'gemv_fast'"),
        (AWQ | {"group_size": 16}, "group_size = 16"),
        (AWQ | {"modules_to_not_convert": 5}, "modules_to_not_convert"),
        (GPTQ | {"bits": 3}, "bits = 3: expected one of 4, 8"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (GPTQ | {"desc_act": "yes"}, "desc_act = 'yes'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin': expected one of gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (GPTQ | {"dynamic": ["x"]}, "dynamic"),
        (GPTQ | {"dynamic": {"[": {}}}, r"dynamic.patterns: '\[': invalid pattern"),
        (GPTQ | {"dynamic": {"x": {"bits": 2}}}, r"dynamic.x.bits = 2"),
        (GPTQ | {"dynamic": {"(a+)+$": {}}}, "at most 4 repetitions and no repeated group"),
        (INT4 | {"quantization_status": "initialized"}, "quantization_status"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (INT4 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (INT4 | {"config_groups": {"g": {"targets": LINEAR}}}, r"config_groups.g.format = None"),
        (INT4 | {"ignore": "lm_head"}, "ignore = 'lm_head': expected a list of names"),
        (INT4 | {"ignore": ["re:("]}, "ignore: '[(]': invalid pattern"),
        (weights(group_size=None), "weights.group_size = None"),
        (weights(num_bits=3), "weights.num_bits = 3"),
        (weights(type="float"), "weights.type = 'float'"),
        (weights(strategy="tensor_group"), "weights.strategy = 'tensor_group'"),
        (weights(type="float") | {"config_groups": {"g": NVFP4 | {"format": "mixfp4"}}}, "format = 'mixfp4'"),
        (compressed(NVFP4 | {"format": "mxfp4-pack-quantized"}), "weights.strategy = 'tensor_group'"),
        (compressed(NVFP4 | {"weights": NVFP4["weights"] | {"group_size": 32}}), "weights.group_size = 32"),
        (compressed(NVFP4 | {"weights": NVFP4["weights"] | {"type": "int"}}), "weights.type = 'int'"),
        (MODELOPT | {"quant_algo": "MXFP8"}, "quant_algo = 'MXFP8': expected one of FP8, .*NVFP4"),
        (MODELOPT | {"group_size": 32}, "group_size = 32"),
        (MODELOPT | {"quantization": {"quant_algo": "NVFP4_AWQ"}}, "quantization.quant_algo = 'NVFP4_AWQ'"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "x"}, "modules_to_not_convert = 'x'"),
        (compressed(group("float-quantized", 8, "group", LINEAR, group_size=128)), "weights.strategy = 'group'"),
        (compressed(group("float-quantized", 8, "block", LINEAR, block_structure=[0, 128])), "block_structure"),
        (FP8 | {"weight_block_size": [128, 1 << 40]}, "weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme"),
        (FP8 | {"modules_to_not_convert": [1]}, "modules_to_not_convert"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: quantization_config") as caught:
        read_format(config, PATH)
    assert caught.match(message)
    assert len(str(caught.value)) < 1000


FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    "awq": (AWQ, awq_gemv(32)),
    "awq gemm": (AWQ | {"version": "gemm"}, awq_gemm(32, True)),
    "gptq": (GPTQ | {"desc_act": True}, gptq(4, 32, False, True, 1)),
    "gptq 8": (GPTQ | {"bits": 8, "desc_act": True}, gptq(8, 32, False, True, 1)),
    "int4": (INT4, pack_quantized(4, 32, False)),
    "int8": (compressed(group("int-quantized", 8, "channel", LINEAR, symmetric=False)), int_quantized(False)),
    "fp8": (FP8, fp8((32, 32), "weight_scale_inv")),
    "nvfp4": (compressed(NVFP4), nvfp4("weight_packed", "weight_global_scale", divides=True)),
    "mxfp4": (
        compressed(group("mxfp4-pack-quantized", 4, "group", LINEAR, type="float", group_size=32)), mxfp4()),
}  # fmt: skip


def packed(name: str) -> tuple[Any, Named, torch.Tensor]:
    config, pack = FORMS[name]
    tensors, dense = pack(np.random.default_rng(2), SHAPE)
    return read_format(config, PATH), named("a.q_proj", tensors), torch.from_numpy(dense)


def read(form: Any, tensors: Named, shape: tuple[int, int] = SHAPE) -> LinearWeight:
    return form.read_linear(StoredLinear("a.q_proj", shape, tensors))


def check_refused(form: Any, tensors: Named, message: str = "", shape: tuple[int, int] = SHAPE) -> None:
    with pytest.raises(ModelError, match=rf"a\.q_proj{message}"):
        read(form, tensors, shape)


@pytest.mark.parametrize("name", FORMS)
def test_sound_tensors_are_read_and_all_others_refused_by_name(name: str) -> None:
    form, tensors, dense = packed(name)
    assert torch.equal(read(form, tensors).dequantize(torch.float32), dense)
    for key in [key for key in tensors if key.rpartition(".")[2] not in form.unused]:
        tensor = tensors[key]
        check_refused(form, Named({other: tensors[other] for other in tensors if other != key}), r"\.\w+")
        wrong_tensors = [
            tensor.flatten()[:-1],
            tensor.unsqueeze(0),
            torch.zeros(0),
            tensor.to(torch.float64),
            tensor.bool(),
        ]
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            wrong_tensors += [tensor.t(), tensor[:-1], tensor[:, :-1]]
        for wrong in wrong_tensors:
            check_refused(form, Named(tensors | {key: wrong}), r"\.")
    if name in ("awq", "awq gemm", "gptq", "gptq 8", "int4", "mxfp4"):
        check_refused(form, tensors, ": 72 inputs are not a multiple of the group size 32", (48, 72))
    for shape in ((48, 72), (47, 64), (48, 96), (1 << 40, 64), (48, 1 << 40)):
        check_refused(form, tensors, shape=shape)
    scale = next(key for key in tensors if "scale" in key)
    for broken in (float("nan"), float("inf")):
        scales = tensors[scale].clone()
        if scales.dtype == torch.uint8:
            scales.view(-1)[0] = 255
        elif scales.dtype == torch.float8_e4m3fn:  # has no infinity
            scales.view(-1)[0] = float("nan")
        else:
            scales.view(-1)[0] = broken
        check_refused(form, Named(tensors | {scale: scales}), r"\.\w+: contains infinities")


def test_a_plain_linear_next_to_quantized_ones_is_read_as_it_is() -> None:
    weight = torch.randn(SHAPE).to(torch.bfloat16)
    for name in FORMS:
        plain = read(read_format(FORMS[name][0], PATH), Named({"a.q_proj.weight": weight}))
        assert isinstance(plain, DenseWeight)
        assert plain.weight_NK is weight


def test_groups_of_inputs_are_of_one_size() -> None:
    assert input_order(torch.tensor([0, 0, 1, 1], dtype=torch.int32), 2, "g") is None
    order = input_order(torch.tensor([1, 0, 1, 0], dtype=torch.int32), 2, "g")
    assert order is not None
    assert order.tolist() == [1, 3, 0, 2]
    for wrong in ([0, 0, 0, 1], [0, 0, 1, 2], [0, 0, -1, 1], [0, 0, 0, 0], [2**31 - 1] * 4, [-(2**31)] * 4):
        with pytest.raises(ModelError, match="g: expected 2 inputs in each of the groups 0 to 1"):
            input_order(torch.tensor(wrong, dtype=torch.int32), 2, "g")


def test_float8_values_that_are_no_numbers_are_refused() -> None:
    form, tensors, _ = packed("fp8")
    tensors["a.q_proj.weight"].view(torch.uint8)[3, 4] = 0xFF
    check_refused(form, tensors, r"\.weight: contains NaN")


def test_a_linear_that_the_config_leaves_out_is_not_stored_quantized() -> None:
    _, tensors, _ = packed("int4")
    ignored = read_format(INT4 | {"ignore": ["re:.*q_proj"]}, PATH)
    untargeted = read_format(compressed(INT4["config_groups"]["group_0"] | {"targets": ["re:.*k_proj"]}), PATH)
    for form in (ignored, untargeted):
        check_refused(form, tensors, ": stored quantized, but quantization_config has no scheme")


def test_the_stored_shape_of_a_packed_weight_must_be_the_models() -> None:
    form, tensors, _ = packed("int4")
    for wrong in ([64, 48], [48, 65], [-48, 64]):
        tensors["a.q_proj.weight_shape"] = torch.tensor(wrong)
        check_refused(form, tensors, r"\.weight_shape: is .*, expected \(48, 64\)")


def test_a_symmetric_checkpoint_has_no_zero_points_but_zeros() -> None:
    form = read_format(compressed(group("int-quantized", 8, "channel", LINEAR, symmetric=True)), PATH)
    tensors, dense = int_quantized(True)(np.random.default_rng(0), SHAPE)
    zeros = torch.zeros(SHAPE[0], 1, dtype=torch.int8)
    kept = named("a.q_proj", tensors | {"weight_zero_point": zeros})
    assert torch.equal(read(form, kept).dequantize(torch.float32), torch.from_numpy(dense))
    zeros[5] = 1
    check_refused(form, kept, r"\.weight_zero_point: not zero")


def test_a_bias_of_zeros_that_autogptq_adds_is_dropped() -> None:
    form, tensors, dense = packed("gptq")
    tensors["a.q_proj.bias"] = torch.zeros(SHAPE[0], dtype=torch.float16)
    assert read(form, tensors).bias_N is None
    assert torch.equal(read(form, tensors).dequantize(torch.float32), dense)
    tensors["a.q_proj.bias"][3] = 0.5
    check_refused(form, tensors, r"\.bias: not zero")
    own_N = torch.ones(SHAPE[0])
    assert form.read_linear(StoredLinear("a.q_proj", SHAPE, tensors, own_N)).bias_N is own_N


ODD = [None, True, -1, 0, 3, 4, 8, 2**63, 10**400, 1e308, float("nan"), "", "x", "re:(", [], [1], ["re:["], {},
       {"a": 1}]  # fmt: skip


def test_mutated_configs_are_read_or_refused() -> None:
    rng = np.random.default_rng(7)
    blocks = group("float-quantized", 8, "block", LINEAR, block_structure=[32, 32])
    sound = [config for config, _ in FORMS.values()] + [compressed(blocks | {"input_activations": TOKEN})]
    refused = 0
    for _ in range(600):
        config = json.loads(json.dumps(sound[int(rng.integers(len(sound)))]))
        section: Any = config
        while rng.random() < 0.7:
            inner = [value for value in section.values() if isinstance(value, dict) and value]
            if not inner:
                break
            section = inner[int(rng.integers(len(inner)))]
        section[str(rng.choice(sorted(section)))] = ODD[int(rng.integers(len(ODD)))]
        try:
            form = read_format(config, PATH)
        except ModelError:
            refused += 1
        else:
            assert str(form)
            assert form.bits in (4, 8)
            _, pack = FORMS["int4"]
            tensors = named("a", pack(rng, (8, 32))[0])
            try:
                form.read_linear(StoredLinear("a", (8, 32), tensors))
            except ModelError:
                refused += 1
    assert refused > 200
    assert set(READERS) == {"awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "gguf"}


@pytest.mark.parametrize("broken", [0.0, -1.0])
def test_the_scale_of_a_whole_nvfp4_weight_is_positive(broken: float) -> None:
    form, tensors, _ = packed("nvfp4")
    tensors["a.q_proj.weight_global_scale"][0] = broken
    check_refused(form, tensors, rf"\.weight_global_scale: is {broken}, expected a positive scale")
