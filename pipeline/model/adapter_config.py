"""`AdapterConfig`: the fields of a LoRA adapter's adapter_config.json (PEFT). Unsupported options are rejected by name.

Imports no torch.
"""

import re
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from pipeline.checkpoints.adapters import ADAPTER_CONFIG
from pipeline.checkpoints.file_checks import read_json
from pipeline.weights.config_fields import Fields

MAX_RANK = 1 << 12
# Option -> its values without effect, and why others are refused.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "peft_type": (("LORA",), "LORA: other kinds of adapters are not supported"),
    "use_dora": ((False,), "false: DoRA rescales the merged weights"),
    "bias": (("none",), "none: biases of an adapter are not supported"),
    "lora_bias": ((False,), "false: biases of an adapter are not supported"),
    "modules_to_save": (([],), "null: whole modules, such as embeddings or heads, are not supported"),
    "trainable_token_indices": (([], {}), "null: changed embeddings are not supported"),
    "target_parameters": (([],), "null: adapters of experts are not supported"),
    "layer_replication": (([],), "null: replicated layers are not supported"),
    "alora_invocation_tokens": (([],), "null: an adapter that begins in the middle of a text is not supported"),
    "use_qalora": ((False,), "false: QALoRA is not supported"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal"),
        "true: this initialization changes the weights of the base model; convert the adapter to plain LoRA",
    ),
}


@dataclass(frozen=True)
class AdapterConfig:
    """Rank and scale of each adapted linear, by its name in PEFT (`model.layers.0.self_attn.q_proj`).

    rank_pattern, alpha_pattern: values that replace `rank` and `alpha` for names that end with a match of the pattern;
    the first one counts. target_suffixes: ends of the names of the linears that must be adapted; None: the file does
    not list them, or restricts them to some layers.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()
    target_suffixes: tuple[str, ...] | None = None

    def rank_of(self, name: str) -> int:
        return next((rank for pattern, rank in self.rank_pattern if pattern.fullmatch(name)), self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor of B A x."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.fullmatch(name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def is_target(self, name: str) -> bool:
        """Return whether the adapter must contain the linear `name`."""
        return any(name == end or name.endswith(f".{end}") for end in self.target_suffixes or ())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read `folder`/adapter_config.json. Raises ModelError naming an invalid or unsupported option."""
    path = folder / ADAPTER_CONFIG
    f = Fields(read_json(path), path)
    for name, (neutral, expected) in _UNSUPPORTED.items():
        value = f.values.get(name)
        if (value is not None or name == "peft_type") and not any(
            type(value) is type(n) and value == n for n in neutral
        ):
            raise f.refuse(name, expected)
    rank = f.integer("r", 1, MAX_RANK)
    ranks, alphas = f.section("rank_pattern"), f.section("alpha_pattern")
    is_partial = any(f.values.get(name) is not None for name in ("layers_to_transform", "exclude_modules"))
    lists_targets = isinstance(f.values.get("target_modules"), list) and not is_partial
    return AdapterConfig(
        rank=rank,
        alpha=f.number("lora_alpha"),
        use_rslora=f.values.get("use_rslora") is not None and f.flag("use_rslora"),
        rank_pattern=tuple((_ending(ranks, key), ranks.integer(key, 1, MAX_RANK)) for key in ranks.values),
        alpha_pattern=tuple((_ending(alphas, key), alphas.number(key)) for key in alphas.values),
        target_suffixes=f.names("target_modules") if lists_targets else None,
    )


def _ending(section: Fields, key: str) -> re.Pattern[str]:
    """Return the pattern of names that end with a match of `key`, as PEFT compares them."""
    section.pattern(key, key)  # checked alone
    return re.compile(rf"(?:.*\.)?(?:{key})")
