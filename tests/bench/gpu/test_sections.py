"""Single sections: what is wrong has no time, what fails costs nothing else, and each keeps what it has as it goes."""

import importlib
import json
import shutil
import stat
from dataclasses import replace

import pytest
import torch

from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.kernel_times import KernelTime
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.result import Result, read_results
from pipeline.bench.gpu.sections import correctness, kernel_alone, machine, under_tool
from pipeline.bench.gpu.sections.process import run_task
from pipeline.bench.gpu.subject import Subject, known_rates
from pipeline.bench.gpu.task import Setting, Task
from pipeline.bench.shapes import bench_model
from pipeline.kernels.select import select_kernels

kernels_section = importlib.import_module("pipeline.bench.gpu.sections.kernels")
tiles_section = importlib.import_module("pipeline.bench.gpu.sections.tiles")
RIGHT = Check("silu_mul", "1 tokens", "float32", "torch", 0.0, 0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = str(tmp_path_factory.mktemp("shapes"))
    for name in ("tiny", "tiny-awq"):
        bench_model(name, place)
    return place


@pytest.fixture
def setting(tmp_path, models):
    there = Setting(str(tmp_path), "cpu", "float32", models, is_smoke=True)
    there.results.mkdir()
    return there


def run(setting, section, **options):
    task = Task("it", section, 60, options)
    code = run_task(task, setting)
    return code, read_results(setting.results)["it"]


def test_what_fails_costs_nothing_else(setting, monkeypatch):
    good = RIGHT, KernelTime("attention", "decoding, 1 at 1", 2e-6, 1e-6, 1.0, 1.0)

    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(kernels_section, "kernel_cases", lambda *_: iter([lambda: good, breaks, lambda: good]))
    code, found = run(setting, "kernels", model="tiny-awq", what="kernels")
    assert code == 70
    assert found.failures == ("kernels: RuntimeError: CUDA error: an illegal memory access",)
    assert len(found.figures["kernels"]["times"]) == 2


def test_a_killed_section_keeps_what_it_had(setting, monkeypatch):
    def killed(*_):
        yield lambda: (RIGHT, KernelTime("silu_mul", "1 tokens", 2e-6, 1e-6, 1.0, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels_section, "kernel_cases", killed)
    with pytest.raises(KeyboardInterrupt):
        run(setting, "kernels", model="tiny", what="kernels")
    assert len(read_results(setting.results)["it"].figures["kernels"]["times"]) == 1


def test_a_wrong_kernel_has_no_time(setting, monkeypatch):
    """Whatever is wrong with it; the others have theirs."""
    kernels = select_kernels(torch.device("cpu"), torch.float32)

    def doubled(kernel):
        return lambda *inputs: 2 * kernel(*inputs)

    def breaks(logits_RV):
        raise RuntimeError("ptxas: out of registers")

    def wrong_values(qkv, cos, sin, norms, eps, cache, slots):
        q_TND = kernels.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        cache.v_CBKD.view(torch.uint8)[0, 0] ^= 1 << 6
        return q_TND

    def prepare(weight):
        return doubled(kernels.prepare_linear(weight))

    wrong = {
        "silu_mul": doubled(kernels.silu_mul), "attention": doubled(kernels.attention), "greedy": breaks,
        "sample": lambda logits, how: kernels.sample(logits, torch.cat([how[:4], how[4:] * 0.5])),
        "norm_rope_write": wrong_values, "prepare_linear": prepare, "rounded": {},
    }  # fmt: skip
    monkeypatch.setattr(kernels_section, "select_kernels", lambda *_: replace(kernels, **wrong))
    _, found = run(setting, "kernels", model="tiny", what="kernels")
    assert {time["kernel"] for time in found.figures["kernels"]["times"]} == {"add_rms_norm"}
    assert "WRONG greedy float32, 4 rows: RuntimeError: ptxas: out of registers" in found.text
    wrong_ones = {check["kernel"] for check in found.figures["checks"]} - {"add_rms_norm"}
    assert wrong_ones == {
        "silu_mul", "norm_rope_write", "norm_rope_write, fp8", "attention", "attention, fp8", "greedy", "sample",
    }  # fmt: skip
    _, found = run(setting, "kernels", model="tiny", what="linears")
    assert {time["path"] for time in found.figures["linears"]["times"]} == {"16 bit"}


def test_shards_check_everything_once(setting, monkeypatch):
    monkeypatch.setattr(correctness, "engine_checks", lambda *_: [lambda: [replace(RIGHT, kernel="engine")]] * 3)
    monkeypatch.setattr(correctness, "run_tests", lambda *of: {f"test {of[2]}": "", f"other {of[2]}": "broke"})
    about = {"models": ["tiny"], "dtype": "float32", "shards": 3, "tests": "cpu"}
    names = []
    for shard in range(3):
        _, found = run(setting, "correctness", shard=shard, **about)
        assert found.figures["tests"] == [f"test {shard}"]
        assert found.figures["checks"][-1]["failure"] == "broke"
        names += [(check["kernel"], check["case"]) for check in found.figures["checks"] if check["kernel"] != "tests"]
    result = Result(Task("all", "correctness", 1), setting)
    every = [check for item in correctness.check_items(result, ["tiny"], "float32") for check in item()]
    assert sorted(names) == sorted((check.kernel, check.case) for check in every)
    assert all(check.passed for check in every)
    _, found = run(setting, "correctness", shard=0, is_deterministic=True, **about)
    assert {check["kernel"] for check in found.figures["checks"]} == {"tests"}


def test_a_lost_card_ends_its_shard(setting, monkeypatch):
    """Whatever comes after it in the process would fail for no fault of its own."""
    lost = replace(RIGHT, error=None, failure="CUDA error")
    monkeypatch.setattr(correctness, "check_items", lambda *_: [lambda: [RIGHT], lambda: [lost], lambda: 1 / 0])

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    code, found = run(setting, "correctness", models=[], dtype="float32", shard=0, shards=1, tests="none")
    assert code == 70
    assert len(found.figures["checks"]) == 2
    assert "illegal memory access" in found.failures[0]


def test_rates_are_measured_once(setting, monkeypatch):
    subject = Subject.of(setting, "tiny")
    monkeypatch.setattr("pipeline.bench.gpu.subject.measure_rates", lambda *_: Rates(1.0, 2.0))
    arguments = setting, subject.stopwatch(), subject.dtype, subject.scale
    assert known_rates(*arguments) == Rates(1.0, 2.0)
    assert run_task(Task("machine", "machine", 60), setting) == 0
    known = known_rates(*arguments)
    assert known.copy_bytes_per_s > 2.0 < known.gemm_flops_per_s


def test_what_a_program_says_of_the_machine():
    assert machine.said(["echo", "12.8"]) == "12.8"
    assert machine.said(["no-such-program"]) == "no-such-program is not there"


def test_the_section_tiles_keeps_what_each_case_gave(setting, monkeypatch):
    pytest.importorskip("triton")
    from tests.bench.gpu.test_tiles import fake_case

    monkeypatch.setattr(tiles_section, "left_out", lambda device: "")
    monkeypatch.setattr(
        "pipeline.bench.gpu.kernels.tile_cases.tile_cases", lambda *_: [fake_case, lambda: 1 / 0, fake_case]
    )
    code, found = run(setting, "tiles", model="tiny-awq", kernels=["worst"], budget_s=9.0)
    assert code == 70, "a case that fails is a failure, and the others go on"
    assert len(found.figures["tiles"]["times"]) == 2 * 4
    assert found.failures == ("tiles: ZeroDivisionError: division by zero",)


@pytest.mark.parametrize("kernel", kernel_alone.KERNELS)
def test_a_kernel_alone_is_checked(setting, kernel):
    code, found = run(setting, "kernel_alone", model="tiny-awq", kernel=kernel)
    assert code == 0
    assert len(found.figures["checks"]) == (len(kernel_alone.TOKENS) if kernel == "int4" else 1)
    assert all(check["error"] <= check["tolerance"] for check in found.figures["checks"])


def test_a_tool_that_finds_something_fails_the_section(setting, tmp_path, monkeypatch):
    code, found = run(setting, "under_tool", tool="ncu", model="tiny-awq", kernel="int4")
    if shutil.which("ncu") is None:
        assert (code, found.text) == (0, "ncu is not installed")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\nfor word; do case $word in *sections) echo $word;; esac; done\necho found 1 error\nexit 9\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, found = run(setting, "under_tool", tool="compute-sanitizer", model="tiny-awq", kernel="int4")
    assert code == 70
    assert found.text.splitlines() == [
        "compute-sanitizer, int4: exit code 9", "pipeline.bench.gpu.sections", "found 1 error",
    ]  # fmt: skip
    assert "exit code 9 on int4" in found.failures[0]
    assert "--error-exitcode" in under_tool.TOOLS["compute-sanitizer"]


def test_tasks_travel_as_one_argument(setting):
    task = Task("it", "jobs", 3.5, {"model": "tiny", "requests": ["a b"], "variant": "1,024 rows"})
    assert Task.from_command_line(task.command_line(setting)) == (task, setting)
    assert json.loads(task.command_line(setting))["setting"]["is_smoke"] is True
