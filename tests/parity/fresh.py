"""Parity on shapes, weights and prompts drawn anew: `python -m tests.parity.fresh --seed N [--rounds K]
[--family NAME]`.

Each round draws a checkpoint of every family with options of its own (windows, layer types, ropes, biases, factors),
leaves out keys of config.json that have their default, and draws prompts with shared beginnings and engine limits
(block size, batch, chunk, KV cache). It compares logits, and greedy tokens with and without drafts, with transformers
in float32. Without a seed one is taken from the system and printed, so that a failure can be repeated.
"""

import argparse
import json
import secrets
import tempfile
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.utils import logging

from tests.model_folders import (
    FAMILIES,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    VOCAB,
    YARN_ROPE,
    Family,
    draw_config,
    load_reference,
    write_checkpoint,
)
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
    state_bytes,
)


@dataclass
class Totals:
    """Sums over the rounds of a family, and the worst difference of logits."""

    configs: int = 0
    worst: float = 0.0
    seen: Agreement = field(default_factory=Agreement)


def vary(family: Family, config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the config with options drawn from those that the family has."""
    known = AutoConfig.for_model(family.model_type).to_dict()
    layers = int(rng.integers(2, 6))
    drawn: dict[str, Any] = {"num_hidden_layers": layers, "tie_word_embeddings": bool(rng.random() < 0.5)}
    drawn |= {key: bool(rng.random() < 0.5) for key in FLAGS if key in known}
    if "qkv_bias" in drawn:
        drawn["bias"] = drawn["qkv_bias"]  # others are refused
    drawn |= {key: float(rng.uniform(0.2, 4.0)) for key in FACTORS if key in known}
    if "head_dim" in config or family.model_type == "mixtral":
        drawn["head_dim"] = int(rng.choice([8, 16, 24, 40]))
    if config.get("sliding_window"):
        drawn["sliding_window"] = int(rng.choice([2, 7, 16, 31, 90]))
    config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window_pattern")}
    if config.get("sliding_window") and known.get("layer_types") and rng.random() < 0.7:
        drawn["layer_types"] = rng.choice(["full_attention", "sliding_attention"], layers).tolist()
    if family.name == "exaone4-full":
        drawn["layer_types"] = ["full_attention"] * layers
    if family.model_type == "gemma2":
        drawn |= {key: float(rng.uniform(1, 8)) if rng.random() < 0.7 else None for key in CAPS}
    if family.model_type in ("gemma2", "gemma3_text"):
        drawn["query_pre_attn_scalar"] = int(rng.integers(4, 64))
    if family.model_type == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": float(rng.choice([100.0, 10000.0]))}
        drawn["rope_parameters"] = {"full_attention": drawn_rope(rng), "sliding_attention": local}
    if family.model_type == "gemma4_text":
        drawn |= drawn_full_attention(config["num_attention_heads"], rng)
    if "linear_num_key_heads" in known:
        drawn |= drawn_delta_net(layers, rng)
    if family.model_type == "smollm3":
        drawn["no_rope_layers"] = rng.integers(0, 2, layers).tolist()
    if family.model_type == "gpt2":
        drawn["activation_function"] = str(rng.choice(["gelu_new", "relu", "silu", "gelu"]))
        intermediate = config.pop("intermediate_size")  # transformers reads only n_inner
        drawn["n_inner"] = intermediate if rng.random() < 0.5 else None
    if key := next((key for key in EXPERTS if key in config or known.get(key)), None):
        groups = int(rng.integers(1, 4)) if family.model_type == "glm4_moe" else 1
        experts = groups * int(rng.integers(2, 6))
        top_k = "top_k_experts" if "top_k_experts" in known else "num_experts_per_tok"
        drawn |= {key: experts, top_k: int(rng.integers(1, experts // groups + 1))}
        drawn |= {"n_group": groups, "topk_group": int(rng.integers(1, groups + 1))} if groups > 1 else {}
        config = {name: value for name, value in config.items() if name not in ("n_group", "topk_group")}
    if family.model_type in ("starcoder2", "arcee"):
        drawn["hidden_act"] = str(rng.choice(["gelu_pytorch_tanh", "relu", "relu2", "silu"]))
    others = "gpt2", "gemma3_text", "gemma4_text", "phi3", "ministral3", "olmo3", "glm4_moe"
    if family.model_type not in others and "linear_num_key_heads" not in known:
        drawn["rope_parameters"] = drawn_rope(rng)
    return config | drawn


FLAGS = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "qkv_bias", "scale_attn_weights",
         "norm_topk_prob", "use_qk_norm")  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def drawn_full_attention(num_heads: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draw what the layers of full attention of Gemma 4 have of their own."""
    rope = {"rope_type": "proportional", "rope_theta": float(rng.choice([100.0, 1e6]))}
    share = {"partial_rotary_factor": float(rng.choice([0.25, 0.4, 1.0])), "factor": float(rng.choice([1.0, 8.0]))}
    local = {"rope_type": "default", "rope_theta": float(rng.choice([100.0, 10000.0]))}
    return {
        "global_head_dim": int(rng.choice([8, 16, 24, 48])),
        "num_global_key_value_heads": int(rng.choice([n for n in (1, 2, 3, 4) if num_heads % n == 0])),
        "attention_k_eq_v": bool(rng.random() < 0.7),
        "rope_parameters": {"full_attention": rope | share, "sliding_attention": local},
        "final_logit_softcapping": float(rng.uniform(1, 8)) if rng.random() < 0.7 else None,
    }


def drawn_delta_net(layers: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the shape of Gated DeltaNet layers, which layers they are, and the share of rotated values of the others."""
    types = rng.choice(["full_attention", "linear_attention"], layers).tolist()
    types[int(rng.integers(layers))] = "full_attention"
    key_heads = int(rng.choice([1, 2, 4]))
    rope = {"rope_type": "default", "rope_theta": float(rng.choice([100.0, 10000.0, 1e6]))}
    return {
        "layer_types": types,
        "head_dim": int(rng.choice([8, 16, 24, 40])),
        "linear_key_head_dim": int(rng.choice([8, 12, 32])),
        "linear_value_head_dim": int(rng.choice([8, 20, 64])),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * int(rng.integers(1, 4)),
        "linear_conv_kernel_dim": int(rng.integers(1, 7)),
        "rope_parameters": rope | {"partial_rotary_factor": float(rng.choice([0.25, 0.5, 1.0]))},
    }


def drawn_rope(rng: np.random.Generator) -> dict[str, Any]:
    """Draw a kind of rope whose borders are within the prompts' lengths."""
    rope = dict(ROPES[int(rng.integers(len(ROPES)))])
    return rope | {"rope_theta": float(rng.choice([100.0, 10000.0, 1e6]))}


ROPES = {"rope_type": "default"}, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, YARN_ROPE | {"factor": 40.0, "truncate": False}


def leave_out_defaults(folder: Path, family: Family, rng: np.random.Generator) -> None:
    """Remove about half of the keys of config.json that have the default of the family's class."""
    default, path = AutoConfig.for_model(family.model_type).to_dict(), folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    is_default = {key: key != "model_type" and key in default and default[key] == values[key] for key in values}
    kept = {key: value for key, value in values.items() if not is_default[key] or rng.random() < 0.5}
    path.write_text(json.dumps(kept), encoding="utf-8")


ROUTER_TIE = 2e-5


def router_gap(model: Any, token_ids: list[int]) -> float:
    """Return the least difference between the logits of the last chosen expert and the next one, over all tokens."""
    gaps: list[float] = []

    def observe(router: Any, inputs: Any, outputs: Any) -> None:
        logits_TE, top_k = outputs[0].sort(-1, descending=True).values, outputs[1].shape[-1]
        if top_k < logits_TE.shape[-1]:
            gaps.append(float((logits_TE[..., top_k - 1] - logits_TE[..., top_k]).min()))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(observe) for router in routers]
    reference_logits(model, token_ids)
    for hook in hooks:
        hook.remove()
    return min(gaps, default=float("inf"))


def check_family(folder: Path, rng: np.random.Generator, totals: Totals) -> str:
    """Compare one drawn checkpoint under drawn limits; return a line about it."""
    model = load_reference(folder)
    stem = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
    prompts = []
    for _ in range(8):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 90))).tolist()
        prompts.append(stem + own if rng.random() < 0.5 else own)
    num_tokens = int(rng.integers(4, 65))
    limits = {
        "block_size": int(rng.choice([1, 4, 8, 16, 32])),
        "max_num_seqs": int(rng.integers(1, 9)),
        "max_num_batched_tokens": int(rng.integers(9, 300)),
        "max_model_len": 224,
        "enable_prefix_caching": bool(rng.random() < 0.7),
    }
    drafts = {"method": "lookup", "num_speculative_tokens": int(rng.integers(1, 7)), "forced": True}
    continuations = [greedy_reference(model, prompt, num_tokens) for prompt in prompts]
    decided = [router_gap(model, p + c) > ROUTER_TIE for p, c in zip(prompts, continuations)]
    prompts, continuations = list(compress(prompts, decided)), list(compress(continuations, decided))
    if not prompts:
        return "all prompts have a token for which two experts are nearly tied"
    with float32_engine(folder, **limits) as engine:
        expected = reference_logits(model, prompts[0])
        rounding = own_error(folder, prompts[0])  # more than usual if attention is sharp
        worst = float((our_logits(engine, prompts[0]) - expected).abs().max())
        assert worst < LOGIT_TOLERANCE + 2 * rounding, f"logits differ by {worst:.1e} under {limits}"
        of_token = engine.runner.decoder.config.kv_bytes_per_token(torch.float32)  # type: ignore[attr-defined]
        kv_bytes = int(rng.integers(240, 700)) * of_token + state_bytes(engine)
    preemptions = cached = accepted = 0
    for speculation in ("off", drafts):
        with float32_engine(folder, kv_cache_memory_bytes=kv_bytes, speculation=speculation, **limits) as engine:
            engine.scheduler.admission.expected_output = int(rng.choice([1, 64]))
            done = engine.generate(prompts, greedy(num_tokens))
            engine.pool.check()
            preemptions += engine.stats.num_preemptions
            cached += engine.stats.cached_tokens
            accepted += sum(engine.stats.accepted_by_position)
        for prompt, completion, continuation in zip(prompts, done, continuations):
            compare_greedy(model, prompt, completion.token_ids, continuation, totals.seen)
    totals.configs, totals.worst = totals.configs + 1, max(totals.worst, worst)
    return (
        f"logits within {worst:.1e}, {num_tokens} tokens x 8, {preemptions} preemptions, {cached} cached, "
        f"{accepted} drafts accepted, {limits}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--family", choices=[family.name for family in FAMILIES], action="append")
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    chosen = [family for family in FAMILIES if arguments.family is None or family.name in arguments.family]
    totals = {family.name: Totals() for family in chosen}
    for round_ in range(arguments.rounds):
        for family in chosen:
            rng = np.random.default_rng([seed, round_, sum(family.name.encode())])
            with tempfile.TemporaryDirectory() as root:
                config = vary(family, draw_config(family, rng), rng)
                folder = write_checkpoint(Path(root) / family.name, family, config, int(rng.integers(1 << 31)))
                leave_out_defaults(folder, family, rng)
                print(f"{family.name}: {check_family(folder, rng, totals[family.name])}", flush=True)
    print("| family | configs | tokens | worst logit difference | near-ties |\n| --- | --- | --- | --- | --- |")
    for name, total in totals.items():
        print(f"| {name} | {total.configs} | {total.seen.compared} | {total.worst:.1e} | {total.seen.near_ties} |")


if __name__ == "__main__":
    main()
