"""Hints for keys that people know from other tools: each is told where it stands, and names keys that there are."""

import json
import re

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.job import JobConfig
from pipeline.config.mistakes import _KNOWN_ELSEWHERE, FORMER, section_at
from tests.config.test_config import MINIMAL


@pytest.mark.parametrize("key", sorted(_KNOWN_ELSEWHERE))
def test_a_key_of_another_tool_is_refused_with_its_hint(tmp_path, key):
    path = tmp_path / "job.yaml"
    for section in (None, "engine", "sampling", "run"):
        model = JobConfig if section is None else section_at(JobConfig, (section,))
        assert model is not None
        if key in model.model_fields:
            continue
        path.write_text(MINIMAL + (f"{key}: 1\n" if section is None else f"{section}: {{{key}: 1}}\n"))
        with pytest.raises(JobFileError) as raised:
            load_job(path)
        (mistake,) = raised.value.mistakes
        assert (mistake.problem, mistake.hint) == ("unknown key", _KNOWN_ELSEWHERE[key])
        assert mistake.where.endswith("job.yaml:5")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("batch_size", "engine.max_num_seqs"), ("concurrency", "run.actors"), ("model_source", "model.path"),
        ("speculative_config", "speculation"), ("guided_json", "sampling.structured_outputs: {json"),
        ("structured_outputs", "sampling.structured_outputs"), ("max_new_tokens", "sampling.max_tokens"),
        ("tensor_parallel_size", "run.actors"), ("trust_remote_code", "never run"), ("hourly_price", "cost.hourly_usd"),
    ],
)  # fmt: skip
def test_the_keys_that_people_bring_along_are_known(key, named):
    assert named in _KNOWN_ELSEWHERE[key]


def test_a_former_key_is_refused_with_what_to_write_now(tmp_path):
    path = tmp_path / "job.yaml"
    for key, hint in FORMER.items():
        section, _, name = key.partition(".")
        overlay = {section: {}} if name else {section: 1}
        place = overlay[section]
        for step in name.split(".")[:-1]:
            place = place.setdefault(step, {})
        if name:
            place[name.split(".")[-1]] = 1
        path.write_text(json.dumps(overlay))
        (tmp_path / "base.yaml").write_text(MINIMAL)
        with pytest.raises(JobFileError) as raised:
            load_job(tmp_path / "base.yaml", overlays=[path])
        (mistake,) = raised.value.mistakes
        assert (mistake.key, mistake.problem, mistake.hint) == (key, "unknown key", hint)


def test_every_key_that_a_hint_names_is_there():
    hints = [*_KNOWN_ELSEWHERE.values(), *FORMER.values()]
    named = {name for hint in hints for name in re.findall(r"\b(?!\w+\.json)([a-z_]+\.[a-z_]+)\b(?!/)", hint)}
    assert len(named) > 8
    for name in named:
        section, _, key = name.partition(".")
        model = section_at(JobConfig, (section,))
        assert model is not None, name
        assert key in model.model_fields, name
