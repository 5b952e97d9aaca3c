"""`pipeline validate`: the facts of a job, or all its mistakes."""

import json
import shutil
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo import demo_model
from pipeline.stores.retries import RetryPolicy
from pipeline.tokenization.tokenizer import Tokenizer
from tests.cli.conftest import JOB


def validated(pipe, code: int, *settings: str, flags=()) -> str:
    """Return the command's output or, for another code than 0, its messages. The exit code must be `code`."""
    sets = [argument for setting in settings for argument in ("--set", setting)]
    left, out, err = pipe("validate", "job.yaml", *sets, *flags)
    assert left == code, err
    assert not out or not code
    return err if code else out


@pytest.fixture
def shown(work, pipe):
    return partial(validated, pipe, 0)


@pytest.fixture
def refused(work, pipe):
    return partial(validated, pipe, 2)


@pytest.fixture
def found(work, pipe):
    """Return the facts of a valid job, from JSON."""
    return lambda *settings, flags=(): json.loads(validated(pipe, 0, *settings, flags=(*flags, "--json")))


@pytest.fixture
def put(work):
    """Write columns to a file of the input."""
    return lambda name="a.parquet", **columns: pq.write_table(pa.table(columns), work / "data" / name)


@pytest.fixture
def job(work):
    return lambda text: (work / "job.yaml").write_text(text)


def test_validate_shows_the_facts_of_the_job(work, shown, found):
    out = shown()
    for expected in (
        "demo: valid",
        "data: 1 file, 3 rows",
        "max_tokens 9",
        f"  Paths     relative paths are below {work}, the working directory\n",
        "First prompt (a.parquet row 0, 21 bytes, 17 tokens)",
        "| Sum up:\n    | one \\x1b[31mred\n",
    ):
        assert expected in out
    assert "\x1b" not in out, "control characters of the data never reach the terminal"
    assert "Draft" not in out
    assert "  Draft     demo:draft (embedded)\n" in shown("speculation={method: draft_model, model: demo:draft}")
    as_json = found(flags=("--limit", "2"))
    assert as_json["valid"]
    assert (as_json["input"]["rows"], as_json["input"]["rows_to_do"]) == (3, 2)
    assert as_json["first_prompt"]["text"] == "Sum up:\none \x1b[31mred\n"
    assert list(as_json["output_columns"])[:2] == ["id", "generated_text"]
    assert not (work / "out").exists(), "looking must not write"


def test_validate_lists_all_mistakes_of_the_file(job, refused):
    job(JOB.replace("max_tokens: 9", "max_tokens: 0").replace("model:", "modle:"))
    err = refused()
    assert err.startswith("3 mistakes:")
    assert "job.yaml:4: modle: unknown key\n    Did you mean `model`?" in err
    assert "job.yaml:5: sampling.max_tokens: expected an integer of at least 1; got 0" in err


def test_validate_lists_all_mistakes_of_the_data(refused):
    err = refused("input.columns=[id, nmae]", "prompt.template={texts}", "sampling.max_tokens={column: text}",
                  "model.path=./nowhere", "output.path=data")  # fmt: skip
    for expected in (
        "5 mistakes:",
        "no column 'nmae'",
        "did you mean 'text'?",
        "column 'text' is text, expected numbers",
        "./nowhere: no such folder",
        "output.path: data: is inside input.path data, so the next run would read its parts",
    ):
        assert expected in err


@pytest.mark.parametrize(("setting", "expected"), [
    ("input.path=nowhere", "--set: input.path: nowhere: does not exist; looked for /"),
    ("input.columns=[error]", "output.rename: {error: error_2}"),
    ("prompt.template={id}", None),
    ("output.path=memory://test-cli/out", "--set: output.path: memory://test-cli/out: memory:// exists in one"),
    ("output.path=data/out", "--set: output.path: data/out: is inside input.path data, so the next run would read"),
    ("output.path=data/_out", None),
    ("output.path=nothing://bucket/x", "cannot be opened (ValueError)"),
    ("model.path=memory://test-cli/model", "test-cli/model: no config.json and no tokenizer.json in this folder"),
    ("model.path=nothing://bucket/x", "nothing://bucket/x: cannot be opened (ValueError)"),
    ("model.path=job.yaml", "job.yaml: is a file; expected the folder of a safetensors"),
    ("model.path=data", "data: has no config.json; expected the folder of"),
    ("model.path=owner/name", None),
    ("model={path: job.yaml, revision: v1}", "job.yaml: is a file; expected the folder"),
    ("model={path: data, revision: v1}", "model.revision: data is a folder; only a Hugging Face id"),
    ("speculation={method: draft_model, model: ./nowhere}", "--set: speculation.model: ./nowhere: no such folder"),
    ("speculation={method: draft_model, model: data}", "data: has no config.json; expected the folder of"),
    ("engine.max_model_len=2048", "--set: engine.max_model_len: 2048 exceeds the 1,024 positions of demo"),
    ("engine.max_model_len=1024", None),
    ("model={path: demo:target-awq, quantization: int8}", "int8, but demo:target-awq is quantized already"),
    ("storage_options={s3: {anon: true}}", "storage_options.s3: matches no path of this job"),
])  # fmt: skip
def test_validate_checks_data_model_and_output(pipe, work, setting: str, expected: str | None):
    assert (expected or "") in validated(pipe, 2 if expected else 0, setting)


def test_validate_lists_warnings_about_the_data(work, put, job, shown, found):
    for name in ("README.md", "dataset_infos.json"):
        (work / "data" / name).write_text("{}")
    texts = [f"<|im_end|>{i}" for i in range(5)]
    put(id=range(5), text=texts)
    put("b.parquet", id=pa.array([], pa.int16()), text=pa.array([], pa.string()))
    habit = JOB.replace("Sum up:\\n{text}\\n", "<|im_start|>user\\n{text}<|im_end|>")
    job(habit)
    out = shown()
    for expected in (
        "  Warning   2 files of another format skipped (README.md): ",
        "  Warning   1 column stored in several types (id: int64 in ",
        "b.parquet, read as int64): ",
        "  Warning   5 rows with control tokens that the job file writes as text (<|im_start|>): ",
        "use prompt.messages for chats, prompt.chat for a single turn, or set prompt.special_tokens",
        "  Warning   5 rows with texts of control tokens in the data (a.parquet row 0: <|im_end|>): ",
    ):
        assert expected in out
    plain = found()
    assert [each["count"] for each in plain["warnings"]] == [2, 1, 5, 5]
    job(habit.replace("prompt: {", "prompt: {special_tokens: template, "))
    parsed = found()
    kinds = ["files_passed_over", "columns_unified", "control_tokens_in_rows"]
    assert [each["kind"] for each in parsed["warnings"]] == kinds
    assert parsed["first_prompt"]["tokens"] < plain["first_prompt"]["tokens"]
    assert parsed["first_prompt"]["text"] == plain["first_prompt"]["text"] == f"<|im_start|>user\n{texts[0]}<|im_end|>"


def test_validate_lists_the_files_that_a_job_skips(work, shown, refused, found):
    (work / "data" / "b.parquet").write_bytes(b"")
    assert "b.parquet" in refused()
    assert "Skipped   1 damaged file: b.parquet (" in shown("input.on_corrupt=skip")
    assert [f["file"] for f in found("input.on_corrupt=skip")["input"]["skipped_files"]] == ["b.parquet"]


def test_a_store_without_an_answer_is_an_error_of_the_environment(work, pipe, aws, monkeypatch, refused):
    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: RetryPolicy(max_tries=1))
    aws("http://127.0.0.1:1")
    keys = ("output.path", "input.path", "model.path")
    settings = [f"{key}=s3://bucket/{key}" for key in keys]
    code, out, err = pipe("validate", "job.yaml", *(f"--set={setting}" for setting in settings), "--json")
    assert code == 3, err
    assert json.loads(out)["error"]["kind"] == "EnvironmentFailed"
    assert all(f"{key}: " in err for key in keys)
    refused(*settings, "prompt.template=x")  # mistakes are reported first


def test_validate_shows_a_first_row_that_is_an_error_and_an_input_without_rows(put, shown):
    put(id=[1], text=pa.array([None], pa.string()))
    assert "becomes an error row: null_prompt" in shown()
    put(id=[1, 2], text=pa.array([None, "two"], pa.string()))
    text = shown("input.when=text is not null")
    assert "does not meet input.when and is not computed" in text
    assert "Not computed in the sample (input.when): 1 row" in text
    put(id=pa.array([], pa.int64()), text=pa.array([], pa.string()))
    assert "one empty part" in shown()


def test_validate_shows_a_chat_through_the_template(work, shown, found):
    chat = "prompt.chat={system: Be brief.}"
    assert "| <|bos|><|im_start|>system\n    | Be brief.<|im_end|>\n    | <|im_start|>user\n    | Sum up:" in shown(
        chat
    )
    assert found(chat)["first_prompt"]["tokens"] > found()["first_prompt"]["tokens"] > 10
    (work / "mine.jinja").write_text("MINE {{ messages[0].content }} {{ tone }}")
    mine = ("prompt.chat.chat_template=mine.jinja", "prompt.chat.chat_template_kwargs={tone: kind}")
    assert found(*mine)["first_prompt"]["text"].endswith("kind")
    (work / "mine.jinja").write_text("{{ raise_exception('no such role') }}")
    assert "becomes an error row: invalid_messages: the chat template rejected" in shown(*mine)


def test_validate_shows_how_long_the_prompts_of_a_sample_are(put, shown, found):
    rows = 3000
    put(id=range(rows), text=[*("word " * (i % 40) for i in range(rows - 1)), None])
    tokens = found("engine.max_model_len=40")["prompt_tokens"]
    assert tokens["rows"] == 4 * 64
    bars = tokens["histogram"]
    assert sum(count for _, count in bars) + sum(tokens["errors"].values()) == 256
    assert [longest for longest, _ in bars] == [bars[0][0] * (i + 1) for i in range(len(bars))]
    assert 0 < tokens["too_long"] < 256
    assert tokens["median"] <= tokens["p90"] <= tokens["longest"] <= bars[-1][0]
    assert 0.5 < tokens["estimated_total"] / (tokens["median"] * rows) < 2
    assert "Prompt tokens of 10 sampled rows: median" in shown("engine.max_model_len=40", flags=("--limit", "10"))


@pytest.mark.parametrize(("prompt", "expected"), [
    ("chat: true", "prompt.chat: bare: the checkpoint has no chat template"),
    ("chat: {chat_template: nowhere.jinja}", "nowhere.jinja: no such file"),
    ("chat: {chat_template: data/a.parquet}", "data/a.parquet: not UTF-8 text"),
])  # fmt: skip
def test_a_chat_without_a_template_is_refused_before_anything_is_loaded(work, pipe, prompt, expected):
    shutil.copytree(demo_model("target"), work / "bare")
    (work / "bare" / "chat_template.jinja").unlink()
    for command in ("validate", "run"):
        code, _, err = pipe(command, "job.yaml", "--set", "model.path=bare", "--set", f"prompt={{{prompt}}}")
        assert code == 2
        assert expected in err
    assert not (work / "out").exists()


def test_prompts_are_shown_untemplated_before_the_model_is_downloaded(shown):
    out = shown("model.path=owner/name", "prompt.chat=true")
    assert "First prompt (a.parquet row 0, 21 bytes)" in out
    assert "The tokenizer is not on this machine yet" in out


def test_sampling_of_the_model_is_used_on_request_and_always_shown(work, shown, refused):
    shutil.copytree(demo_model("target"), work / "own")
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    (work / "own" / "generation_config.json").write_text(json.dumps(values))
    own, use_model = "model.path=own", "sampling.generation_config=model"
    ignored = "not used from the model's generation_config.json: temperature 0.6, top_p 0.95, top_k 20 (use "
    assert ignored in shown(own)
    out = shown(own, use_model, "sampling.top_k=5")
    assert "  used from the model's generation_config.json: temperature 0.6, top_p 0.95; not used from" in out
    assert "top_k 20 (the job sets its own)" in out
    assert "generation_config" not in shown(), "greedy like the job: nothing to show"
    (work / "own" / "generation_config.json").write_text('{"temperature": -1}')
    assert "generation_config.json: temperature: " in refused(own, use_model)


def test_validate_compiles_the_grammar_and_checks_the_column_of_grammars(shown, refused):
    key = "sampling.structured_outputs"
    assert f'{key}: json: Unimplemented keys: ["uniqueItems"]' in refused(
        f"{key}={{json: {{type: array, uniqueItems: true}}}}"
    )
    assert 'structured_outputs choice ["yes", "no"]' in shown(f"{key}={{choice: [yes, no]}}")
    assert "structured_outputs from column text" in shown(f"{key}={{json: {{column: text}}}}")
    for kind, column, expected in (
        ("json", "id", "column 'id' is int64, expected text"),
        ("choice", "text", "column 'text' is string, expected lists of texts"),
        ("regex", "nowhere", "no column 'nowhere'"),
    ):
        err = refused(f"{key}={{{kind}: {{column: {column}}}}}")
        assert f"{key}.{kind}: " in err
        assert expected in err


@pytest.fixture
def of_task(put, job):
    """Replace the job's sampling by a task or other lines, and write columns for it to the input."""

    def of_task(lines: str) -> None:
        job(JOB.replace("sampling: {max_tokens: 9}", lines).replace("Sum up:\\n{text}\\n", "{text}"))
        put(id=[1, 2], text=["one ", "two"], options=[["a", "b"], None], number=[1, 2])

    return of_task


def test_validate_shows_a_task_and_its_columns(of_task, shown, found):
    of_task("task: {type: choice, labels: {column: options}}")
    out = shown()
    for expected in (
        "  Task      choice: labels {'column': 'options'}\n",
        "  Adds      label, label_probability, label_probabilities, error, ",
        '  Its task.labels:\n    | ["a", "b"]\n',
        "Error rows in the sample: invalid_labels 1",
    ):
        assert expected in out
    assert "Sampling" not in out
    of_task("task: {type: score, completion: ' {number:.1f}', token_logprobs: 0}")
    out = shown()
    assert "  Task      score: completion ' {number:.1f}', token_logprobs 0\n" in out
    assert "  Its task.completion:\n    |  1.0\n" in out
    of_task("task: embed")
    assert found()["output_columns"]["embedding"].startswith("fixed_size_list<")
    of_task("task: classify")
    task = found("model.path=no/model")["task"]
    assert task == {"type": "classify", "activation": "auto", "columns_known": False}


@pytest.mark.parametrize(("task", "expected"), [
    ("task: {type: choice, labels: {column: option}}", "no column 'option' (did you mean 'options'?)"),
    ("task: {type: choice, labels: {column: text}}", "column 'text' is string, expected lists of texts"),
    ("task: {type: score, completion: '{answer}'}", "has no column 'answer' (known: "),
    ("task: {type: score, completion: {column: number}}", 'is int64, expected text; to convert it, write "{number}"'),
    ("task: {type: score, completion: '{text:.2f}'}", "task.completion: "),
    ("task: {type: embed, dimensions: 5000}", "job.yaml:5: task.dimensions: 5000: the vectors of demo have "),
    ("task: classify", "job.yaml:5: task: classify: demo has no sequence classification head"),
])  # fmt: skip
def test_validate_refuses_tasks_that_the_data_or_the_model_cannot_do(of_task, refused, task, expected):
    of_task(task)
    assert expected in refused()


def test_validate_refuses_labels_that_become_the_same_tokens(of_task, refused, monkeypatch):
    monkeypatch.setattr(Tokenizer, "continuation", lambda self, ids, text: [5])
    of_task("task: {type: choice, labels: [a, b]}")
    assert "job.yaml:5: task.labels: 'a' and 'b' have the same tokens" in refused()


def test_validate_refuses_files_of_different_columns_as_a_run_does(work, put, shown, refused):
    """Without input.columns all columns count: one that some files lack or have as another type ends a run as well."""
    put("b.parquet", id=[4], text=["four"])
    every = ("input.columns=null", "output.rename={error: failure}")
    err = refused(*every)
    assert f"{work}/data/b.parquet: has no column 'error', but other files of {work}/data have it; " in err
    assert "leave 'error' out of input.columns (default: all columns) and the prompt, or move the file" in err
    shown()
    put("b.parquet", id=[4], text=["four"], error=[1.5])
    assert "column 'error': " in refused(*every)


def test_validate_counts_prompts_that_do_not_fit(of_task, put, shown, found):
    """The limit is the model's context unless the job sets one; a task needs no room for a generated token."""
    of_task("sampling: {max_tokens: 9}")
    put(id=[1, 2], text=["a" * 1500, "word " * 3])
    assert (found()["prompt_tokens"]["too_long"], found()["prompt_tokens"]["max_model_len"]) == (1, 1024)
    expected = (
        "Too long for 1,024 tokens (engine.max_model_len, or the model's own): 1 row of the sample (prompt_too_long)"
    )
    assert expected in shown()
    put(id=[1, 2], text=["a" * 700, "word " * 3])
    tokens = found()["prompt_tokens"]
    longest = f"engine.max_model_len={tokens['longest']}"
    assert (tokens["too_long"], found(longest)["prompt_tokens"]["too_long"]) == (0, 1)
    of_task("task: score")
    put(id=[1, 2], text=["a" * 700, "word " * 3])
    assert found(longest)["prompt_tokens"]["too_long"] == 0
