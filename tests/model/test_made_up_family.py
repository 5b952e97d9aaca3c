"""A family that only this file defines: its features are no model's, and it needs no code outside its description."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pipeline.model.config import read_config
from pipeline.model.families import FAMILIES, Family, FamilyFields
from pipeline.model.kv_cache import KVCache, single_kv_pages
from pipeline.model.layer_spec import Heads, TensorNames
from pipeline.model.rope import NO_ROPE
from tests.model_folders import VOCAB, small_config, write_tokenizer
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    our_logits,
    reference_logits,
)

NAMES = {
    "embedding": "tokens", "final_norm": "end", "layer": "blocks.{}.", "attn_norm": "a.before", "q_norm": "a.q_norm",
    "k_norm": "a.k_norm", "o": "a.out", "attn_post_norm": "a.after", "mlp_norm": "m.before", "down": "m.down",
    "mlp_post_norm": "m.after",
}  # fmt: skip
RMS = small_config(48, 40, 3, 6, 2, head_dim=12, rms_norm_eps=1e-5, tie_word_embeddings=True) | {
    "hidden_act": "gelu_pytorch_tanh", "is_layer_norm": False, "norms": ["both", "after", "before"],
    "windows": [13, None, 9], "thetas": [100.0, 10000.0, None], "rotated": [0.5, 1.0, 1.0], "has_qk_norm": True,
    "is_gated": True, "is_biased": False, "has_positions": False, "score_scale": 0.4, "score_cap": 3.0,
    "embedding_scale": 3.0, "logit_scale": 1.0, "logit_cap": 4.0, "own_heads": [None, [3, 16], [1, 8]],
}  # fmt: skip
LAYER_NORM = small_config(32, 56, 3, 4, 4, rms_norm_eps=1e-4, tie_word_embeddings=False) | {
    "hidden_act": "relu2", "is_layer_norm": True, "norms": ["both", "before", "after"],
    "windows": [None, 7, None], "thetas": [None, 500.0, 500.0], "rotated": [1.0, 0.25, 0.25], "has_qk_norm": False,
    "is_gated": False, "is_biased": True, "has_positions": True, "score_scale": 0.3, "score_cap": 0.0,
    "embedding_scale": 2.0, "logit_scale": 0.3, "logit_cap": 0.0, "own_heads": [None] * 3,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], TensorNames]] = {
    "rms": (RMS, TensorNames(qkv=("a.q", "a.k", "a.v"), gate_up=("m.gate", "m.up"), **NAMES)),
    "layer norm": (
        LAYER_NORM, TensorNames(qkv=("a.qkv",), gate_up=("m.up",), position="positions", is_transposed=True, **NAMES)),
}  # fmt: skip


def describe(f: FamilyFields) -> dict[str, Any]:
    v, bias = f.values, f.flag("is_biased")
    layers = zip(v["norms"], v["windows"], v["thetas"], v["rotated"], v["own_heads"], strict=True)
    return {
        "layers": tuple(
            f.spec(
                rope=replace(
                    NO_ROPE if theta is None else f.rope(rope_theta=theta, partial_rotary_factor=rotated),
                    head_dim=own and own[1],
                ),
                heads=own and Heads(*own),
                window=window,
                scale=v["score_scale"],
                softcap=v["score_cap"],
                pre_norm=norms != "after",
                post_norm=norms != "before",
                qk_norm="full" if v["has_qk_norm"] else "none",
                qkv_bias=bias,
                o_bias=bias,
                mlp_bias=bias,
                is_gated=v["is_gated"],
            )
            for norms, window, theta, rotated, own in layers
        ),
        "norm_kind": "layer" if v["is_layer_norm"] else "rms",
        "norm_offset": 0.0 if v["is_layer_norm"] else 1.0,
        "embedding_scale": v["embedding_scale"],
        "logit_scale": v["logit_scale"],
        "logit_softcap": v["logit_cap"],
    }


class Reference:
    """The family in plain torch, by its config values alone. T tokens, M heads, D head size."""

    def __init__(self, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.v, self.t = values, tensors

    def __call__(self, ids_1T: torch.Tensor) -> SimpleNamespace:
        x = self.t["model.tokens.weight"][ids_1T[0]]
        if self.v["has_positions"]:
            x = x + self.t["model.positions.weight"][: len(x)]
        x = x * self.v["embedding_scale"]
        for index in range(self.v["num_hidden_layers"]):
            x = self.part(x, f"model.blocks.{index}.a", index, self.attention)
            x = self.part(x, f"model.blocks.{index}.m", index, self.feed_forward)
        head = self.t["model.tokens.weight" if self.v["tie_word_embeddings"] else "lm_head.weight"]
        logits, cap = self.norm(x, "model.end") @ head.T * self.v["logit_scale"], self.v["logit_cap"]
        return SimpleNamespace(logits=(cap * (logits / cap).tanh() if cap else logits)[None])

    def part(self, x: torch.Tensor, name: str, index: int, compute: Any) -> torch.Tensor:
        norms = self.v["norms"][index]
        y = compute(x if norms == "after" else self.norm(x, f"{name}.before"), name, index)
        return x + (y if norms == "before" else self.norm(y, f"{name}.after"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, eps = self.t[f"{name}.weight"], self.v["rms_norm_eps"]
        if self.v["is_layer_norm"]:
            off = x - x.mean(-1, keepdim=True)
            return off / (off.square().mean(-1, keepdim=True) + eps).sqrt() * weight + self.t[f"{name}.bias"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.v["is_biased"]:
            return x @ self.t[f"{name}.weight"] + self.t[f"{name}.bias"]
        return x @ self.t[f"{name}.weight"].T

    def attention(self, x: torch.Tensor, name: str, index: int) -> torch.Tensor:
        kv_heads, dim = heads_of(self.v, index)
        kv = kv_heads * dim
        if f"{name}.qkv.weight" in self.t:
            q, k, v = self.linear(x, f"{name}.qkv").tensor_split((-2 * kv, -kv), dim=1)
        else:
            q, k, v = (self.linear(x, f"{name}.{part}") for part in "qkv")
        if self.v["has_qk_norm"]:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k, v = (part.view(len(x), -1, dim).transpose(0, 1) for part in (q, k, v))
        q, k = self.rotated(q, index), self.rotated(k, index)
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        scores, cap = q @ k.transpose(1, 2) * self.v["score_scale"], self.v["score_cap"]
        scores = cap * (scores / cap).tanh() if cap else scores
        behind = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (behind >= 0) & (behind < (self.v["windows"][index] or len(x)))
        out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self.linear(out.transpose(0, 1).flatten(1), f"{name}.out")

    def rotated(self, x_MTD: torch.Tensor, index: int) -> torch.Tensor:
        theta, size = self.v["thetas"][index], int(x_MTD.shape[2] * self.v["rotated"][index])
        if theta is None:
            return x_MTD
        angle = torch.arange(x_MTD.shape[1])[:, None] * theta ** -(torch.arange(0, size, 2) / size)
        low, high, rest = x_MTD.tensor_split((size // 2, size), dim=2)
        turned = low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()
        return torch.cat([*turned, rest], dim=2)

    def feed_forward(self, x: torch.Tensor, name: str, _: int) -> torch.Tensor:
        up = self.linear(x, f"{name}.up")
        if self.v["is_gated"]:
            up = F.gelu(self.linear(x, f"{name}.gate"), approximate="tanh") * up
        else:
            up = up.clamp_min(0) ** 2
        return self.linear(up, f"{name}.down")

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def heads_of(values: dict[str, Any], layer: int) -> list[int]:
    """Return the number of KV heads and the head size of a layer."""
    dim = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return values["own_heads"][layer] or [values["num_key_value_heads"], dim]


def drawn(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Draw the tensors of a checkpoint."""
    torch.manual_seed(11)
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    norms = {"model.end": hidden}
    found = {"model.tokens.weight": torch.randn(VOCAB, hidden)}
    if not values["tie_word_embeddings"]:
        found["lm_head.weight"] = torch.randn(VOCAB, hidden)
    if values["has_positions"]:
        found["model.positions.weight"] = torch.randn(values["max_position_embeddings"], hidden)
    for index, kind in enumerate(values["norms"]):
        block, (kv_heads, dim) = f"model.blocks.{index}.", heads_of(values, index)
        q, kv = values["num_attention_heads"] * dim, kv_heads * dim
        linears = {"a.out": (hidden, q), "m.up": (inner, hidden), "m.down": (hidden, inner)}
        if values["is_biased"]:
            linears["a.qkv"] = q + 2 * kv, hidden
        else:
            linears |= {"a.q": (q, hidden), "a.k": (kv, hidden), "a.v": (kv, hidden), "m.gate": (inner, hidden)}
        for name, shape in linears.items():
            found[f"{block}{name}.weight"] = 0.2 * torch.randn(shape[::-1] if values["is_biased"] else shape)
            if values["is_biased"]:
                found[f"{block}{name}.bias"] = 0.2 * torch.randn(shape[0])
        for side in ("before", "after") if kind == "both" else (kind,):
            norms |= {f"{block}a.{side}": hidden, f"{block}m.{side}": hidden}
        if values["has_qk_norm"]:
            norms |= {f"{block}a.q_norm": q, f"{block}a.k_norm": kv}
    for name, width in norms.items():
        found[f"{name}.weight"] = torch.rand(width) - 0.5 + values["is_layer_norm"]
        if values["is_layer_norm"]:
            found[f"{name}.bias"] = 0.2 * torch.randn(width)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_by_its_description_alone(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, names = VARIANTS[variant]
    monkeypatch.setitem(FAMILIES, "made_up", Family(describe, {}, names))
    tensors = drawn(values)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "made_up", "rope_theta": 10000.0}))
    write_tokenizer(tmp_path)
    model, rng, seen = Reference(values, tensors), np.random.default_rng(3), Agreement()
    stem = rng.integers(0, VOCAB, 30).tolist()
    prompts = [stem + rng.integers(0, VOCAB, length).tolist() for length in (1, 9, 40)] + [stem[:5]]
    with float32_engine(tmp_path, max_num_batched_tokens=11, max_num_seqs=3) as engine:
        difference = (our_logits(engine, prompts[2]) - reference_logits(model, prompts[2])).abs().max()
        assert float(difference) < LOGIT_TOLERANCE
        done = engine.generate(prompts, greedy(32))
        assert engine.stats.cached_tokens > 0
    config = read_config(tmp_path)
    cache = KVCache.allocate(config, 5, single_kv_pages(config, 8, torch.float32), torch.float32, torch.device("cpu"))
    per_token = config.kv_bytes_per_token(torch.float32)
    assert sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors) == 5 * 8 * per_token
    assert config.size.kv_bytes_per_token(4) == per_token
    linears = [tensor for name, tensor in tensors.items() if "blocks" in name and tensor.dim() == 2]
    assert config.num_linear_parameters() == sum(tensor.numel() for tensor in linears)
    for prompt, completion in zip(prompts, done):
        compare_greedy(model, prompt, completion.token_ids, model.greedy(prompt, 32), seen)
    assert seen.near_ties == 0
