"""Rows to sample from: the batch that the engine passes for given options, and a plain implementation."""

import math

import numpy as np
import pytest
import torch

from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.sampling_options import SAMPLING_OPTIONS, sampling_options
from pipeline.kernels import reference

EOS = frozenset({2})
LOGITS = [1.5, -0.3, 2.25, 0.0, 0.75, -2.0, 1.0, -0.5, 2.0, -1.25]
OPTIONS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "top_k after min_p, then top_p": {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.6},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (0,)},
    "all": {
        "temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 4, "stop_token_ids": (8,),
    },
}  # fmt: skip
OUTPUT, PROMPT = np.array([2, 6, 2, 1], dtype=np.int32), np.array([4, 5, 5], dtype=np.int32)


def batch_of(params, *, seeds=None, positions=None, output=None, prompt=None, eos=EOS):
    """Build the batch that the engine passes for rows with these options; their table slots are in reversed order."""
    count = len(params)
    output = output or [np.empty(0, dtype=np.int32)] * count
    prompt = prompt or [np.empty(0, dtype=np.int32)] * count
    slots = np.arange(count)[::-1].copy()
    num_prompt = np.array([len(ids) for ids in prompt], dtype=np.int64)
    num_known = num_prompt + [len(ids) for ids in output]
    token_ids = np.zeros((count, num_known.max() + 3), dtype=np.int32)
    ending_ids = np.full(count, None, dtype=object)
    for row, slot in enumerate(slots):
        token_ids[slot, : num_known[row]] = [*prompt[row], *output[row]]
        if params[row].min_tokens:
            ids = {*params[row].stop_token_ids, *(() if params[row].ignore_eos else eos)}
            ending_ids[row] = np.array(sorted(ids), dtype=np.int64)
    return SamplingBatch(
        options=np.array([sampling_options(p) for p in params], dtype=SAMPLING_OPTIONS),
        seeds=np.arange(count, dtype=np.uint64) if seeds is None else np.asarray(seeds, dtype=np.uint64),
        positions=np.zeros(count, dtype=np.int64) if positions is None else np.asarray(positions),
        ending_ids=ending_ids,
        token_ids=token_ids,
        slots=slots,
        num_prompt=num_prompt,
        num_known=num_known,
    )


def plain_distribution(logits, params, output=(), prompt=(), position=0, eos=EOS):
    """Return the distribution of one row in float64; None if it depends on rounding."""
    z = [float(np.float32(x)) for x in logits]
    if position < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            if token < len(z):
                z[token] = -math.inf
    for token in {*output, *prompt}:
        z[token] = z[token] * params.repetition_penalty if z[token] < 0 else z[token] / params.repetition_penalty
    for token in set(output):
        z[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if params.temperature == 0:
        best = z.index(max(z))
        if any(0 < z[best] - x < 1e-5 for x in z):
            return None
        return np.array([float(token == best) for token in range(len(z))])
    z = [x / params.temperature for x in z]
    if params.top_k:
        kth = sorted(z, reverse=True)[min(params.top_k, len(z)) - 1]
        if any(0 < abs(x - kth) < 1e-5 for x in z):
            return None
        z = [x if x >= kth else -math.inf for x in z]
    w = [math.exp(x - max(z)) for x in z]
    if params.min_p and any(0 < abs(x - params.min_p) < 1e-5 for x in w):
        return None
    w = [x if x >= params.min_p else 0.0 for x in w]
    p = [x / sum(w) for x in w]
    better = 0.0
    for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
        if params.top_p < 1 and abs(better - params.top_p) < 1e-5:
            return None
        if params.top_p < 1 and better >= params.top_p:
            w[token] = 0.0
        better += p[token]
    return np.array(w) / sum(w)


def mixed_rows(num_rows, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    options = [*OPTIONS.values(), {"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 0.5}]
    options.append({"temperature": 0.0, "min_tokens": 9, "logprobs": 2})
    params = [
        SamplingParams(**{"max_tokens": 20, "temperature": 1.0, **options[i % len(options)]}) for i in range(num_rows)
    ]
    lengths = rng.integers(0, 12, num_rows)
    output = [rng.integers(0, num_tokens, n).astype(np.int32) for n in lengths]
    prompt = [rng.integers(0, num_tokens, 7).astype(np.int32) for _ in range(num_rows)]
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, num_tokens)).astype(np.float32))
    seeds = rng.integers(0, 2**63, num_rows).astype(np.uint64)
    return logits, batch_of(params, seeds=seeds, positions=lengths, output=output, prompt=prompt)


class _Kernels:
    greedy, sample = staticmethod(reference.greedy), staticmethod(reference.sample)


def on_device(logits, batch, future=None, proposal=None):
    """Return the result of `on_host.sample` as a device computes it, with the reference kernels."""
    return sample_on_device(_Kernels(), logits, batch, future, proposal).output()


def rows_of(logits, batch, rows):
    shared = {"token_ids": batch.token_ids, "mask": batch.mask}
    own = {name: values[rows] for name, values in vars(batch).items() if name not in shared}
    return logits[rows], SamplingBatch(**own, **shared)


def p_value(texts: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of chi-square (Wilson and Hilferty's normal approximation); 0 if an impossible text occurred.
    Cells of less than five expected runs are one cell."""
    counts = np.bincount(np.ravel_multi_index(tuple(texts.T), expected.shape), minlength=expected.size).astype(float)
    mean = expected.ravel() * len(texts)
    if counts[mean == 0].any():
        return 0.0
    rare = (mean < 5) & (mean > 0)
    counts = np.append(counts[mean >= 5], counts[rare].sum() if rare.any() else [])
    mean = np.append(mean[mean >= 5], mean[rare].sum() if rare.any() else [])
    assert mean.sum() == pytest.approx(len(texts))
    freedom = max(len(mean) - 1, 1)
    statistic = float(((counts - mean) ** 2 / mean).sum())
    z = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
