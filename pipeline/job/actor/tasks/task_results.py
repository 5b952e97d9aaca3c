"""Results of tasks and log-probabilities as plain values: for columns, for finished rows that are kept as JSON, and
back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.engine.tasks import ChoiceResult, ScoreResult, TaskResult, TokenLogprobs, VectorResult


def to_plain(result: TaskResult | None) -> dict[str, Any] | None:
    """For JSON: float32 numbers become the decimals that lead back to them."""
    match result:
        case None:
            return None
        case ScoreResult():
            return {"score": asdict(result)}
        case ChoiceResult():
            return {"choice": asdict(result)}
        case VectorResult():
            return {"vector": result.values.tolist()}


def of_plain(raw: dict[str, Any] | None) -> TaskResult | None:
    """What `to_plain` made, after it went through JSON."""
    match raw:
        case None:
            return None
        case {"score": {"logprob": logprob, "num_tokens": num_tokens, "tokens": tokens}}:
            return ScoreResult(logprob, num_tokens, None if tokens is None else tuple(map(token_logprobs, tokens)))
        case {"choice": {"logprobs": logprobs}}:
            return ChoiceResult(tuple(logprobs))
        case {"vector": values}:
            return VectorResult(np.array(values, dtype=np.float32))
    raise ValueError(f"no result of a task: {', '.join(raw)}")


def plain_logprobs(tokens: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    """As the column `logprobs` has them."""
    if tokens is None:
        return None
    return [
        {"token_id": t.token_id, "logprob": t.logprob, "top": [{"token_id": i, "logprob": p} for i, p in t.top]}
        for t in tokens
    ]


def token_logprobs(raw: dict[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(raw["token_id"], raw["logprob"], tuple((i, p) for i, p in raw["top"]))
