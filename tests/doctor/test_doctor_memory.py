"""Memory table of the doctor, compared with figures computed by hand."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import SHAPES
from pipeline.config import load_job
from pipeline.demo import demo_model
from pipeline.doctor import Setup, diagnose, job_checks, machine_checks, memory_of, memory_table
from pipeline.engine.config import EngineConfig
from pipeline.estimate import fit
from pipeline.estimate.cards import predicted_speed
from pipeline.estimate.fit import ServedModel
from pipeline.kernels.cpu.linear import linear_bf16
from pipeline.model.config import read_config
from pipeline.roofline.cards import load_cards
from pipeline.roofline.cost_model import Ceilings, StepLoad, step_seconds
from pipeline.roofline.shares import MEASURED

# The demonstration model: 4 layers of 2 key-value heads of 64, 2,623,744 parameters of which 2,304 are norms.
NUM_WEIGHTS = 2_621_440
NUM_LINEAR = NUM_WEIGHTS - 1024 * 256  # without the embeddings, which are tied
KV_BFLOAT16 = 2 * 4 * 2 * 64 * 2


def devices(setup: Setup) -> list[SimpleNamespace]:
    """Return this machine and the cards as the command's JSON has them."""
    found: dict[str, Any] = memory_of(setup).to_json()
    return [SimpleNamespace(**each) for each in found["devices"]]


def on_cpu(**engine: str) -> Setup:
    return Setup(model="demo:target", engine=EngineConfig("", device="cpu", **engine))


def test_cards_have_room_in_the_rest_of_their_memory():
    found = devices(Setup(model="demo:target"))
    assert memory_of(Setup(model="demo:target")).lengths == (512, 1024), "no longer than the model's context"
    assert [device.name for device in found[1:]] == [card.name for card in load_cards()]
    l4 = found[-2]
    assert (l4.name, l4.dtype, l4.memory_bytes, l4.weight_bytes) == ("L4", "bfloat16", 24 * 10**9, 2 * NUM_WEIGHTS)
    assert l4.kv_bytes_per_token == KV_BFLOAT16
    blocks = (21_600_000_000 - 2 * 2**30 - 2**29 - 2 * NUM_WEIGHTS) // (64 * KV_BFLOAT16)
    assert l4.sequences == [blocks // 8, blocks // 16] == [18_034, 9_017]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_this_machine_has_room_in_its_free_memory(monkeypatch, dtype):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000_000)
    here, width = devices(on_cpu(dtype=dtype))[0], 4 if dtype == "float32" else 2
    embeddings = 2 * 2 * 1024 * 256  # a table and a linear, each stored in 16 bit
    assert here.weight_bytes == 2 * NUM_LINEAR + embeddings
    kv = KV_BFLOAT16 // 2 * width
    blocks = int((1_000_000_000 - here.weight_bytes) * 0.25) // (16 * kv)
    assert here.sequences == [blocks // 32, blocks // 64]


def test_a_cache_in_8_bits_holds_more(monkeypatch):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000_000)
    wide, narrow = (devices(on_cpu(kv_cache_dtype=kind)) for kind in ("auto", "fp8"))
    assert (narrow[0].kv_dtype, narrow[-1].kv_dtype) == ("float8_e4m3fn", "float8_e4m3fn")
    assert {device.kv_bytes_per_token for device in narrow} == {2 * 4 * 2 * (64 + 4)}
    blocks = int((1_000_000_000 - narrow[0].weight_bytes) * 0.25) // (16 * 2 * 4 * 2 * (64 + 4))
    assert narrow[0].sequences == [blocks // 32, blocks // 64]
    assert narrow[-1].sequences[0] > 1.8 * wide[-1].sequences[0]


def test_a_model_that_does_not_fit_leaves_no_room(monkeypatch):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000)
    small = replace(load_cards()[0], memory_bytes=2 * 2**30)
    monkeypatch.setattr(memory_table, "load_cards", lambda: (small,))
    assert [device.sequences for device in devices(on_cpu())] == [[0, 0], [0, 0]]


def test_sizes_by_format_equal_those_of_real_checkpoints():
    table = memory_of(Setup(model="demo:target-awq"))
    files = table.checkpoint_bytes
    for form, folder in (("16 bit", "target"), ("4 bit, groups of 128", "target-awq")):
        stored = (demo_model(folder) / "model.safetensors").stat().st_size
        assert files[form] == pytest.approx(stored, rel=0.02)
    assert files["8 bit"] == NUM_LINEAR + NUM_LINEAR // 128 + 2 * 1024 * 256


def test_the_command_shows_the_table_and_has_it_in_json(pipe, tmp_path):
    code, out, _ = pipe("doctor", "--model", "demo:target")
    assert code == 0
    for expected in ("memory of the model", "RTX 4090", "prompts/s"):
        assert expected in out
    assert "cannot run this" not in out
    code, out, _ = pipe("doctor", "--model", "demo:target", "--json")
    memory = json.loads(out)["memory"]
    assert [device["name"] for device in memory["devices"]][1] == "H200"
    assert memory["devices"][1]["sequences"] == [118_456, 59_228]
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    code, out, _ = pipe("doctor", "--model", str(tmp_path), "--json")
    assert (code, json.loads(out)["memory"]) == (2, None)
    assert json.loads(pipe("doctor", "--json")[1])["memory"] is None


@pytest.mark.parametrize(("name", "is_known"), [("NVIDIA L4", True), ("a card of tomorrow", False)])
def test_a_device_of_this_machine_reports_its_own_memory(monkeypatch, name, is_known):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (5, 24_000_000_000))
    properties = SimpleNamespace(name=name, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    found = devices(Setup(model="demo:target"))
    assert found[0].sequences == [18_034, 9_017]
    assert found[0].speed == (found[-2].speed if is_known else None)


def write_70b(folder, is_awq):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["llama-70b"].config(is_awq)))
    return str(folder)


@pytest.mark.parametrize(
    ("is_awq", "cards"),
    [(False, {"H200": 2, "H100 80GB SXM": 4, "A100 40GB SXM": 8, "L40S": 4, "L4": 8}),
     (True, {"H200": 1, "H100 80GB SXM": 1, "A100 40GB SXM": 2, "L40S": 2, "L4": 4})],
)  # fmt: skip
def test_a_70b_model_is_divided_over_the_cards_that_it_needs(tmp_path, is_awq, cards):
    setup = Setup(model=write_70b(tmp_path / "70b", is_awq))
    found, text = devices(setup), memory_of(setup).to_text()
    by_name = {each.name: each for each in found}
    assert {name: by_name[name].num_cards for name in cards} == cards
    linears, table_weights = 80 * (8192 * 10_240 + 8192 * 8192 + 3 * 8192 * 28_672), 2 * 8192 * 128_256
    for device in found[1:]:
        n = device.num_cards
        packed = int(linears * (0.5 + 4 / 128)) if is_awq else 2 * linears
        assert device.weight_bytes == (packed + 2 * table_weights) // n
        assert device.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 // n
        parts = device.weight_bytes + device.kv_bytes + device.step_bytes + device.free_bytes
        assert parts == device.memory_bytes
        assert device.step_bytes == (2 << 30) + (512 << 20)
        assert device.free_bytes == pytest.approx(0.1 * device.memory_bytes, abs=2)
        assert device.sequences[0] == device.kv_bytes // (64 * device.kv_bytes_per_token) // 8 > 0
        assert device.speed["output_tokens_per_s"] > 0
    here = found[0]
    assert here.weight_bytes + here.kv_bytes + here.free_bytes == here.memory_bytes
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["L4"])
    assert row[1] == str(cards["L4"])
    assert "exchanges between cards assumed" in text


def test_a_job_decides_the_number_of_cards(tmp_path):
    folder = write_70b(tmp_path / "70b", is_awq=False)
    eight = devices(of_job(tmp_path, model=folder, tensor_parallel_size=8))
    assert {each.num_cards for each in eight[1:]} == {8}
    fewest = devices(of_job(tmp_path, model=folder))
    assert eight[1].speed["output_tokens_per_s"] > fewest[1].speed["output_tokens_per_s"]
    flops = 2 * (70_552_387_584 - 2 * 8192 * 128_256)  # of a token's linears
    assert eight[1].speed["prompt_tokens_per_s"] * flops > load_cards()[0].bf16_flops, "more than one card can compute"
    two = {each.name: each for each in devices(of_job(tmp_path, model=folder, tensor_parallel_size=2))}
    assert (two["L4"].num_cards, set(two["L4"].sequences), two["L4"].speed) == (2, {0}, None)
    assert two["L4"].free_bytes < 0
    three = devices(of_job(tmp_path, model=folder, tensor_parallel_size=3))
    assert all("64 query heads are not divisible" in each.lacks for each in three[1:])


def test_the_gpus_of_a_machine_must_suffice_for_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (20_000_000_000, 24_000_000_000))
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    found = {
        size: [each.found for each in machine_checks.devices(of_job(tmp_path, tensor_parallel_size=size)) if each.todo]
        for size in (2, 4)
    }
    assert found == {2: [], 4: ["2, but engine.tensor_parallel_size is 4"]}


@pytest.mark.parametrize(("device", "factor"), [("cpu", 2), ("cuda", 1)])
def test_the_shares_of_several_ranks_are_counted(tmp_path, monkeypatch, device, factor):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2_000_000, 24_000_000_000))
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    dtype = {"device": device, "dtype": "float32"}
    one, two = (
        next(c for c in job_checks.model(of_job(tmp_path, tensor_parallel_size=n, **dtype)) if c.name == "memory")
        for n in (1, 2)
    )
    per_token = [int(re.search(r"KV cache ([\d,]+) bytes", each.found)[1].replace(",", "")) for each in (one, two)]
    assert per_token == [2 * KV_BFLOAT16, factor * KV_BFLOAT16]
    whole, share = (float(re.search(r"about ([\d.]+) MB", each.found)[1]) for each in (one, two))
    assert share == pytest.approx(whole * factor / 2, abs=0.1)
    if device == "cuda":
        assert two.state == "failed"
        assert two.todo.startswith("Divide it over several GPUs with engine.tensor_parallel_size")


def of_job(tmp_path, model="demo:target", quantization="none", speculation=None, **engine):
    """Return the setup of a job with these engine options."""
    job = {
        "input": {"path": "in"}, "prompt": {"column": "text"}, "output": {"path": "out"},
        "model": {"path": model, "quantization": quantization}, "engine": engine, "speculation": speculation or {},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return Setup.of_job(load_job(str(tmp_path / "job.yaml")))


def test_the_quantized_form_of_the_job_is_counted(tmp_path, monkeypatch):
    by_kind = {kind: devices(of_job(tmp_path, quantization=kind))[-2] for kind in ("none", "int8", "int4-rtn", "nf4")}
    packed = int(NUM_LINEAR * (0.5 + 8 / 128))  # scales made on load have 32 bits
    assert by_kind["none"].weight_bytes == 2 * NUM_WEIGHTS
    assert by_kind["int4-rtn"].weight_bytes == 2 * NUM_WEIGHTS + packed  # its 16-bit form fits next to it
    assert by_kind["int8"].weight_bytes == by_kind["nf4"].weight_bytes == 2 * NUM_WEIGHTS  # widened on the card
    here = devices(of_job(tmp_path, quantization="int4-rtn", device="cpu", dtype="float32"))[0]
    assert here.weight_bytes == int(NUM_LINEAR * (0.5 + 8 / 128)) + 2 * 2 * 1024 * 256
    widened = devices(of_job(tmp_path, quantization="nf4", device="cpu", dtype="bfloat16"))[0]
    assert widened.weight_bytes == 2 * NUM_LINEAR + 2 * 2 * 1024 * 256
    for alone, per_weight in ((True, 0.5 + 3 / 128), (False, 2.5 + 8 / 128)):  # products of pairs, and oneDNN's
        monkeypatch.setattr(linear_bf16, "use_avx512_bf16", lambda alone=alone: alone)
        here = devices(of_job(tmp_path, quantization="int4-rtn", device="cpu", dtype="bfloat16"))[0]
        assert here.weight_bytes == int(NUM_LINEAR * per_weight) + 2 * 2 * 1024 * 256


def test_fp8_of_a_job_is_counted_and_cards_without_it_are_listed(tmp_path):
    plain = devices(of_job(tmp_path, model="demo:target-awq"))
    setup = of_job(tmp_path, model="demo:target-awq", activation_dtype="fp8", kv_cache_dtype="fp8")
    by_name, text = {device.name: device for device in devices(setup)}, memory_of(setup).to_text()
    h100, a100 = by_name["H100 80GB SXM"], by_name["A100 80GB SXM"]
    assert h100.weight_bytes == 2 * NUM_WEIGHTS - NUM_LINEAR
    assert h100.kv_dtype == "float8_e4m3fn"
    assert h100.speed["prompt_tokens_per_s"] > plain[2].speed["prompt_tokens_per_s"]
    assert (a100.speed, a100.lacks.split(":")[0]) == (None, "engine.activation_dtype")
    assert {device.name for device in by_name.values() if device.lacks} == {"A100 80GB SXM", "A100 40GB SXM"}
    assert "kernels as measured on one H200 (2026-11-26); on other cards assumed" in text
    assert (
        "A100 80GB SXM, A100 40GB SXM cannot run this: engine.activation_dtype: fp8 needs compute capability 8.9"
        in text
    )
    row = next(line for line in text.splitlines() if line.strip().startswith("A100 40GB"))
    assert row.split()[-2:] == ["-", "-"]
    only_cache = devices(of_job(tmp_path, model="demo:target-awq", kv_cache_dtype="fp8"))
    assert not any(device.lacks for device in only_cache), "a cache in fp8 needs no units for it"
    processors = devices(of_job(tmp_path, model="demo:target-awq", activation_dtype="int8"))
    assert [device.lacks != "" for device in processors] == [False, *[True] * len(load_cards())]


def test_weights_in_host_memory_are_not_on_the_card(tmp_path):
    plain, setup = devices(Setup(model="demo:target")), of_job(tmp_path, cpu_offload_gb=0.003)
    found, text = devices(setup), memory_of(setup).to_text()
    layer = 2 * NUM_LINEAR // 4
    for offloading, resident in zip(found[1:], plain[1:], strict=True):
        assert offloading.host_bytes == 3 * layer
        assert offloading.weight_bytes == resident.weight_bytes - (3 - 2) * layer
        assert offloading.sequences[-1] >= resident.sequences[-1]
        assert offloading.speed["output_tokens_per_s"] <= resident.speed["output_tokens_per_s"]
    assert found[1].copy_s == 3 * layer / 64e9
    assert "3.5 MB more of each card's weights in host memory (engine.cpu_offload_gb)" in text
    assert "0.0553 ms on H200, H100 80GB SXM\n" in text
    assert found[0].lacks == "engine.cpu_offload_gb needs a GPU"
    reason = "engine.cpu_offload_gb = 3.0: expected 0, or more than 2.4 MB"
    too_much = of_job(tmp_path, cpu_offload_gb=3)
    assert all(device.lacks.startswith(reason) for device in devices(too_much)[1:])
    assert memory_of(too_much).to_text().count(reason) == 1


def test_a_draft_model_is_counted(tmp_path):
    speculation = {"method": "draft_model", "model": "demo:draft"}
    plain, drafting = (of_job(tmp_path, model="demo:target-awq", speculation=each) for each in ({}, speculation))
    for one, two in zip(devices(plain), devices(drafting), strict=True):
        assert two.weight_bytes > one.weight_bytes
        assert two.kv_bytes_per_token > one.kv_bytes_per_token
    (found,) = (check.found for check in job_checks.model(drafting) if check.name == "memory")
    assert "MB of weights (with a draft model)" in found


def test_speed_follows_the_cost_model_and_the_measured_shares_of_the_data_sheet():
    (l40s,) = (card for card in load_cards() if card.name == "L40S")
    config = read_config(demo_model("target"))
    speed = devices(Setup(model="demo:target"))[-3].speed
    assert speed["sequences"] == 512
    tokens = StepLoad(np.ones(512, dtype=np.int64), np.full(512, 512), 512)
    step = step_seconds(tokens, config.size, config.weights_on_card(), Ceilings.of_card(l40s, MEASURED))
    assert speed["output_tokens_per_s"] == pytest.approx(512 / step.total_s)
    model = ServedModel(config, EngineConfig(""))
    on_l40s = model.on_card(l40s, 1)
    assert predicted_speed(l40s, model, replace(on_l40s, kv_bytes=0)) is None
    copying = replace(on_l40s, limits=replace(on_l40s.limits, max_num_seqs=1), offload=fit.OffloadPlan((0,), 10**11, 0))
    host_rate = MEASURED.host_copy * l40s.pcie_bytes_per_s / 10**11
    assert predicted_speed(l40s, model, copying).output_tokens_per_s == pytest.approx(host_rate)


def test_a_model_without_a_form_for_the_activations_is_a_config_error(tmp_path):
    for mistake, model, quantization in (
        ("16- or 32-bit weights", "demo:target", "none"),
        ("is quantized already", "demo:target-awq", "int8"),
    ):
        setup = of_job(tmp_path, model=model, quantization=quantization, activation_dtype="fp8")
        failed = [check for check in diagnose(setup) if check.group == "model" and check.state == "failed"]
        assert [check.exit_code for check in failed] == [2]
        assert mistake in failed[0].found
        assert memory_of(setup) is None
    shown = {check.name: check.found for check in diagnose(of_job(tmp_path, quantization="int4-rtn"))}
    assert "int4-rtn made on load" in shown["architecture"]
