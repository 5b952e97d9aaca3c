"""One kernel on one input, checked against the reference: what compute-sanitizer and ncu look at.

Only the kernel's own calls are between the marks that ncu goes by.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch

from pipeline.bench.gpu.kernels.checks import TOLERANCES, Pairs, check
from pipeline.bench.gpu.kernels.inputs import Heads, paged_step, random_int4
from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.subject import Subject
from pipeline.kernels import reference
from pipeline.kernels.contract import Kernels
from pipeline.kernels.select import select_kernels

TOKENS = (1, 16, 64)  # of int4 linears
ROWS, CONTEXT, SHARED = 64, 1088, 1024  # of decoding; SHARED tokens of the contexts are the same in cascade attention
SMOKE_ROWS, SMOKE_CONTEXT, SMOKE_SHARED = 4, 200, 128
KERNELS = ("int4", "decode", "cascade")


def run(result: Result, model: str, kernel: str) -> None:
    """kernel: of KERNELS."""
    subject = Subject.of(result.setting, model)
    kernels = select_kernels(subject.device, subject.dtype)
    calls = _int4(subject, kernels) if kernel == "int4" else _attention(subject, kernels, kernel == "cascade")
    checks = []
    for case, call in calls.items():
        checks.append(check(kernel, case, subject.dtype, "alone", 2 * TOLERANCES[subject.dtype], call))
    result.keep("\n".join(each.to_text() for each in checks), checks=[asdict(each) for each in checks])


def _marked(subject: Subject, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    call()  # compiles
    if subject.device.type != "cuda":
        return call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        out = call()
        torch.cuda.synchronize()
        return out
    finally:
        torch.cuda.profiler.stop()


def _int4(subject: Subject, kernels: Kernels) -> dict[str, Callable[[], Pairs]]:
    """The first linear of a layer at a few numbers of tokens, all of which the fused product takes."""
    name, inputs, outputs = subject.size.linears()[0]
    group = subject.weights.group_size
    weight = random_int4(outputs, inputs, group, torch.Generator().manual_seed(1))
    linear, exact = kernels.prepare_linear(weight), reference.prepare_linear(weight, torch.float32, subject.device)

    def compare(tokens: int) -> Pairs:
        x_TK = torch.randn(tokens, inputs, device=subject.device).to(subject.dtype)
        return [(_marked(subject, lambda: linear(x_TK)), exact(x_TK.float()))]

    return {f"{name}, {tokens} tokens": lambda tokens=tokens: compare(tokens) for tokens in TOKENS}


def _attention(subject: Subject, kernels: Kernels, is_shared: bool) -> dict[str, Callable[[], Pairs]]:
    rows, context, shared = (
        (SMOKE_ROWS, SMOKE_CONTEXT, SMOKE_SHARED) if subject.device.type == "cpu" else (ROWS, CONTEXT, SHARED)
    )
    size, scale = subject.size, subject.size.head_dim**-0.5

    def compare() -> Pairs:
        heads = Heads(size.heads, size.kv_heads, size.head_dim)
        common = shared if is_shared else 0
        step = paged_step([1] * rows, [context] * rows, heads, subject.dtype, subject.device, shared=common)
        ours = _marked(subject, lambda: kernels.attention(step.q_TND, step.cache, step.where, scale, None))
        everything = step.where.rows(torch.arange(rows).numpy())
        return [(ours, reference.attention(step.q_TND.float(), step.cache, everything, scale, None))]

    return {f"{rows} rows at {context}" + (f", {shared} shared" if is_shared else ""): compare}
