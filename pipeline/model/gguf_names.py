"""Names of a GGUF checkpoint's tensors in the names of a model family."""

from collections.abc import Callable

from pipeline.model.layer_spec import TensorNames

PREFIX = "model."


def gguf_names(names: TensorNames, num_experts: int) -> Callable[[str], tuple[str, int | None]]:
    """Return a function from the name of a GGUF tensor, without suffix, to the family's name of it.

    For a tensor that holds all experts, the name has braces for an expert's index, and the number of experts comes with
    it; else None. An unknown name is returned as it is.
    """
    gate_up = (names.gate_up[0], names.gate_up[-1])
    qkv = zip(("attn_q", "attn_k", "attn_v"), names.qkv, strict=True) if len(names.qkv) == 3 else ()
    parts = {
        "attn_norm": names.attn_norm,
        "attn_qkv": names.qkv[0],
        **dict(qkv),
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_output": names.o,
        "post_attention_norm": names.attn_post_norm,
        "ffn_norm": names.mlp_norm,
        "ffn_gate": gate_up[0],
        "ffn_up": gate_up[1],
        "ffn_down": names.down,
        "post_ffw_norm": names.mlp_post_norm,
        "ffn_gate_inp": names.router,
        "ffn_gate_shexp": f"{names.shared}{names.expert_gate_up[0]}",
        "ffn_up_shexp": f"{names.shared}{names.expert_gate_up[-1]}",
        "ffn_down_shexp": f"{names.shared}{names.expert_down}",
        "ffn_gate_inp_shexp": names.shared_gate,
    }
    experts = {
        "ffn_gate_exps": f"{names.expert}{names.expert_gate_up[0]}",
        "ffn_up_exps": f"{names.expert}{names.expert_gate_up[-1]}",
        "ffn_down_exps": f"{names.expert}{names.expert_down}",
    }
    whole = {"token_embd": f"{PREFIX}{names.embedding}", "output_norm": f"{PREFIX}{names.final_norm}"}
    whole["output"] = "lm_head"

    def renamed(stem: str) -> tuple[str, int | None]:
        if stem in whole:
            return whole[stem], None
        block, _, rest = stem.removeprefix("blk.").partition(".")
        layer = f"{PREFIX}{names.layer.format(block)}"
        if rest in experts:
            return f"{layer}{experts[rest]}", num_experts
        return f"{layer}{parts[rest]}" if rest in parts else stem, None

    return renamed
