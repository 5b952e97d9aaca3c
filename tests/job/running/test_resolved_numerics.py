"""All engines of an output resolve the same types of activations and KV cache, in one run and over several."""

import json

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.errors import FingerprintError
from pipeline.job.actor.resolved_numerics import RESOLVED, agree
from tests.job.conftest import TEXTS, run, success

ON_H100 = {"device_name": "NVIDIA H100 80GB HBM3", "activation_dtype": "fp8", "kv_cache_dtype": "bfloat16"}
ON_A100 = {"device_name": "NVIDIA A100-SXM4-80GB", "activation_dtype": "none", "kv_cache_dtype": "bfloat16"}


def test_engines_of_a_run_that_resolve_otherwise_are_named(tmp_path):
    store = PartStore(str(tmp_path))
    for resolved in (ON_H100, ON_H100, {"device": "server", "model": "served"}):
        agree(store, resolved)
    named = r"activation_dtype is none on this engine \(NVIDIA A100.*\), and was fp8 on the first one \(NVIDIA H100"
    with pytest.raises(FingerprintError, match=named):
        agree(store, ON_A100)
    with pytest.raises(FingerprintError, match="kv_cache_dtype is float8_e4m3fn on this engine"):
        agree(store, ON_H100 | {"kv_cache_dtype": "float8_e4m3fn"})


@pytest.mark.usefixtures("without_ray")
def test_a_run_with_other_types_is_refused_unless_they_are_accepted(job, tmp_path):
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(ON_H100))
    job.fake(resolved_in=str(machine)).rows(TEXTS)
    run(job, sample=3)
    assert json.loads((job.output / RESOLVED).read_text())["activation_dtype"] == "fp8"
    machine.write_text(json.dumps(ON_A100))
    with pytest.raises(FingerprintError, match=r"activation_dtype is none on this engine.*--accept-numerics"):
        run(job)
    assert not job.parts()
    report, _ = run(job, accept_numerics=True)
    assert report.work.resumed_rows == 3
    assert success(job)["completed_rows"] == len(TEXTS)
    assert json.loads((job.output / RESOLVED).read_text())["activation_dtype"] == "none"


@pytest.mark.usefixtures("without_ray")
def test_another_job_tried_in_the_same_folder_starts_over(job, tmp_path):
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(ON_H100))
    job.fake(resolved_in=str(machine)).rows(TEXTS)
    run(job, sample=3)
    machine.write_text(json.dumps(ON_A100))
    run(job, sample=3, prompt={"template": "Tell {text}"})
    assert json.loads((job.output / RESOLVED).read_text())["activation_dtype"] == "none"


@pytest.mark.usefixtures("without_ray")
def test_the_embedded_model_records_its_types(job):
    from pipeline.job.running.run import run_job

    job.rows(TEXTS[:2])
    run_job(job.config(model={"path": "demo:target-awq"}, engine={"dtype": "float32", "kv_cache_dtype": "fp8"}))
    found = json.loads((job.output / RESOLVED).read_text())
    assert found == {"activation_dtype": "none", "kv_cache_dtype": "float8_e4m3fn", "device": "cpu"}
