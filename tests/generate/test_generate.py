"""Ad hoc prompts: forms of the input, the prompts that are sent, order and form of the answers."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo import demo_model
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.errors import ConfigError, OutputError
from pipeline.generate import Saved, is_dataset, read_prompts
from pipeline.job.actor.tokenize import failed_row
from tests.job.fake_engine import FakeTokenizer


class Echo:
    """Engine that answers with the prompt, last one first."""

    seen: list[EngineConfig] = []  # noqa: RUF012

    def __init__(self, config: EngineConfig, log) -> None:
        Echo.seen.append(config)
        self.tokenizer = FakeTokenizer()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, requests):
        for r in reversed(list(requests)):
            text = bytes(r.prompt_token_ids).decode() + f"|{r.params.max_tokens}"
            done = Completion(r.row_id, [1, 2], text, "stop", len(r.prompt_token_ids))
            yield done if r.params.n == 1 else replace(done, samples=(done, replace(done, text="b", token_ids=[1])))


def test_an_adapter_answers_all_prompts(pipe):
    Echo.seen.clear()
    assert pipe("--adapter", "demo:short", "--prompt", "hello")[0] == 0
    assert list(Echo.seen[0].adapters) == ["adapter"]
    assert Echo.seen[0].adapters["adapter"].endswith("adapters/short")
    code, _, err = pipe("--adapter", "nowhere", "--prompt", "hello")
    assert (code, "nowhere: no such folder" in err) == (2, True)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe):
    """Return a function that runs `pipeline generate` in this process with the echo engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.engine.engine.Engine", Echo)
    return lambda *arguments, stdin=b"": pipe("generate", *arguments, stdin=stdin)


def rows_of(out: str) -> list[dict]:
    no_json = {"parse_constant": lambda name: pytest.fail(f"{name} is no JSON")}
    return [json.loads(line, **no_json) for line in out.splitlines()]


@pytest.fixture
def rows(pipe):
    """Return a function that returns the output of --json for a successful command."""

    def printed(*arguments, stdin: bytes = b"") -> list[dict]:
        code, out, err = pipe(*arguments, "--json", stdin=stdin)
        assert code == 0, err
        return rows_of(out)

    return printed


def test_answers_to_lines_of_text_are_in_order_with_line_numbers(pipe, rows, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo {x} <|im_end|>\nthree")
    found = [(r["source_file"], r["source_line"], r["generated_text"]) for r in rows("--input", "p.txt")]
    assert found == [("p.txt", 1, "one|256"), ("p.txt", 3, "two {x} <|im_end|>|256"), ("p.txt", 4, "three|256")]
    _, out, err = pipe("--input", "p.txt")
    heads = [line for line in out.splitlines() if line[0:1] == "#"]
    assert heads == [f"# p.txt line {line} (stop, 2 tokens)" for line in (1, 3, 4)]
    assert "3 prompts; " in err


def test_text_output_is_readable_and_controls_no_terminal(pipe, tmp_path):
    (tmp_path / "p.txt").write_text("red \x1b[31m\n" + "long " * 100)
    code, out, _ = pipe("--input", "p.txt")
    assert code == 0
    assert out.startswith("# p.txt line 1 (stop, 2 tokens)\n> red \\x1b[31m\nred \\x1b[31m|256\n\n# p.txt line 2")
    assert "\x1b" not in out


def test_all_chats_receive_one_date_that_of_the_start_or_the_given_one(rows, tmp_path, monkeypatch):
    clock = (datetime(2026, 11, 23, 23, 59, 59) + timedelta(seconds=n) for n in count())
    monkeypatch.setattr("pipeline.generate.inference.wall_time", lambda: next(clock))
    monkeypatch.setattr(FakeTokenizer, "encode_chat", lambda self, *chat: list(str(chat[-1]).encode()))
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    for given, expected in (
        ([], "2026-11-23 23:59:59|256"),
        (["--set", "prompt.chat.date=2024-02-29"], "2024-02-29 00:00:00|256"),
    ):
        assert [row["generated_text"] for row in rows("--input", "p.txt", "--chat", *given)] == [expected] * 2


@pytest.mark.parametrize("arguments", [["--input", "-"], []])
def test_standard_input_is_lines_or_objects(rows, arguments):
    assert [r["generated_text"] for r in rows(*arguments, stdin=b"a\nb\n")] == ["a|256", "b|256"]
    lines = b'{"id": 1, "text": "a"}\n\n{"id": 2, "text": "b", "n": 5}\n'
    found = rows(*arguments, "--prompt", "Sum: {text}", stdin=lines)
    answers = [(r["id"], r["generated_text"], r["source_line"]) for r in found]
    assert answers == [(1, "Sum: a|256", 1), (2, "Sum: b|256", 3)]


def test_a_prompt_is_sent_unchanged_and_a_system_prompt_makes_it_a_chat(rows):
    assert rows("-p", "a {{ b }", "--max-tokens", "7")[0]["generated_text"] == "a {{ b }|7"
    assert rows("--prompt", "hi", "--system", "Be brief.")[0]["generated_text"] == "[Be brief.]<user>hi|256"


def test_the_key_that_is_sent_without_a_template(rows):
    turns = [{"role": "user", "content": "hi"}]
    for line, expected in [
        ({"prompt": "p", "text": "t"}, "p"),
        ({"text": "t", "messages": []}, "t"),
        ({"messages": turns}, "<user>hi"),
        ({"messages": json.dumps(turns)}, "<user>hi"),
    ]:
        assert rows(stdin=json.dumps(line).encode())[0]["generated_text"] == f"{expected}|256"


def test_samples_are_lists_in_json_and_sections_in_text(pipe, rows, tmp_path):
    flags = ("--prompt", "why", "--n", "2", "--temperature", "1")
    (row,) = rows(*flags)
    assert (row["generated_text"], row["finish_reason"]) == (["why|256", "b"], ["stop", "stop"])
    assert row["num_generated_tokens"] == 3
    _, out, _ = pipe(*flags)
    samples = ["## sample 0 (stop, 2 tokens)", "why|256", "## sample 1 (stop, 1 tokens)", "b"]
    assert out.split("\n")[:6] == ["# --prompt (2 samples, 3 tokens)", "> why", *samples]
    pipe(*flags, "--output", "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["generated_text"].to_pylist() == [["why|256", "b"]]
    _, _, refused = pipe("--prompt", "why", "--n", "2")
    assert "2 with temperature 0 gives 2 equal texts" in refused
    code, _, refused = pipe(*flags, "--set", "output.samples_as=rows")
    assert (code, "output.samples_as: rows is supported only in jobs" in refused) == (2, True)
    code, _, refused = pipe("--prompt", "why", "--set", "output.accept=error is null")
    assert (code, "output.accept: is supported only in jobs" in refused) == (2, True)


def test_reasoning_is_separated_from_the_answer_in_text_and_files(
    pipe, rows, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    def stream(self, requests):
        for r in requests:
            done = Completion(r.row_id, [1, 2, 3], "so it is", "stop", 1)
            yield replace(done, reasoning="first\nthen", num_reasoning_tokens=2) if r.params.reasoning else done

    monkeypatch.setattr(Echo, "stream", stream)
    flags = ("--prompt", "why", "--set", "sampling.reasoning={start: a, end: b}")
    (row,) = rows(*flags)
    assert (row["reasoning"], row["num_reasoning_tokens"], row["generated_text"]) == ("first\nthen", 2, "so it is")
    assert "reasoning" not in rows("--prompt", "why")[0]
    _, out, _ = pipe(*flags)
    head = "# --prompt (stop, 3 tokens, 2 of them reasoning)"
    assert out.split("\n")[:7] == [head, "> why", "[reasoning]", "first", "then", "[answer]", "so it is"]
    pipe(*flags, "--output", "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["reasoning"].to_pylist() == ["first\nthen"]
    _, _, refused = pipe("--prompt", "why", "--set", "sampling.reasoning=auto")
    assert "has no known start-of-reasoning token" in refused


def test_numbers_that_json_cannot_hold_are_null(rows):
    (row,) = rows(stdin=b'{"prompt": "a", "score": NaN, "far": [1.5, Infinity]}')
    assert (row["score"], row["far"]) == (None, [1.5, None])


def test_tokens_of_prompts_that_were_refused_are_not_counted_as_read(pipe, monkeypatch):
    class Refusing(Echo):
        def stream(self, requests):
            for r in requests:
                yield failed_row(r.row_id, "prompt_too_long", "too long", 200_032)

    monkeypatch.setattr("pipeline.engine.engine.Engine", Refusing)
    code, out, err = pipe("--json", "--prompt", "x")
    assert code == 1
    assert "1 prompt, 1 failed; 0 tokens in, 0 out" in err
    assert rows_of(out)[0]["num_input_tokens"] == 200_032


def test_chat_without_a_template_is_refused_before_weights_are_read(pipe, tmp_path):
    shutil.copytree(demo_model("target-awq"), tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    Echo.seen.clear()
    code, _, err = pipe("--prompt", "hi", "--chat", "--model", "./plain")
    assert code == 2
    assert "plain: the checkpoint has no chat template" in err
    assert not Echo.seen
    assert pipe("--prompt", "hi", "--model", "./plain")[0] == 0


def test_a_failing_prompt_stops_no_other(pipe, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(
        b'{"prompt": null}\n{"prompt": ""}\n{"prompt": "half \\ud83d"}\n{"prompt": "fine"}\n{"other": 1}\n'
    )
    code, out, err = pipe("--input", "p.jsonl", "--json")
    assert code == 1
    errors = ["null_prompt", "empty_prompt", "invalid_utf8", None, "null_prompt"]
    assert [r["error"] for r in rows_of(out)] == errors
    assert [r["generated_text"] for r in rows_of(out)] == [None, None, None, "fine|256", None]
    assert "5 prompts, 4 failed" in err
    assert pipe("--input", "p.jsonl", "--output", "o.parquet")[0] == 1
    saved = pq.read_table(tmp_path / "o.parquet")
    assert saved["generated_text"].to_pylist() == [None, None, None, "fine|256", None]
    assert saved["source_line"].to_pylist() == [1, 2, 3, 4, 5]
    assert "# p.jsonl line 1 (null_prompt)\ncolumn 'prompt' is null\n" in pipe("--input", "p.jsonl")[1]


def test_values_of_mixed_types_and_result_names_in_the_input(pipe, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"text": "a", "v": 1, "o": {}, "error": "x", "source_file": "y", "source_line": 7}\n'
        '{"text": "b", "v": [2], "o": {}}\n'
    )
    code, _, err = pipe("--input", "p.jsonl", "--prompt", "{text} {v}", "--output", "o.parquet")
    assert code == 0, err
    assert "result columns have the same names: error, source_file, source_line" in err
    table = pq.read_table(tmp_path / "o.parquet")
    assert table.column("generated_text").to_pylist() == ["a 1|256", "b [2]|256"]
    assert table.column("o").to_pylist() == ["{}", "{}"]
    assert table.column("source_file").to_pylist() == ["p.jsonl"] * 2


def test_output_is_complete_and_never_overwrites_a_file(pipe, tmp_path):
    code, out, err = pipe("--output", "o.jsonl", stdin=b"a\nb\n")
    assert (code, out) == (0, ""), err
    first = (tmp_path / "o.jsonl").read_bytes()
    assert [r["generated_text"] for r in rows_of(first.decode())] == ["a|256", "b|256"]
    Echo.seen.clear()
    code, _, err = pipe("--output", "o.jsonl", stdin=b"c\n")
    assert code == 2
    assert "already exists; choose another name, or add --overwrite" in err
    assert not Echo.seen, "refused before any work"
    assert (tmp_path / "o.jsonl").read_bytes() == first
    code, out, _ = pipe("--output", "o.jsonl", "--overwrite", "--json", stdin=b"c\n")
    assert json.loads(out)["prompts"] == 1
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl"], "no temporary file is left"


def test_a_file_created_during_the_run_is_kept(tmp_path):
    saved = Saved(str(tmp_path / "o.jsonl"), overwrite=False)
    (tmp_path / "o.jsonl").write_text("mine")
    with pytest.raises(OutputError, match="nothing was replaced"):
        saved.write([], pa.schema([]))
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_compressed_lines_are_prompts_and_several_files_are_a_job(rows, pipe, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    (tmp_path / "t.txt.zst").write_bytes(pa.compress(b"c\n", codec="zstd", asbytes=True))
    assert [row["generated_text"] for row in rows("--input", "a.jsonl.gz")] == ["a|256", "b|256"]
    assert [row["generated_text"] for row in rows("--input", "t.txt.zst")] == ["c|256"]
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    code, _, err = pipe("--input", "bad.jsonl.gz")
    assert (code, "bad.jsonl.gz: damaged" in err) == (2, True)
    assert [is_dataset(name) for name in ("a.jsonl.gz", "x.jsonl", "*.jsonl", "s3://b/x.jsonl", str(tmp_path))] == [
        False, False, True, True, True
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["--input", "none.txt"], b"", "none.txt: no such file"),
        ([], b" \n\n", "stdin: contains no prompts"),
        (["--input", "bad.jsonl"], b"", "bad.jsonl:2: not JSON"),
        (["--input", "bad.jsonl"], b"", "bad.jsonl:3: expected an object"),
        ([], b'{"q": "a"}\n', 'no column prompt, text or messages among q; pass a template, such as --prompt "Sum'),
        (["--prompt", "Sum: {txt}"], b'{"text": "a"}', "did you mean 'text'?"),
        (["--prompt", "x", "--max-tokens", "0"], b"", "--max-tokens: sampling.max_tokens: expected an integer of at"),
        (["--prompt", "x", "--set", "engine.dtpye=x"], b"", "Did you mean `dtype`?"),
        (["--prompt", "x", "--output", "o.csv"], b"", "expected a file that ends in .jsonl or .parquet"),
        (["--prompt", "x", "--output", "no/o.jsonl"], b"", "folder no does not exist"),
        (["--prompt", "x", "--model", "./nowhere"], b"", "no such folder"),
        (["--input", "d"], b"", "for a dataset: pipeline run d --prompt TEXT"),
        (["--input", "named.bin"], b"", "for a dataset: pipeline run named.bin --prompt TEXT"),
    ],
)
def test_mistakes_are_reported_at_once(pipe, tmp_path, arguments, stdin, expected):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n[1]\n')
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "named.bin")
    code, out, err = pipe(*arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert expected in err


def test_a_terminal_as_standard_input_is_refused(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(ConfigError, match="pass --prompt TEXT or --input FILE"):
        read_prompts(None, None)
    with pytest.raises(ConfigError, match="--prompt refers to columns"):
        read_prompts(None, "Sum: {text}")


def test_three_prompts_in_one_line_with_the_embedded_model(tmp_path):
    """The console script runs in a new process, as for a user."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    script = Path(sys.executable).with_name("pipeline")
    done = subprocess.run(
        [script, "generate", "--input", "prompts.txt", "--max-tokens", "3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# prompts.txt line") == 3
    assert "loading demo:target-awq" in done.stderr


def test_flags_set_the_form_of_answers(pipe, rows, monkeypatch: pytest.MonkeyPatch):
    def echo_form(self, requests):
        for r in requests:
            yield Completion(r.row_id, [1], json.dumps(r.params.structured_outputs.to_dict()), "stop", 1)

    monkeypatch.setattr(Echo, "stream", echo_form)
    Path("s.json").write_text('{"type": "integer"}')
    for flags, form in [
        (("--choice", "yes", "--choice", "no"), {"choice": ["yes", "no"]}),
        (("--json-schema", "s.json"), {"json": {"type": "integer"}}),
        (("--json-schema", '{"type": "integer"}'), {"json": {"type": "integer"}}),
    ]:
        assert json.loads(rows("-p", "a", *flags)[0]["generated_text"]) == form
    assert pipe("-p", "a", "--json-schema", "s.json", "--choice", "a")[0] == 2
    code, _, err = pipe("-p", "a", "--json-schema", '{"uniqueItems": true}')
    assert code == 2
    assert "uniqueItems" in err
