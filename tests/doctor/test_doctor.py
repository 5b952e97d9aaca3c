"""`pipeline doctor`: passed checks are listed, failed ones have an advice, and no secret is shown."""

import importlib
import json
import os
import shutil
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from pipeline.checkpoints.locate import resolve_model
from pipeline.config import load_job
from pipeline.demo import demo_model
from pipeline.doctor import Check, Setup, diagnose, exit_code, machine_checks
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup import memory
from pipeline.errors import ConfigError
from pipeline.machine import host
from pipeline.machine.cgroup import CpuQuota, MemoryLimit
from pipeline.stores.retries import RetryPolicy
from tests.stores.boxes import box_url

SECRET = "hunter2-never-shown"
JOB = """\
input: {path: data}
prompt: {column: text}
model: {path: demo:target-awq}
output: {path: out/new}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "data" / "a.parquet")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def checks(group: str, **setup) -> dict[str, Check]:
    return {check.name: check for check in diagnose(Setup(**setup)) if check.group == group}


def copied(folder: Path, **config) -> Path:
    """Copy the embedded model to a folder, with changes to its config.json."""
    shutil.copytree(demo_model("target-awq"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_job_that_can_run(work, pipe):
    code, out, err = pipe("doctor", "job.yaml")
    assert code == 0, out + err
    for group in ("versions", "devices", "memory and disks", "kernels", "job", "model", "output"):
        assert f"\n{group}\n" in out
    for expected in ("valid, 1 row", "AWQ int4, groups of 128", "0 failed"):
        assert expected in out
    assert sorted(p.name for p in work.iterdir()) == ["data", "job.yaml"], "the probe removes its folders"
    code, out, _ = pipe("doctor", "job.yaml", "--json")
    report = json.loads(out)
    assert (code, report["failed"]) == (0, 0)
    assert {check["state"] for check in report["checks"]} <= {"ok", "warning"}


def test_an_existing_output_is_unchanged(work):
    (work / "out").mkdir()
    (work / "out" / "mine").write_text("x")
    assert checks("output", output="out")["out"].state == "ok"
    assert (work / "out" / "mine").read_text() == "x"


def test_without_a_job_only_the_machine_is_checked():
    assert {check.group for check in diagnose(Setup())} == {"versions", "devices", "memory and disks", "kernels"}


def test_mistakes_of_the_job_exit_with_2(work, pipe):
    code, out, _ = pipe("doctor", "job.yaml", "--model", "./nowhere", "--input", "none", "--output", "data/a.parquet")
    assert code == 2
    for expected in ("./nowhere: no such folder", "input.path none: does not exist", "data/a.parquet"):
        assert expected in out
    (work / "job.yaml").write_text(JOB.replace("column: text", "column: txt"))
    code, out, _ = pipe("doctor", "job.yaml")
    assert code == 2
    assert "did you mean 'text'?" in out
    (work / "job.yaml").write_text(JOB.replace("column", "colum"))
    code, out, err = pipe("doctor", "job.yaml", "--json")
    assert code == 2
    assert json.loads(out)["error"]["mistakes"][0]["key"] == "prompt.colum"
    assert "Did you mean `column`?" in err


@pytest.mark.parametrize(("config", "broken", "expected"), [
    ({"model_type": "mamba"}, None, "model_type = 'mamba'"),
    ({"hidden_size": -1}, None, "hidden_size"),
    ({}, "config.json", "config.json"),
    ({}, "tokenizer.json", "tokenizer.json"),
    ({}, "model.safetensors", "safetensors"),
])  # fmt: skip
def test_a_model_that_cannot_be_served(tmp_path, config, broken, expected):
    folder = copied(tmp_path / "m", **config)
    if broken == "model.safetensors":
        data = (folder / broken).read_bytes()
        (folder / broken).write_bytes(data[: len(data) // 2])
    elif broken:
        (folder / broken).unlink()
    failed = [c for c in checks("model", model=str(folder)).values() if c.state == "failed"]
    assert len(failed) == 1
    assert expected in failed[0].found
    assert exit_code(failed) == 2


def test_a_missing_tensor_of_the_index(tmp_path):
    folder = copied(tmp_path / "m")
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "gone": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 tensors are missing from the files: gone" in checks("model", model=str(folder))["model"].found


def test_too_little_memory_and_too_small_a_vocabulary(tmp_path, monkeypatch):
    folder = copied(tmp_path / "m", vocab_size=1000)
    engine = EngineConfig("", device="cpu", dtype="float32")
    monkeypatch.setattr("pipeline.estimate.fit.free_cpu_bytes", lambda: 2_000_000)
    found = checks("model", model=str(folder), engine=engine)
    assert (found["memory"].state, found["memory"].exit_code) == ("failed", 3)
    assert found["tokenizer"].state == "warning"
    monkeypatch.setattr("pipeline.estimate.fit.free_cpu_bytes", lambda: 2_600_000)
    assert checks("model", model=str(folder), engine=engine)["memory"].state == "warning"


def test_limits_of_control_groups_are_shown_with_their_source(monkeypatch):
    monkeypatch.setattr(machine_checks, "cpu_quota", lambda: CpuQuota(0.5, Path("/sys/fs/cgroup/a/cpu.max")))
    limit = MemoryLimit(10**9, 10**6, Path("/sys/fs/cgroup/memory.max"))
    for module in (machine_checks, memory):
        monkeypatch.setattr(module, "memory_limit", lambda: limit)
    assert "(quota of 0.5, /sys/fs/cgroup/a/cpu.max)" in checks("devices")["cpu"].found
    found = checks("memory and disks")["memory"]
    assert (found.state, found.found) == ("warning", "1.0 MB free (limit of 1.0 GB, /sys/fs/cgroup/memory.max)")


def test_a_chat_without_a_template(work, pipe):
    folder = copied(work / "m")
    (folder / "chat_template.jinja").unlink()
    (work / "job.yaml").write_text(JOB.replace("column: text", "column: text, chat: true"))
    code, out, _ = pipe("doctor", "job.yaml", "--model", "m")
    assert code == 2
    assert "Use prompt.template instead of prompt.chat" in out


def test_a_model_in_a_store(tmp_path):
    fs = fsspec.filesystem("memory")
    for name in ("config.json", "tokenizer.json"):
        fs.pipe_file(f"/test-doctor/m/{name}", (demo_model("target-awq") / name).read_bytes())
    assert checks("model", model="memory://test-doctor/m")["architecture"].state == "ok"
    fs.rm_file("/test-doctor/m/tokenizer.json")
    assert "no tokenizer.json; expected" in checks("model", model="memory://test-doctor/m")["model"].found


def test_the_copy_of_a_model_in_a_store_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path))
    for file in demo_model("draft").iterdir():
        fsspec.filesystem("memory").pipe_file(f"/test-doctor/copied/{file.name}", file.read_bytes())
    assert "copy" not in checks("model", model="memory://test-doctor/copied")
    weights = resolve_model("memory://test-doctor/copied") / "model.safetensors"
    assert checks("model", model="memory://test-doctor/copied")["copy"].state == "ok"
    before, data = weights.stat(), weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = checks("model", model="memory://test-doctor/copied")["copy"]
    assert (found.state, "differs from the download" in found.found) == ("failed", True)


def test_the_quantizers_own_file_of_a_model_in_a_store_counts(tmp_path):
    fs, config = fsspec.filesystem("memory"), json.loads((demo_model("target-awq") / "config.json").read_text())
    options = config.pop("quantization_config")
    fs.pipe_file("/test-doctor/old/config.json", json.dumps(config).encode())
    fs.pipe_file("/test-doctor/old/tokenizer.json", b"{}")
    assert "AWQ" not in checks("model", model="memory://test-doctor/old")["architecture"].found
    fs.pipe_file("/test-doctor/old/quant_config.json", json.dumps(options).encode())
    assert "AWQ int4, groups of 128" in checks("model", model="memory://test-doctor/old")["architecture"].found


def test_a_separate_output_embedding_is_counted(tmp_path):
    folder = copied(tmp_path / "m", tie_word_embeddings=True)
    tensors, shown = load_file(folder / "model.safetensors"), []
    for head in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}):
        save_file(tensors | head, folder / "model.safetensors")
        shown.append(checks("model", model=str(folder))["architecture"].found.partition(",")[0])
    assert shown == ["2.6 million parameters", "2.9 million parameters"]


def test_a_hugging_face_id_is_only_looked_up_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = checks("model", model="no-such-user/nothing-here")
    assert found["folder"].state == "warning"
    assert "not in the local cache" in found["folder"].found


def test_an_output_in_a_store_is_probed():
    found = checks("output", output=box_url("test-doctor/out"))
    assert found["box://test-doctor/out"].state == "ok"
    assert checks("output", output="nothing://x/out")["output"].state == "failed"


def test_an_output_that_overwrites_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", os.replace)
    found = checks("output", output=str(tmp_path / "out"))
    assert [(check.state, check.name) for check in found.values()] == [("failed", "output")]


def test_full_disks(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 10**8))
    found = checks("memory and disks", output=str(tmp_path))
    assert found["output"].state == "failed"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 2 * 10**10))
    found = checks("memory and disks")
    assert any(c.state == "warning" and "95%" in c.todo for c in found.values())


def test_a_package_that_is_missing(monkeypatch):
    version = host.version

    def without_ray(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(host, "version", without_ray)
    assert checks("versions")["ray"].todo == "pip install ray"


@pytest.mark.parametrize(
    ("available", "state"), [({"omppool", "workqueue"}, "ok"), ({"workqueue"}, "warning"), (set(), "failed")]
)
def test_the_threading_layer_of_numba(monkeypatch, available, state):
    real = importlib.import_module

    def only(name, *rest):
        if name.startswith("numba.np.ufunc.") and name.rpartition(".")[2] not in available:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", only)
    assert checks("kernels")["numba threads"].state == state


def test_caches_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "numba"))
    failed = checks("kernels")["kernels"]
    assert (failed.state, failed.exit_code) == ("failed", 3)
    assert "set PIPELINE_CACHE or NUMBA_CACHE_DIR" in failed.found
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("PIPELINE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 20)))
    warned = checks("kernels")["cache"]
    assert warned.state == "warning"
    assert f"kept in {tmp_path}" in warned.found
    assert "RAY_TMPDIR" in checks("memory and disks")["ray's folder"].todo


def test_activations_in_fp8(work, monkeypatch):
    job = load_job(str(work / "job.yaml"), ("engine.activation_dtype=fp8",))
    found = {check.name: check for check in diagnose(Setup.of_job(job)) if check.group == "kernels"}
    assert "fp8" in found["linear"].found
    assert "fp8" not in checks("kernels")["linear"].found

    def refuse(*_):
        raise ConfigError("needs compute capability 8.9 or newer")

    monkeypatch.setattr("pipeline.kernels.activations.act_quant.with_act_quant", refuse)
    (failed,) = (check for check in diagnose(Setup.of_job(job)) if check.name == "activations in fp8")
    assert (failed.state, failed.exit_code) == ("failed", 2)


def test_a_check_that_breaks_does_not_end_the_others(monkeypatch):
    def broken(*_):
        raise OSError(SECRET)

    monkeypatch.setattr(machine_checks, "available_cores", broken)
    found = list(diagnose(Setup()))
    assert SECRET not in str(found)
    assert next(c for c in found if c.group == "devices").found == "the check raised OSError"
    assert {"memory and disks", "kernels"} <= {c.group for c in found}


@pytest.mark.parametrize("change", [
    ("path: out/new", "path: 's3://bucket/out'", "storage_options: {{s3: {{{o}}}}}"),
    ("path: data", "path: 's3://bucket/in'", "storage_options: {{s3: {{{o}}}}}"),
    ("path: demo:target-awq", "path: 's3://bucket/model'", "storage_options: {{s3: {{{o}}}}}"),
    ("path: data", "path: 's3://user:{s}@bucket/in'", ""),
    ("path: out/new", "path: 'nothing://user:{s}@bucket/out'", "storage_options: {{nothing: {{{o}}}}}"),
    ("path: out/new", "path: out/new", "storage_options: {{s3: {{{o}}}}}"),
    ("path: out/new", "path: out/new", "storage_options: {{s3: {s}}}"),
    ("path: out/new", "path: out/new", "storage_options: [{s}]"),
    ("path: out/new", "path: out/new, storage_options: {{{o}}}", ""),
    ("path: out/new", "path: out/new", "storag: {{{o}}}"),
])  # fmt: skip
def test_secrets_are_in_no_message_of_validate_doctor_and_run(work, pipe, monkeypatch, change):
    """The cases are unreachable stores, wrong options, and a defect that prints a traceback."""
    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: RetryPolicy(max_tries=1))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    options = f"key: {SECRET}, secret: {SECRET}, endpoint_url: 'http://127.0.0.1:1'"
    before, after, more = (text.format(s=SECRET, o=options) for text in change)
    (work / "job.yaml").write_text(JOB.replace(before, after) + more)
    for command in ("validate", "doctor", "run", "status", "report"):
        for flags in ((), ("--json",)):
            code, out, err = pipe(command, "job.yaml", *flags)
            assert SECRET not in out + err, (command, out, err)
            assert not flags or isinstance(json.loads(out), dict)
            assert code != 70, err
    for setting in (f"storage_options.s3.secret {SECRET}", f"storage_options.={SECRET}"):
        code, out, err = pipe("validate", "job.yaml", "--set", setting)
        assert SECRET not in out + err
        assert code == 2

    def defect(config, **_):
        raise RuntimeError(repr(config))

    monkeypatch.setattr("pipeline.job.running.run.run_job", defect)
    reached = JOB.replace("path: data", "path: 's3://b/in'") + f"storage_options: {{s3: {{secret: {SECRET}}}}}\n"
    (work / "job.yaml").write_text(reached)
    code, out, err = pipe("run", "job.yaml")
    assert code == 70
    assert SECRET not in out + err


def test_the_folder_of_compiled_gpu_kernels_and_its_content(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path))
    entry = tmp_path / "triton" / "KEY"
    entry.mkdir(parents=True)
    (entry / "_decode.cubin").write_bytes(bytes(3000))
    (entry / "_decode.json").write_bytes(bytes(1000))
    check = machine_checks.gpu_kernel_cache()
    assert (check.state, check.name) == ("ok", "GPU kernel cache")
    assert check.found.startswith(f"{tmp_path / 'triton'}: 1 compiled kernels, 4")
