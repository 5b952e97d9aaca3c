"""Tiny random checkpoints of every family, written by transformers, and a byte-level tokenizer for them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.errors import ModelError

VOCAB = 320  # 256 bytes, specials, and unused ids above


@dataclass(frozen=True)
class Family:
    """A model_type with the options that make a variant; shapes are added by `draw_config`."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
             "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
             "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]}  # fmt: skip
MINISTRAL_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                              "original_max_position_embeddings": 32}  # fmt: skip
GEMMA = {"tie_word_embeddings": True, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 19}
BY_TYPE = {"full_attention": LINEAR_ROPE | {"factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
QWEN_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA4 = {"tie_word_embeddings": True, "head_dim": 16, "global_head_dim": 24, "sliding_window": 19,
          "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0,
          "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
GLM_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
           "routed_scaling_factor": 1.5, "n_shared_experts": 2}  # fmt: skip

DELTA = {"initializer_range": 0.1, "head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 24,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip

FAMILIES = [
    Family("llama2", "llama", {"num_key_value_heads": 4}),
    Family("llama3", "llama", {"rope_parameters": LLAMA3_ROPE}),
    Family(
        "llama-linear-bias-tied",
        "llama",
        {"rope_parameters": LINEAR_ROPE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Family("mistral", "mistral", {"sliding_window": None}),
    Family("mistral-window", "mistral", {"sliding_window": 21, "head_dim": 24}),
    Family("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    Family("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    Family("qwen2-yarn", "qwen2", {"rope_parameters": YARN_ROPE}),
    Family("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    Family("qwen3-bias", "qwen3", {"attention_bias": True, "head_dim": 16}),
    Family("gemma", "gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    Family("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    Family("gemma3", "gemma3_text", GEMMA | {"rope_parameters": BY_TYPE, "sliding_window_pattern": 2}),
    Family("gemma4", "gemma4_text", GEMMA4 | K_IS_V),
    Family("gemma4-one-head-size", "gemma4_text", GEMMA4 | {"global_head_dim": 16}),
    Family("gemma4-moe", "gemma4_text", GEMMA4 | K_IS_V | GEMMA4_MOE),
    Family("gpt2", "gpt2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Family("phi3", "phi3", {"sliding_window": 23}),
    Family(
        "phi3-long-partial",
        "phi3",
        {"rope_parameters": LONG_ROPE, "num_key_value_heads": 4, "original_max_position_embeddings": 64},
    ),
    Family("olmo2", "olmo2"),
    Family("olmo3", "olmo3", {"sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]}),
    Family(
        "granite",
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 4.0, "attention_multiplier": 0.2},
    ),
    Family("smollm3", "smollm3", {"no_rope_layer_interval": 2}),
    Family("ministral3", "ministral3", {"rope_parameters": MINISTRAL_ROPE, "head_dim": 16}),
    Family("exaone4", "exaone4", {"sliding_window": 19, "sliding_window_pattern": 2, "head_dim": 16}),
    Family("exaone4-full", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"]}),
    Family("glm4", "glm4", {"head_dim": 16}),
    Family("glm4-all-rotated", "glm4", {"head_dim": 16, "partial_rotary_factor": 1.0, "attention_bias": False}),
    Family("ernie4-5", "ernie4_5", {"use_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    Family("starcoder2", "starcoder2", {"sliding_window": 23}),
    Family("seed-oss", "seed_oss", {"attention_out_bias": True, "head_dim": 16}),
    Family("arcee", "arcee", {"mlp_bias": True}),
    Family("mixtral", "mixtral", {"num_local_experts": 5}),
    Family("mixtral-window", "mixtral", {"sliding_window": 21, "num_experts_per_tok": 1}),
    Family(
        "qwen2-moe",
        "qwen2_moe",
        QWEN_MOE | {"shared_expert_intermediate_size": 64, "use_sliding_window": True, "sliding_window": 17},
    ),
    Family("qwen3-moe", "qwen3_moe", QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True}),
    Family("qwen3-moe-mixed", "qwen3_moe", QWEN_MOE | {"head_dim": 16, "mlp_only_layers": [1]}),
    Family("qwen3-5", "qwen3_5_text", DELTA | {"tie_word_embeddings": True}),
    Family("qwen3-5-moe", "qwen3_5_moe_text", DELTA | QWEN_MOE | {"shared_expert_intermediate_size": 64}),
    Family("qwen3-next", "qwen3_next", DELTA | QWEN_MOE | {"shared_expert_intermediate_size": 64}),
    Family("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    Family("glm4-moe", "glm4_moe", GLM_MOE),
    Family("glm4-moe-groups", "glm4_moe", GLM_MOE | {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    Family(
        "gpt-oss",
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 23, "rope_parameters": YARN_ROPE},
    ),
    Family("internlm3", "internlm3", {"qkv_bias": True, "bias": True, "head_dim": 16}),
]


def small_config(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the config of a model with the tokenizer of `write_tokenizer`."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": None,
    } | more


def draw_config(family: Family, rng: np.random.Generator) -> dict[str, Any]:
    """Draw random small shapes for a family. Weights are wide (initializer_range), so that attention decides tokens."""
    kv_heads = int(rng.choice([1, 2, 4]))
    heads = kv_heads * int(rng.choice([1, 2, 3]))
    if family.options.get("num_key_value_heads"):
        kv_heads = heads = int(family.options["num_key_value_heads"])
    wide = {"max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False}
    head_dim, intermediate = int(rng.choice([8, 16])), int(rng.choice([48, 80, 96]))
    if "short_factor" in family.options.get("rope_parameters", {}):  # one factor for each rotated pair of 16 values
        head_dim = 16
    config = small_config(
        heads * head_dim, intermediate, int(rng.integers(2, 4)), heads, kv_heads, rms_norm_eps=1e-5, **wide
    )
    config |= {k: v for k, v in family.options.items() if k != "num_key_value_heads"}
    if types := family.options.get("layer_types"):
        config["layer_types"] = [types[layer % len(types)] for layer in range(config["num_hidden_layers"])]
    return config


def write_checkpoint(folder: Path, family: Family, config: dict[str, Any], seed: int) -> Path:
    """Write a sharded float32 checkpoint with tokenizer; norms and biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias") or name.endswith("sinks"):
                parameter.normal_(0.0, 0.2)
            elif name.endswith(
                "A_log"
            ):  # states remember two to some hundred tokens; as initialized, most forget at once
                parameter.uniform_(-5.0, 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, *control: str) -> None:
    """Write a tokenizer of bytes, two special tokens, and others of the text `control`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|eos|>", *control])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>").save_pretrained(folder)


def make_family(folder: Path, family: Family, seed: int) -> Path:
    rng = np.random.default_rng([seed, sum(family.name.encode())])
    return write_checkpoint(folder, family, draw_config(family, rng), seed)


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model in transformers. With longrope it uses the long factors always, as an engine for long sequences. A
    Gated DeltaNet is computed token by token: in chunks it is 2 to 4 times further from the result in float64."""
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_factor" in rope:
        rope["short_factor"] = rope["long_factor"]
    options = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options).eval()
    module: Any = sys.modules[type(model).__module__]
    if hasattr(module, CHUNKED):
        in_chunks.setdefault(module, getattr(module, CHUNKED))
        setattr(module, CHUNKED, module.torch_recurrent_gated_delta_rule)
    return model


CHUNKED = "torch_chunk_gated_delta_rule"
in_chunks: dict[Any, Callable[..., Any]] = {}
"""By module of transformers: the function that `load_reference` replaces."""


class Named(dict[str, torch.Tensor]):
    """Tensors by name, as readers take them from a checkpoint."""

    def read(self, name: str) -> torch.Tensor:
        if name not in self:
            raise ModelError(f"tensor {name} is missing from the checkpoint")
        return self[name]

    def read_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.read(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(f"tensor {name} is {tuple(tensor.shape)} {tensor.dtype}")
        return tensor
