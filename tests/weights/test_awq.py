"""AWQ int4: unpacking over all nibbles, logits against the dequantized weights, both CPU paths, lying checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ModelError
from pipeline.kernels.cpu.linear.selection import Int4Linear, serves_int4
from pipeline.model.config import read_config
from pipeline.weights.awq import AwqFormat, unpack_columns
from pipeline.weights.packed import DenseWeight, GroupIntWeight, concatenate
from tests.model_folders import VOCAB, Family, Named, load_reference, quantize_randomly, write_checkpoint
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    greedy_reference,
    our_logits,
    reference_logits,
)

CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 257,
    "rms_norm_eps": 1e-5,
}


def test_every_nibble_lands_in_its_column() -> None:
    # written out from AutoAWQ's packing: nibble i of a word is column ORDER[i]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rng = np.random.default_rng(0)
    true = rng.permutation(np.repeat(np.arange(16), 16)).reshape(16, 16)
    words = np.zeros((16, 2), dtype=np.uint32)
    for row in range(16):
        for word in range(2):
            for nibble in range(8):
                words[row, word] |= np.uint32(true[row, 8 * word + order[nibble]] << (4 * nibble))
    unpacked = unpack_columns(torch.from_numpy(words.view(np.int32)))
    assert np.array_equal(unpacked.numpy(), true)


@pytest.fixture(scope="module", params=[(128, True), (64, True), (32, False)], ids=["g128", "g64", "g32-symmetric"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    group, zero_point = request.param
    root = tmp_path_factory.mktemp("awq")
    plain = write_checkpoint(root / "plain", Family("llama", "llama"), CONFIG, seed=4)
    return quantize_randomly(plain, root / "int4", group, zero_point, seed=group)


def test_logits_and_tokens_are_those_of_the_dequantized_weights(checkpoint: Path) -> None:
    model = load_reference(checkpoint.with_name("int4-dense"))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 31, 90)]
    seen = Agreement()
    with float32_engine(checkpoint) as engine:
        for prompt in prompts:
            difference = (our_logits(engine, prompt) - reference_logits(model, prompt)).abs().max()
            assert float(difference) < LOGIT_TOLERANCE
        for prompt, ours in zip(prompts, engine.generate(prompts, greedy(32))):
            compare_greedy(model, prompt, ours.token_ids, greedy_reference(model, prompt, 32), seen)
    assert seen.near_ties == 0


def test_int4_and_dense_paths_agree_to_bfloat16_rounding() -> None:
    torch.manual_seed(0)
    weight = GroupIntWeight(
        torch.randint(0, 16, (192, 256), dtype=torch.uint8),
        torch.rand(192, 2) * 0.05 + 0.01,
        torch.randint(0, 16, (192, 2)).float(),
        128,
        torch.randn(192),
    )
    assert serves_int4(weight, torch.bfloat16)
    linear = Int4Linear(weight)
    x_TK = torch.randn(5, 256, dtype=torch.bfloat16)
    exact = x_TK.float() @ weight.dequantize(torch.float32).T + weight.bias_N
    scale = exact.abs().max()
    for path in (linear.int4, linear.dense):
        assert float((path(x_TK).float() - exact).abs().max() / scale) < 0.02
    linear.crossover = 4
    assert torch.equal(linear(x_TK), linear.dense(x_TK))
    assert torch.equal(linear(x_TK[:4]), linear.int4(x_TK[:4]))


def test_bfloat16_engine_follows_the_float32_logits(checkpoint: Path) -> None:
    from pipeline import Engine, EngineConfig

    prompt = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    options = {"model": str(checkpoint), "device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "block_size": 8}
    with (
        Engine(EngineConfig(**options, dtype="bfloat16")) as low,
        Engine(EngineConfig(**options, dtype="float32")) as high,
    ):
        ours, exact = our_logits(low, prompt), our_logits(high, prompt)
    assert float((ours - exact).abs().mean() / exact.std()) < 0.1
    assert low.resolved["weights"].startswith("AWQ int4, groups of ")


def test_fusing_keeps_the_order_of_outputs_and_widens_mixed_kinds() -> None:
    a, b = DenseWeight(torch.ones(2, 4)), DenseWeight(torch.zeros(3, 4), torch.arange(3.0))
    fused = concatenate([a, b])
    assert isinstance(fused, DenseWeight)
    assert fused.weight_NK[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert fused.bias_N is not None
    assert fused.bias_N.tolist() == [0, 0, 0, 1, 2]
    grouped = GroupIntWeight(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1), 4)
    widened = concatenate([a, grouped])
    assert isinstance(widened, DenseWeight)
    assert widened.weight_NK.tolist() == [[1.0] * 4] * 2 + [[-1.0] * 4] * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bits": 8}, "bits"),
        ({"version": "gemv_fast"}, "version"),
        ({"quant_method": "gptq"}, "quant_method"),
        ({"group_size": 16}, "group_size"),
        ({"group_size": [128]}, "group_size"),
        ({"zero_point": "yes"}, "zero_point"),
        ({"modules_to_not_convert": 5}, "modules_to_not_convert"),
    ],
)
def test_fault_42_a_format_that_is_not_served_is_refused_by_name(change: dict, field: str) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    assert AwqFormat.from_config(config, Path("config.json")).group_size == 128
    with pytest.raises(ModelError, match=field):
        AwqFormat.from_config(config | change, Path("config.json"))


def test_tensors_of_a_wrong_shape_or_type_are_refused_by_name(checkpoint: Path) -> None:
    awq = read_config(checkpoint).quantization
    assert awq is not None
    tensors = Named(load_file(checkpoint / "model.safetensors"))
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(ModelError, match=r"down_proj\.qweight"):
        awq.read_linear(name, (128, 512), tensors, None)
    with pytest.raises(ModelError, match="do not divide"):
        awq.read_linear(name, (128, 200), tensors, None)
    tensors[f"{name}.scales"] = tensors[f"{name}.scales"].to(torch.int32)
    with pytest.raises(ModelError, match=r"down_proj\.scales"):
        awq.read_linear(name, (128, 256), tensors, None)
