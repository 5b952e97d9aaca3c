"""Sampling parameters as rows of an array, and what they require of a step. No torch."""

from typing import Any

import numpy as np

from pipeline.engine.sampling_params import SamplingParams

SAMPLING_OPTIONS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("top_k", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: none
    ]
)
_LARGEST = np.iinfo(np.int64).max


def sampling_options(params: SamplingParams) -> tuple[float | int, ...]:
    """Return the row of SAMPLING_OPTIONS for these parameters; it holds no stop conditions."""
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        min(params.top_k, _LARGEST),
        min(params.min_tokens, _LARGEST),
        -1 if params.logprobs is None else params.logprobs,
    )


def counts_output(options: Any) -> Any:
    """Return which rows have a penalty that counts output tokens."""
    return (options["presence_penalty"] != 0.0) | (options["frequency_penalty"] != 0.0)


def adjusts_logits(options: Any, num_generated: np.ndarray | int = 0) -> Any:
    """Return which rows have a penalty, or a mask after `num_generated` tokens: their logits change before sampling."""
    penalised = (options["repetition_penalty"] != 1.0) | counts_output(options)
    return penalised | (options["min_tokens"] > num_generated)


def is_greedy(options: Any) -> Any:
    """Return which rows always take the argmax of the model's raw logits. Accepts one row as a dict too."""
    return np.logical_and(options["temperature"] == 0.0, np.logical_not(adjusts_logits(options)))


def is_plain(params: SamplingParams) -> bool:
    """Return whether its rows are greedy without log-probabilities: each takes the best token its grammar allows."""
    return params.logprobs is None and bool(is_greedy(vars(params)))
