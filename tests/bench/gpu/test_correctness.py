"""The checks of the GPU benchmark: right kernels pass, wrong ones do not, and one that breaks costs nothing else."""

from dataclasses import replace

import pytest
import torch

from pipeline.bench.gpu.kernels import correctness, engine_check
from pipeline.bench.gpu.kernels.correctness import Check, Correctness, check_kernels, outcome, relative_error
from pipeline.bench.gpu.kernels.engine_check import check_engine
from pipeline.bench.gpu.kernels.paged import Heads
from pipeline.bench.shapes import bench_model
from pipeline.kernels.reference import reference_kernels

CPU = torch.device("cpu")


def checks_of(monkeypatch, **wrong):
    """Those of reference kernels in float32, some of them replaced."""
    kernels = replace(reference_kernels(torch.float32, CPU), **wrong)
    monkeypatch.setattr(correctness, "select_kernels", lambda device, dtype: kernels)
    monkeypatch.setattr(correctness, "ALL_HEADS", (Heads(14, 2, 64),))
    monkeypatch.setattr(correctness, "LINEARS_NK", ((384, 256),))
    steps = {"decode": ((1, 1), (15, 65)), "chunks beside decoding": ((40, 1), (90, 65))}
    monkeypatch.setattr(correctness, "STEPS", steps)
    monkeypatch.setattr(correctness, "SHARED_STEPS", {"shared prefix": ((1, 2), (1025, 1100))})
    monkeypatch.setattr(correctness, "TOKENS", (3,))
    monkeypatch.setattr(correctness, "ROWS", (3,))
    return Correctness(tuple(check_kernels(CPU, [torch.float32])))


def test_the_oracle_passes_its_own_checks(monkeypatch):
    found = checks_of(monkeypatch)
    assert not found.failed
    assert {check.kernel for check in found.checks} == {
        "linear", "fp8 linear", "add_rms_norm", "silu_mul", "greedy", "draw", "attention", "norm_rope_write",
    }  # fmt: skip
    assert max(check.error for check in found.checks) == 0


def _off_by_one(kernels):
    def attention(q, cache, where, scale, window):
        return kernels.attention(q, cache, replace(where, context_len_S=where.context_len_S - 1), scale, window)

    return attention


def test_a_wrong_kernel_fails_and_is_named(monkeypatch):
    right = reference_kernels(torch.float32, CPU)

    def add_rms_norm(x, residual, weight, eps):
        y, residual = right.add_rms_norm(x, residual, weight, eps)
        return y, residual * 1.001

    def wrong_keys(qkv, cos, sin, norms, eps, cache, slots):
        q = right.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        if cache.k_scale_CBK is None:
            cache.k_CBKD[0, 0] += 0.01
        return q

    def wrong_values(qkv, cos, sin, norms, eps, cache, slots):
        q = right.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        if cache.k_scale_CBK is None:
            cache.v_CBKD[0, 0] += 0.01
        return q

    def wrong_codes(qkv, cos, sin, norms, eps, cache, slots):
        q = right.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        if cache.k_scale_CBK is not None:
            cache.v_CBKD.view(torch.uint8)[0, 0] ^= 1 << 1
        return q

    def wrong_scales(qkv, cos, sin, norms, eps, cache, slots):
        q = right.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        if cache.k_scale_CBK is not None:
            cache.k_scale_CBK[0, 0] *= 1.01
        return q

    def silu_mul(gate_up):
        return right.silu_mul(gate_up)[:, :-1]

    def greedy(logits):  # the last of equal ones
        token, finite = right.greedy(logits.flip(1))
        return logits.shape[1] - 1 - token, finite

    def draw(logits, how):  # with the numbers of other rows
        return right.draw(logits, torch.cat([how[:4], how[4:].roll(1, 1)]))

    def broken(weight):
        raise RuntimeError("ptxas: out of registers")

    for name, wrong in [
        ("attention", _off_by_one(right)), ("add_rms_norm", add_rms_norm), ("norm_rope_write", wrong_keys),
        ("norm_rope_write", wrong_values), ("norm_rope_write", wrong_codes), ("norm_rope_write", wrong_scales),
        ("silu_mul", silu_mul), ("greedy", greedy), ("draw", draw), ("prepare_linear", broken),
    ]:  # fmt: skip
        found = checks_of(monkeypatch, **{name: wrong})
        assert {check.kernel for check in found.failed} == {name.removeprefix("prepare_")}
        assert "FAILED" in found.to_text()
    assert all("RuntimeError: ptxas: out of registers" in check.failure for check in found.failed)
    assert "none ran" in found.to_text()
    assert found.to_json()["passed"] == len(found.checks) - len(found.failed) > 0


def test_errors_are_relative_and_never_pass_unseen():
    expected = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.1, -4.0]), expected) == pytest.approx(0.1 / 4)
    assert relative_error(torch.tensor([float("nan"), -4.0]), expected) == float("inf")
    assert relative_error(torch.tensor([1.0]), expected) == float("inf")
    check = Check("k", "c", "float32", "us", None, 0.1)
    assert not check.passed
    assert outcome(check, lambda: 0.1).passed
    assert not outcome(check, lambda: 0.11).passed
    assert "not finite" in outcome(check, lambda: float("inf")).failure


def test_the_engines_tokens_are_the_oracles_best(tmp_path, monkeypatch):
    folder = bench_model("tiny-awq", str(tmp_path)).folder
    assert check_engine(folder, CPU, "float32", 4, lambda text: None).passed
    prompts = engine_check._prompts(2048, 4)
    assert len({tuple(prompt[:64]) for prompt in prompts[1::2]}) == 1
    real = engine_check._most_behind

    def one_token_wrong(oracle, prompts, completions):
        completions[3].token_ids[1] = (completions[3].token_ids[1] + 1) % 2048
        return real(oracle, prompts, completions)

    monkeypatch.setattr(engine_check, "_most_behind", one_token_wrong)
    wrong = check_engine(folder, CPU, "float32", 4, lambda text: None)
    assert not wrong.passed
    assert wrong.error > 0.5
    assert "LONGEST" not in check_engine(tmp_path, CPU, "float32", 4, print).failure
    assert "ModelError" in check_engine(tmp_path, CPU, "float32", 4, print).failure
