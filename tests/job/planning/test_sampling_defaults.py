"""The model's own sampling values: used on request, never over the job's own, and part of the job's identity."""

import json

import pytest

from pipeline.demo import demo_model
from pipeline.job.planning.checkpoint_values import stored_sampling
from pipeline.job.planning.plan import make_plan
from tests.job.conftest import TEXTS

OWN = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 99,
    "eos_token_id": 2,
}


@pytest.fixture
def planned(job):
    job.rows(TEXTS)
    (job.folder / "model" / "generation_config.json").write_text(json.dumps(OWN))

    def plan(**sampling):
        logged = []
        found = make_plan(job.config(sampling=sampling), "cpu", log=logged.append)
        return found.job.params, found.fingerprint, "".join(logged)

    return plan


def test_by_default_none_is_used(planned):
    params, plain, logged = planned()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0, 1, 0, 1)
    assert "generation_config" not in logged
    assert planned(generation_config="none")[1].digest == plain.digest
    assert "generation_config" not in plain.identity["sampling"]


def test_values_that_the_job_leaves_out_are_the_models_and_in_its_identity(planned):
    params, own, logged = planned(generation_config="model", top_p=0.5)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.5, 20, 1.05)
    assert params.max_tokens == 6
    assert (
        "sampling by the model's generation_config.json: temperature 0.6, top_k 20, repetition_penalty 1.05" in logged
    )
    written = planned(temperature=0.6, top_p=0.5, top_k=20, repetition_penalty=1.05)[1]
    assert own.digest == written.digest != planned()[1].digest


def test_an_option_that_the_model_switches_off_is_off(planned, job):
    path = job.folder / "model" / "generation_config.json"
    path.write_text(json.dumps(OWN | {"top_k": -1, "min_p": None, "top_p": 1.0}))
    params, own, _ = planned(generation_config="model")
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 1, 0, 0)
    assert own.digest == planned(temperature=0.6, repetition_penalty=1.05)[1].digest


def test_a_model_that_does_not_sample_is_greedy(job):
    path = job.folder / "model" / "generation_config.json"
    path.write_text(json.dumps({**OWN, "do_sample": False}))
    assert stored_sampling(job.folder / "model") == {"repetition_penalty": 1.05, "temperature": 0}
    path.unlink()
    assert stored_sampling(job.folder / "model") == {}
    assert stored_sampling(demo_model("target")) == {"temperature": 0}
