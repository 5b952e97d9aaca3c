"""Hints for keys of other tools: the error of each key shows its hint, and hints name only existing keys."""

import re

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.job import JobConfig
from pipeline.config.mistakes import _KNOWN_ELSEWHERE, section_at
from tests.config.test_config import MINIMAL


def test_a_key_of_another_tool_is_refused_with_its_hint(tmp_path):
    (tmp_path / "job.yaml").write_text(MINIMAL)
    hints: dict[str, str] = {}
    for section in ("", "engine", "sampling", "run"):
        fields = (section_at(JobConfig, (section,)) if section else JobConfig).model_fields
        hints |= {f"{section}.{key}".lstrip("."): hint for key, hint in _KNOWN_ELSEWHERE.items() if key not in fields}
    for key, hint in hints.items():
        with pytest.raises(JobFileError) as raised:
            load_job(tmp_path / "job.yaml", sets=[f"{key}=1"])
        (mistake,) = raised.value.mistakes
        assert (mistake.key, mistake.problem, mistake.hint) == (key, "unknown key", hint)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("batch_size", "engine.max_num_seqs"), ("concurrency", "run.actors"), ("model_source", "model.path"),
        ("speculative_config", "speculation"), ("guided_json", "sampling.structured_outputs: {json"),
        ("structured_outputs", "sampling.structured_outputs"), ("max_new_tokens", "sampling.max_tokens"),
        ("tensor_parallel_size", "engine.tensor_parallel_size"), ("trust_remote_code", "never run"),
        ("pipeline_parallel_size", "docs/parallel.md"), ("chat_template", "prompt.chat.chat_template"),
    ],
)  # fmt: skip
def test_common_keys_of_other_tools_have_a_hint(tmp_path, key, hint):
    (tmp_path / "job.yaml").write_text(MINIMAL)
    with pytest.raises(JobFileError, match=re.escape(hint)):
        load_job(tmp_path / "job.yaml", sets=[f"{key}=1"])


def test_every_key_that_a_hint_names_exists():
    hints = list(_KNOWN_ELSEWHERE.values())
    named = {name for hint in hints for name in re.findall(r"\b(?!\w+\.(?:json|md))([a-z_]+\.[a-z_]+)\b(?!/)", hint)}
    assert len(named) > 8
    for name in named:
        section, _, key = name.partition(".")
        model = section_at(JobConfig, (section,))
        assert model is not None, name
        assert key in model.model_fields, name
