"""Random weights of experts in each form that GPU kernels support. Suffixes as in `weights/packed.py`."""

import torch

from pipeline.weights.packed import (
    CodebookWeight,
    DenseWeight,
    ExpertWeights,
    Fp8Weight,
    GroupIntWeight,
    LinearWeight,
)

FORMS = ("dense", "int4, groups of 128", "int4, groups of 32", "fp8, blocks", "fp8, outputs", "mxfp4", "nvfp4")


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_linear(form: str, n: int, k: int, has_bias: bool, random: torch.Generator) -> LinearWeight:
    """Return a weight whose outputs have about the magnitude of its inputs. Groups cut K into equal parts."""

    def uniform(*sizes: int) -> torch.Tensor:
        return (0.5 + torch.rand(sizes, generator=random)) * k**-0.5

    bias_N = torch.randn(n, generator=random).half().float() if has_bias else None
    if form == "dense":
        return DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).half(), bias_N)
    if form.startswith("int4"):
        group = int(form.split()[-1])
        q_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=random)
        zeros_NG = torch.randint(6, 10, (n, k // group), generator=random).float()
        return GroupIntWeight(q_NK, (uniform(n, k // group) / 4.6).half().float(), zeros_NG, group, bias_N)
    if form.startswith("fp8"):
        value_NK = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn)
        block = (32, 128) if form == "fp8, blocks" else (1, k)
        return Fp8Weight(value_NK, uniform(-(-n // block[0]), -(-k // block[1])), block, bias_N)
    group = 32 if form == "mxfp4" else 16
    scales_NG = uniform(n, k // group) / 3
    scales_NG = scales_NG.log2().round().exp2() if form == "mxfp4" else scales_NG
    code_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=random)
    return CodebookWeight(code_NK, scales_NG, E2M1, group, bias_N)


def random_experts(form: str, num_experts: int, hidden: int, width: int, has_bias: bool = False) -> ExpertWeights:
    random = torch.Generator().manual_seed(num_experts + hidden + width)
    gate_up, down = (
        tuple(random_linear(form, *shape, has_bias, random) for _ in range(num_experts))
        for shape in ((2 * width, hidden), (hidden, width))
    )
    return ExpertWeights(gate_up, down)
