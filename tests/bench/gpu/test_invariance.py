"""The checks of batch-invariance find what they look for, and nothing where the promise is kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.bench.gpu.kernels import invariance
from pipeline.bench.gpu.kernels.invariance import check_engine_invariance, check_invariance
from pipeline.bench.gpu.kernels.paged import Heads
from pipeline.bench.shapes import bench_model
from pipeline.engine.engine import Engine
from pipeline.kernels.contract import Kernels
from pipeline.kernels.select import select_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "TOKENS", (1, 7, 33))
    monkeypatch.setattr(invariance, "LINEARS_NK", ((96, 256),))
    monkeypatch.setattr(invariance, "ALL_HEADS", (Heads(4, 2, 64),))


def wrong(monkeypatch: pytest.MonkeyPatch, change: Callable[[Kernels], Kernels]) -> set[str]:
    """The kernels whose checks fail where `change` is made to the set."""

    def changed(device: torch.device, dtype: torch.dtype, *rest: object) -> Kernels:
        return change(select_kernels(device, dtype, "auto", True, True))

    monkeypatch.setattr(invariance, "select_kernels", changed)
    found = list(check_invariance(CPU, [torch.float32]))
    assert all(check.error is not None for check in found), [check.failure for check in found]
    return {check.kernel for check in found if not check.passed}


def test_what_is_promised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(monkeypatch, lambda kernels: kernels) == set()
    assert {check.kernel for check in check_invariance(CPU, [torch.float32])} == {
        "linear, bits", "add_rms_norm, bits", "silu_mul, bits", "attention, bits",
    }  # fmt: skip


def test_what_is_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = select_kernels(CPU, torch.float32)
    for name, kernel in (("prepare_linear", "linear, bits"), ("attention", "attention, bits")):
        assert wrong(monkeypatch, lambda own, name=name: replace(own, **{name: getattr(plain, name)})) == {kernel}

    def by_batch(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: function(x) * (1 + len(x) * 1e-6)

    assert wrong(monkeypatch, lambda own: replace(own, silu_mul=by_batch(own.silu_mul))) == {"silu_mul, bits"}


def test_the_engine_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bench_model("tiny-awq", str(tmp_path)).folder
    say = print
    kept = check_engine_invariance(folder, CPU, "float32", 3, say)
    assert kept.passed, kept
    other = {"deterministic": False, "kernels": "reference"}
    monkeypatch.setattr(invariance, "Engine", lambda config, say: Engine(replace(config, **other), say))
    off = check_engine_invariance(folder, CPU, "float32", 3, say)
    assert not off.passed
    assert off.error is not None
