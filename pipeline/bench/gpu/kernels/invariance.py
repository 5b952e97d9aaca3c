"""Whether `engine.deterministic` keeps its promise on this device: a row's bits are the same whatever it is computed
with.

No oracle is needed: the same rows are computed among few and among many. An error is the share of the rows compared
whose bits differ; none may.

Suffixes as in `kernels/contract.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from pipeline.bench.gpu.kernels.correctness import EPS, Check, outcome, random_int4
from pipeline.bench.gpu.kernels.paged import Heads, paged_step
from pipeline.bench.workload import FIRST_TOKEN
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.kernels.contract import Kernels
from pipeline.kernels.select import select_kernels
from pipeline.model.config import read_config
from pipeline.weights.packed import DenseWeight, LinearWeight

TOKENS = (1, 7, 64, 512)
LINEARS_NK = ((384, 256), (1536, 2048), (1024, 3072), (151, 896))
STEP = (1, 1, 4, 130, 40, 1), (1, 1300, 200, 130, 300, 65)  # tokens that sequences compute, and their contexts
ALL_HEADS = (Heads(32, 8, 128), Heads(14, 2, 64))
PROMPT_TOKENS = (3, 64, 90, 200)
BATCHED_TOKENS, LONGEST = 96, 256


def check_invariance(device: torch.device, dtypes: Sequence[torch.dtype], every: int = 1) -> Iterator[Check]:
    """Each kernel of the deterministic set, over numbers of tokens; of these cases, each `every`th.

    On a card linears also as they are where 4-bit weights are widened in each call.
    """
    for dtype in dtypes:
        kernels = select_kernels(device, dtype, "auto", True, True)
        for kernel, case, run in islice(_cases(kernels, dtype, device), 0, None, every):
            yield outcome(_check(kernel, case, dtype, kernels.served_by[kernel]), run)
        if device.type == "cuda":
            kernels = select_kernels(device, dtype, "auto", False, True)
            for kernel, case, run in islice(_linears(kernels, dtype, device), 0, None, every):
                yield outcome(_check(kernel, f"{case}, shared scratch", dtype, kernels.served_by[kernel]), run)


def check_engine_invariance(
    folder: Path, device: torch.device, dtype: str, output_tokens: int, say: Callable[[str], None]
) -> Check:
    """Rows of the model in `folder` together, in chunks and behind a shared prefix, against each by itself: tokens and
    log-probabilities."""
    options = EngineConfig(
        str(folder),
        device=str(device),
        dtype=dtype,
        deterministic=True,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=BATCHED_TOKENS,
    )

    def error() -> float:
        rng = np.random.default_rng(3)
        first, *others = rng.integers(FIRST_TOKEN, read_config(folder).vocab_size, (5, LONGEST)).tolist()
        prompts = [first[:128] + other[:16] for other in others]
        prompts += [other[:length] for other, length in zip(others, PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, logprobs=1)
        with Engine(options, say) as engine:
            alone = []
            for prompt in prompts:
                alone += engine.generate([prompt], params)
                engine.pool.forget(range(engine.pool.num_blocks))  # the next one finds nothing to share
            together = engine.generate(prompts, params)
        pairs = zip(alone, together)
        differs = [(a.token_ids, a.logprobs, a.error) != (b.token_ids, b.logprobs, None) for a, b in pairs]
        return sum(differs) / len(differs)

    check = Check("engine, bits", folder.name, dtype, "the engine as a whole, deterministic", None, 0.0)
    return outcome(check, error)


def _check(kernel: str, case: str, dtype: torch.dtype, served_by: str) -> Check:
    return Check(f"{kernel}, bits", case, str(dtype).removeprefix("torch."), served_by, None, 0.0)


def _share_differing(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Of the last rows of x, as many as TOKENS say, how many do not come out as they do among all of them."""
    whole, compared, differing = run(x.clone()), 0, 0
    for tokens in TOKENS:
        few = run(x[-tokens:].clone())  # may be written into
        differing += int((few != whole[-tokens:]).flatten(1).any(1).sum())
        compared += tokens
    return differing / compared


def _linears(
    kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, Callable[[], float]]]:
    def of_linear(weight: LinearWeight, x_TK: torch.Tensor) -> float:
        return _share_differing(kernels.prepare_linear(weight), x_TK)

    random = torch.Generator().manual_seed(0)
    for n, k in LINEARS_NK:
        dense = DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).to(dtype))
        for name, weight in {"dense": dense, "int4": random_int4(n, k, 128, random)}.items():
            x_TK = torch.randn(2 * max(TOKENS), k, generator=random).to(device, dtype)
            yield "linear", f"{name} {k} to {n}", partial(of_linear, weight, x_TK)


def _cases(
    kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, Callable[[], float]]]:
    yield from _linears(kernels, dtype, device)
    random = torch.Generator().manual_seed(1)
    x_TH = torch.randn(2 * max(TOKENS), 2048, generator=random).to(device, dtype)
    norm_H = torch.randn(2048, generator=random).to(device, dtype)

    def normed(some_TH: torch.Tensor) -> torch.Tensor:
        return kernels.add_rms_norm(some_TH, torch.ones_like(some_TH), norm_H, EPS)[0]

    yield "add_rms_norm", "2048", partial(_share_differing, normed, x_TH)
    yield "silu_mul", "1024", partial(_share_differing, kernels.silu_mul, x_TH)
    for heads in ALL_HEADS:
        for window in (None, 48):
            about = f"{heads.num_heads} heads on {heads.num_kv_heads}" + (f", window {window}" if window else "")
            yield "attention", about, partial(_attention, kernels, heads, window, dtype, device)


def _attention(kernels: Kernels, heads: Heads, window: int | None, dtype: torch.dtype, device: torch.device) -> float:
    """A mixed step against each of its query tokens in a sequence of its own, all of these together and one alone."""
    step = paged_step(*STEP, heads, dtype, device)
    scale = step.q_TND.shape[2] ** -0.5
    whole_TND = kernels.attention(step.q_TND, step.cache, step.where, scale, window)
    num_tokens = len(whole_TND)
    compared, differing = 0, 0
    for rows in (np.arange(num_tokens), *np.arange(num_tokens)[::29, None]):
        chosen = torch.from_numpy(rows).to(device)
        own = kernels.attention(step.q_TND[chosen], step.cache, step.where.rows(rows), scale, window)
        differing += int((own != whole_TND[chosen]).flatten(1).any(1).sum())
        compared += len(rows)
    return differing / compared
