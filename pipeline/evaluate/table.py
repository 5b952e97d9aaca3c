"""Results of an evaluation, as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.formatting import table


@dataclass(frozen=True)
class Measured:
    """Results of one model variant.

    perplexity: over all tokens of the texts except the first of each. kl_mean, kl_p99 (nats) and top1 (share): over
    every token of the texts, against the reference. same_outputs: share of rows whose greedy tokens equal the
    reference's. These four are None for the reference. expected: share of rows whose output equals the text of the
    expected column, ignoring surrounding whitespace; None without such a column. checkpoint_bytes: the weight files.
    weight_bytes: estimate of the loaded weights. Rates are those of the greedy outputs: prompt tokens by prefill time,
    generated tokens by decoding time.
    """

    name: str
    weights: str
    dtype: str
    perplexity: float | None
    kl_mean: float | None
    kl_p99: float | None
    top1: float | None
    same_outputs: float | None
    expected: float | None
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    checkpoint_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Evaluation:
    """Results of all models on the same rows, the reference first if there is one."""

    data: str
    num_rows: int
    num_tokens: int
    left_out: Mapping[str, int]
    max_tokens: int
    device: str
    has_reference: bool
    models: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self, width: int | None = None) -> str:
        left_out = ", ".join(f"{code} {count:,}" for code, count in self.left_out.items())
        head = (
            f"{self.data}: {self.num_rows:,} rows, {self.num_tokens:,} tokens"
            + (f"; left out: {left_out}" if left_out else "")
            + f"; greedy outputs of up to {self.max_tokens} tokens on {self.device}"
        )
        rows = [_row(model) for model in self.models]
        shown = [i for i in range(len(_HEAD)) if any(row[i] != "" for row in rows)]
        sides = "".join("<" if i < _NUM_NAMES else ">" for i in shown)
        drawn = table(
            [[row[i] for i in shown] for row in rows], head=[_HEAD[i] for i in shown], sides=sides, width=width
        )
        notes = ["files: size on disk; loaded: estimate of the loaded weights; KV: bytes per token"]
        if self.has_reference:
            notes.insert(0, f"KL, top-1 and same are relative to the first line, {self.models[0].name}")
        return "\n".join([head, "", drawn, "", *notes])


_HEAD = ["model", "weights", "dtype", "perplexity", "KL mean", "KL p99", "top-1", "same", "expected",
         "prompt tok/s", "decode tok/s", "files", "loaded", "KV"]  # fmt: skip
_NUM_NAMES = 3  # left-aligned text columns


def _row(model: Measured) -> list[str]:
    return [
        model.name,
        model.weights,
        model.dtype,
        _number(model.perplexity, ".4f"),
        _number(model.kl_mean, ".2e"),
        _number(model.kl_p99, ".2e"),
        _number(model.top1, ".2%"),
        _number(model.same_outputs, ".1%"),
        _number(model.expected, ".1%"),
        f"{model.prompt_tokens_per_s:,.0f}",
        f"{model.decode_tokens_per_s:,.0f}",
        f"{model.checkpoint_bytes / 1e6:,.1f} MB",
        f"{model.weight_bytes / 1e6:,.1f} MB",
        f"{model.kv_bytes_per_token:,}",
    ]


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"
