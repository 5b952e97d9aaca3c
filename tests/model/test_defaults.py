"""A config.json means what transformers' config class makes of it: keys that are missing, and keys that are null."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.errors import ModelError
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.rotation import inverse_frequencies
from tests.model_folders import LINEAR_ROPE, LLAMA3_ROPE, VOCAB, YARN_ROPE

FULL = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 999,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "sliding_window": 21,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_bias": True,
    "mlp_bias": True,
    "torch_dtype": "bfloat16",
}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BOTH = [FULL, FULL | LAYER_TYPES]
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 24, "num_global_key_value_heads": 1,
          "attention_k_eq_v": True, "final_logit_softcapping": 4.0, "enable_moe_block": True, "num_experts": 5,
          "top_k_experts": 3, "moe_intermediate_size": 24}  # fmt: skip
QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "decoder_sparse_step": 2, "mlp_only_layers": [1]}  # fmt: skip
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "llama": [FULL],
    "mistral": [FULL],
    "qwen2": BOTH,
    "qwen3": BOTH,
    "gemma": [FULL | {"hidden_act": "gelu_pytorch_tanh"}],
    "gemma2": [each | GELU | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
                              "final_logit_softcapping": 4.0} for each in BOTH],
    "gemma3_text": [each | GELU | {"query_pre_attn_scalar": 24, "rope_local_base_freq": 7e3,
                                   "sliding_window_pattern": 2} for each in BOTH],
    "gemma4_text": [{k: v for k, v in each.items() if k != "rope_theta"} | GELU | GEMMA4 for each in BOTH],
    "gpt2": [{"vocab_size": VOCAB, "n_embd": 256, "n_inner": 48, "n_layer": 3, "n_head": 8, "n_positions": 999,
              "activation_function": "relu", "layer_norm_epsilon": 1e-6, "tie_word_embeddings": False,
              "scale_attn_weights": False, "torch_dtype": "bfloat16"}],
    "phi3": [FULL],
    "olmo2": [FULL],
    "olmo3": BOTH,
    "granite": [FULL | {"embedding_multiplier": 3.0, "residual_multiplier": 0.2, "logits_scaling": 4.0,
                        "attention_multiplier": 0.3}],
    "smollm3": [FULL | {"no_rope_layer_interval": 2}, FULL | {"no_rope_layers": [0, 1, 1]}, *BOTH],
    "ministral3": [FULL],
    "exaone4": [FULL | LAYER_TYPES | {"sliding_window_pattern": 2}],
    "glm4": [FULL],
    "ernie4_5": [FULL | {"use_bias": True}],
    "starcoder2": [FULL | {"use_bias": False, "norm_epsilon": 1e-6}],
    "seed_oss": [FULL | {"attention_out_bias": True}],
    "arcee": [FULL | {"hidden_act": "relu2"}],
    "mixtral": [FULL | {"num_local_experts": 5, "num_experts_per_tok": 3}],
    "qwen2_moe": [each | QWEN_MOE | {"shared_expert_intermediate_size": 40, "qkv_bias": False} for each in BOTH],
    "qwen3_moe": [FULL | QWEN_MOE],
    "olmoe": [FULL | {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}],
    "glm4_moe": [FULL | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
                         "topk_group": 2, "first_k_dense_replace": 2, "n_shared_experts": 2, "use_qk_norm": True,
                         "routed_scaling_factor": 1.5, "norm_topk_prob": False, "num_nextn_predict_layers": 2}],
    "gpt_oss": [each | {"num_local_experts": 5, "num_experts_per_tok": 3} for each in BOTH],
    "internlm3": [{**{k: v for k, v in FULL.items() if not k.endswith("_bias")}, "qkv_bias": True, "bias": True}],
}  # fmt: skip
COMPUTED = ("head_dim", "num_key_value_heads")  # null: computed from others, in families whose class refuses it too


def ours(folder: Path, values: dict[str, Any]) -> ModelConfig | None:
    """None where it is refused."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return read_config(folder)
    except ModelError:
        return None


def as_transformers_has_it(folder: Path, values: dict[str, Any]) -> ModelConfig | None:
    (folder / "config.json").write_text(json.dumps(values))
    try:
        filled = AutoConfig.from_pretrained(folder).to_dict()
    except Exception:  # its own checks have no common type
        return None
    return ours(folder, filled)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_has_the_value_of_the_config_class(tmp_path: Path, family: str) -> None:
    for full in FAMILIES[family]:
        values = full | {"model_type": family}
        assert ours(tmp_path, values) == as_transformers_has_it(tmp_path, values) is not None
        for key in full:
            changed = {name: value for name, value in values.items() if name != key}
            assert ours(tmp_path, changed) == as_transformers_has_it(tmp_path, changed), key
        bare = {"model_type": family}
        found = ours(tmp_path, bare)
        assert found == as_transformers_has_it(tmp_path, bare)
        # The default heads do not divide the default hidden size, or the default layers have inputs of their own.
        assert (found is None) == (family in ("glm4_moe", "gemma4_text"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_null_is_what_the_config_class_takes_it_for(tmp_path: Path, family: str) -> None:
    for full in FAMILIES[family]:
        for key in full:
            changed = full | {"model_type": family, key: None}
            expected = as_transformers_has_it(tmp_path, changed)
            if expected is None and key in COMPUTED:
                assert ours(tmp_path, changed) is not None
            elif key == "rope_theta" and family != "ministral3":  # loads there, and then fails to compute
                assert ours(tmp_path, changed) is None
            else:
                assert ours(tmp_path, changed) == expected, key


ROPES = [
    *({"rope_parameters": rope} for rope in (LLAMA3_ROPE, YARN_ROPE, LINEAR_ROPE)),
    {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": {}},
    {"rope_theta": 5e5, "rope_scaling": LINEAR_ROPE, "rope_parameters": YARN_ROPE},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
    {"original_max_position_embeddings": 32, "rope_parameters": YARN_ROPE},
    {"rope_theta": 5e5, "partial_rotary_factor": None},
    {"rope_parameters": YARN_ROPE | {"beta_fast": None, "beta_slow": None, "attention_factor": None}},
    {"rope_parameters": YARN_ROPE | {"truncate": False, "mscale": None}},
]


@pytest.mark.parametrize("index", range(len(ROPES)))
def test_rotary_options_mean_the_same_with_each_key_missing(tmp_path: Path, index: int) -> None:
    given = ROPES[index]
    (section,) = [name for name in ("rope_scaling", "rope_parameters") if given.get(name)][:1] or [None]
    inner = given[section] if section else {}
    variants = [given, *({**given, section: {k: v for k, v in inner.items() if k != key}} for key in inner)]
    for variant in variants:
        values = {k: v for k, v in FULL.items() if k != "rope_theta"} | {"model_type": "llama"} | variant
        found = ours(tmp_path, values)
        try:
            config = AutoConfig.from_pretrained(tmp_path)
            kind = config.rope_parameters["rope_type"]
            if kind == "default":
                exponent = torch.arange(0, 16, 2).float() / 16
                frequencies, factor = 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0
            else:
                frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        except KeyError:
            assert found is None, variant
            continue
        assert found is not None, variant
        torch.testing.assert_close(inverse_frequencies(found.ropes[0], 16), frequencies)
        assert found.ropes[0].attention_factor == pytest.approx(factor)
