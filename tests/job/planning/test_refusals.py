"""Refusals before anything is written: another job in the output, a foreign folder, a missing input."""

import json

import pytest

from pipeline.errors import FingerprintError, InputError, ModelError, OutputError
from tests.job.conftest import TEXTS, Started, run

pytestmark = pytest.mark.usefixtures("without_ray")


def test_another_prompt_is_refused_with_what_differs(job):
    run(job.rows(TEXTS))
    before = sorted(p.name for p in job.output.rglob("*"))
    with pytest.raises(FingerprintError) as refused:
        run(job, prompt={"template": "Sing {text}"}, sampling={"max_tokens": 7})
    assert 'prompt.template: "Say {text}" -> "Sing {text}"' in str(refused.value)
    assert "sampling.max_tokens: 6 -> 7" in str(refused.value)
    assert sorted(p.name for p in job.output.rglob("*")) == before
    assert Started.count == 1


def test_another_model_or_input_is_refused(job):
    run(job.rows(TEXTS))
    job.fake(step_s=0.001)
    with pytest.raises(FingerprintError, match=r"model\.config\.json: "):
        run(job)
    job.fake()
    job.rows([*TEXTS, "one more"])
    with pytest.raises(FingerprintError, match=r"files\.f0\.parquet: "):
        run(job)


def test_moved_data_and_free_settings_are_the_same_job(job):
    run(job.rows(TEXTS))
    (job.folder / "in").rename(job.folder / "moved")
    _, statuses = run(job, input={"path": str(job.folder / "moved")}, cost={"hourly_usd": 2.0}, run={"actors": 3})
    assert statuses[-1].phase == "already complete"


def test_other_numerics_are_refused_until_accepted_and_then_kept(job):
    run(job.rows(TEXTS))
    job.parts()[0].unlink()
    for key, other in (("dtype", "float32"), ("activation_dtype", "fp8"), ("kv_cache_dtype", "fp8")):
        with pytest.raises(FingerprintError, match=rf'{key}: "auto" -> "{other}"(.|\n)*--accept-numerics'):
            run(job, engine={key: other})
    run(job, engine={"dtype": "float32"}, accept_numerics=True)
    job.check(TEXTS)
    job.parts()[0].unlink()
    run(job, engine={"dtype": "float32"})
    (accepted,) = json.loads((job.output / "_pipeline" / "accepted-numerics.json").read_text())
    assert (accepted["engine"]["dtype"], accepted["engine"]["kv_cache_dtype"]) == ("float32", "auto")


def test_a_foreign_folder_is_refused_and_left_alone(job):
    job.output.mkdir()
    (job.output / "thesis.doc").write_text("")
    with pytest.raises(OutputError, match=r"not empty \(thesis\.doc\)"):
        run(job.rows(TEXTS))
    assert [p.name for p in job.output.iterdir()] == ["thesis.doc"]


def test_a_file_at_the_path_of_the_output_is_refused_by_its_own_name(job):
    job.output.write_text("mine")
    with pytest.raises(OutputError, match=rf"^{job.output}: is a file; expected a folder$"):
        run(job.rows(TEXTS))
    assert job.output.read_text() == "mine"


def test_another_format_is_refused(job):
    run(job.rows(TEXTS))
    path = job.output / "_pipeline" / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(OutputError, match=r"format 1, written by version 0\.1\.0; this one reads and writes format 2"):
        run(job)
    without_files = {"format": 2, "fingerprint": "0", "identity": {"prompt": {}}, "numerics": {}}
    for text in ("{", json.dumps(without_files)):
        path.write_text(text)
        with pytest.raises(OutputError, match="damaged"):
            run(job)


def test_a_missing_input_is_reported_before_anything_is_written(job):
    with pytest.raises(InputError):
        run(job)
    job.rows(TEXTS)
    with pytest.raises(ModelError, match="no such folder"):
        run(job, model={"path": str(job.folder / "nothing")})
    with pytest.raises(InputError, match=r"did you mean 'id'|has no column 'ide'"):
        run(job, input={"columns": ["ide"]})
    assert not job.output.exists()
