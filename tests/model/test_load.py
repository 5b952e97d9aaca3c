"""The loader proves that nothing is missing or left over; what is not served is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from pipeline.checkpoints.locate import checkpoint_problem, locate_model, resolve_model
from pipeline.config.sections.server import ServerSection
from pipeline.demo import demo_model
from pipeline.errors import ModelError
from pipeline.kernels.reference import reference_kernels
from pipeline.model.config import read_config
from pipeline.model.config_values import WRAPPERS
from pipeline.model.decoder import Decoder
from pipeline.model.families import FAMILIES
from pipeline.model.load import checkpoint_files
from pipeline.model.unsupported import UNSUPPORTED
from tests.model_folders import FAMILIES as FAMILY_VARIANTS
from tests.model_folders import Family, make_family, small_config, write_checkpoint

CONFIG = small_config(16, 24, 2, 2, 1, max_position_embeddings=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", Family("llama", "llama"), CONFIG, seed=0)


def load(folder: Path) -> Decoder:
    cpu = torch.device("cpu")
    return Decoder(folder, read_config(folder), reference_kernels(torch.float32, cpu), torch.float32, cpu)


def rewrite(folder: Path, change) -> None:
    """Write one unsharded file with `change` applied to its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_sharded_and_single_files_load(folder: Path) -> None:
    sharded = load(folder).embedding.weight_NK
    assert len(checkpoint_files(folder)) > 1
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(load(folder).embedding.weight_NK, sharded)


@pytest.mark.parametrize(
    ("change", "intermediate_size", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), 24, r"1\.mlp\.up_proj\.weight is missing"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}), 24,
         r"1 tensors are not part.*q_proj\.bias"),
        (lambda tensors: None, 25, r"gate_proj\.weight is \(24, 16\)"),
    ],
    ids=["missing", "left over", "of another shape"],
)  # fmt: skip
def test_a_wrong_tensor_is_named(folder: Path, change, intermediate_size: int, message: str) -> None:
    rewrite(folder, change)
    edit_config(folder, intermediate_size=intermediate_size)
    with pytest.raises(ModelError, match=message):
        load(folder)


GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "cohere2"}, "model_type = 'cohere2'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1: expected an even share"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA4 | {"num_kv_shared_layers": 1}, r"num_kv_shared_layers = 1: expected 0, .*E2B, E4B"),
        (GEMMA4 | {"hidden_size_per_layer_input": 8}, r"hidden_size_per_layer_input = 8: expected 0, .*E2B, E4B"),
        ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input = 256: expected 0"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all': expected null or"),
        (GEMMA4 | {"per_layer_config": {"2": {}}}, "per_layer_config = .*: expected only head_dim"),
        (GEMMA4 | {"per_layer_config": {"1": {"sliding_window": 9}}}, "per_layer_config = .*: expected only head_dim"),
        (
            GEMMA4 | {"per_layer_config": {"01": {"num_key_value_heads": 3}}},
            "num_key_value_heads = 3: expected a divisor",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, "short_factor"),
        ({"model_type": "smollm3", "no_rope_layers": [2, 1]}, "no_rope_layers"),
        (
            {"model_type": "gpt2", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}},
            "quantiz",
        ),
        ({"dtype": "float8"}, "float8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes' is not supported"),
        ({"quantization_config": {"quant_method": ["awq"]}}, "quant_method = .'awq'. is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters per layer type"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"hidden_act": None}, "hidden_act = None"),
        ({"text_config": {"hidden_size": 8}, "model_type": "llava"}, "model_type = 'llava'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder: Path, values: dict, message: str) -> None:
    edit_config(folder, **values)
    with pytest.raises(ModelError, match=message):
        read_config(folder)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("unheard_of", f"model_type = 'unheard_of': expected one of {', '.join(sorted(FAMILIES))}. "),
        ("dbrx", "model_type = 'dbrx' is not supported: its experts differ in form from the supported ones. "),
        ("t5", "model_type = 't5' is not supported: it is an encoder-decoder. "),
        ("gemma", "use_bidirectional_attention = True: expected false, because encoders are not supported. "),
    ],
)
def test_the_refusal_of_a_family_names_the_reason_and_a_server(folder: Path, model_type: str, reason: str) -> None:
    edit_config(folder, model_type=model_type, use_bidirectional_attention=True)
    with pytest.raises(ModelError) as refused:
        read_config(folder)
    message, _, lines = str(refused.value).partition("in the job file: ")
    assert reason in message
    assert "docs/servers.md" in message
    assert ServerSection.model_validate(yaml.safe_load(lines)["server"]).serve == ("vllm", "serve", "MODEL")


@pytest.mark.parametrize("family", FAMILY_VARIANTS, ids=lambda family: family.name)
def test_parameters_are_those_of_the_checkpoint_without_norms_and_biases(family: Family, tmp_path: Path) -> None:
    folder = make_family(tmp_path, family, seed=1)
    tensors = [item for file in checkpoint_files(folder) for item in load_file(file).items()]
    small = "bias", "shared_expert_gate.weight", "conv1d.weight"
    sizes = [t.numel() for name, t in tensors if t.dim() >= 2 and not name.endswith(small)]
    assert read_config(folder).num_parameters() == sum(sizes)


def test_a_family_is_either_supported_or_refused_with_a_reason() -> None:
    assert not UNSUPPORTED.keys() & (FAMILIES.keys() | WRAPPERS.keys())
    assert UNSUPPORTED.keys() - set(CONFIG_MAPPING.keys()) == {"kimi_k2"}  # whose code is in its repository


def test_a_path_that_is_no_checkpoint_is_described(folder: Path, tmp_path: Path, monkeypatch) -> None:
    for name, file in (("empty", None), ("lora", "adapter_config.json"), ("data", "a.txt")):
        (tmp_path / name).mkdir()
        if file is not None:
            (tmp_path / name / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name, message in {
        "lora/adapter_config.json": "is a file; expected the folder of",
        "empty": "is an empty folder; expected",
        "lora": "has adapter_config.json but no config.json: a LoRA adapter",
        "data": "has no config.json; expected",
        "none": "no such folder, and not a Hugging Face id",
    }.items():
        assert checkpoint_problem(name).startswith(message)
        with pytest.raises(ModelError, match=re.escape(message)):
            resolve_model(name)
    assert checkpoint_problem(str(folder)) == ""


def test_a_model_that_is_not_in_the_cache_names_the_offline_variable_once(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="Hugging Face") as raised:
        locate_model("no-such-owner/nothing")
    assert str(raised.value).count("HF_HUB_OFFLINE") == 1
    assert len(str(raised.value)) < 200


def test_names_of_models_are_resolved_or_refused(folder: Path) -> None:
    assert locate_model(str(folder)) == folder
    assert (locate_model("demo") / "config.json").parts[-2] == "target"
    for name, message in (("./nothing/here", "no such folder"), ("demo:nothing", "demo")):
        with pytest.raises(ModelError, match=message):
            locate_model(name)


def test_only_a_hugging_face_id_has_revisions(monkeypatch):
    import huggingface_hub

    from pipeline.checkpoints.locate import folder_here

    requested = []

    def download(name, revision, allow_patterns, cache_dir):
        requested.append((name, revision))
        return str(demo_model("target"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name", revision="v2") == resolve_model("owner/name") == demo_model("target").resolve()
    assert requested == [("owner/name", "v2"), ("owner/name", None)]
    assert folder_here("owner/name", "v2") is None
    with pytest.raises(ModelError, match="only a Hugging Face id has revisions"):
        resolve_model(str(demo_model("target")), revision="v2")
