"""`prompt.template: {file: ...}`: the file's text is the template, found next to the job file."""

from pathlib import Path

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.identity import identity_of

JOB = "input: {path: a}\nprompt: {template: %s}\nmodel: demo\noutput: {path: b}\n"


def job(folder: Path, template: str, **options):
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(JOB % template, encoding="utf-8")
    return load_job(folder / "job.yaml", **options)


def test_the_text_of_the_file_is_the_template_and_part_of_the_identity(tmp_path):
    inline = job(tmp_path, '"Sum up:\\n{text}"')
    for written in (b"Sum up:\n{text}", b"Sum up:\n{text}\n", b"\xef\xbb\xbfSum up:\r\n{text}\r\n"):
        (tmp_path / "prompt.txt").write_bytes(written)
        for template in ("{file: prompt.txt}", f"{{file: {tmp_path}/prompt.txt}}", "{file: '${NAME}.txt'}"):
            read = job(tmp_path, template, environ={"NAME": "prompt"})
            assert read.prompt.template == "Sum up:\n{text}"
            assert identity_of(read) == identity_of(inline)
            assert "file" not in str(read.data), "a job that is sent elsewhere holds the text"
    (tmp_path / "prompt.txt").write_text("Sum up {text}")
    assert identity_of(job(tmp_path, "{file: prompt.txt}")) != identity_of(inline)
    assert (
        job(tmp_path / "below", "{text}", sets=["prompt.template.file=../prompt.txt"]).prompt.template
        == "Sum up {text}"
    )


@pytest.mark.parametrize(("content", "problem"), [
    (None, r"prompt.template.file: prompt.txt: cannot be read: No such .*\n *Relative .* the job file's folder, /"),
    (b"\xff", r"prompt.template.file: prompt.txt: not UTF-8 text \(byte 0\)"),
    (b"x" * (1 << 20) + b"y", "prompt.template.file: prompt.txt: larger than 1048576 bytes"),
    (b"{text", "prompt.template: "),
    (b"", "prompt.template: must not be empty"),
])  # fmt: skip
def test_a_file_without_a_template_is_one_mistake_with_its_line(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "prompt.txt").write_bytes(content)
    with pytest.raises(JobFileError, match=rf"job\.yaml:2: {problem}") as caught:
        job(tmp_path, "{file: prompt.txt}")
    assert len(caught.value.mistakes) == 1
