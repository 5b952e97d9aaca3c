"""`pipeline validate`: what a job is, or everything that is wrong with it."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import JOB


def test_validate_says_what_the_job_is(work, pipe):
    code, out, err = pipe("validate", "job.yaml")
    assert code == 0, err
    assert "demo: valid" in out
    assert "data: 1 file, 3 rows" in out
    assert "max_tokens 9" in out
    assert f"  Paths     relative ones are below {work}, the working directory\n" in out
    assert "First prompt (a.parquet row 0, 21 bytes, 17 tokens)" in out
    assert "| Sum up:\n    | one \\x1b[31mred\n" in out, "control characters of the data never reach the terminal"
    assert "\x1b" not in out
    assert not (work / "out").exists(), "looking must not write"


def test_validate_names_the_draft_model(work, pipe):
    _, out, _ = pipe("validate", "job.yaml", "--set", "speculation={method: draft_model, model: demo:draft}")
    assert "  Draft     demo:draft (embedded)\n" in out
    assert "Draft" not in pipe("validate", "job.yaml")[1]


def test_validate_as_json(work, pipe):
    code, out, _ = pipe("validate", "job.yaml", "--json", "--limit", "2")
    found = json.loads(out)
    assert code == 0
    assert found["valid"]
    assert found["input"]["rows"] == 3
    assert found["input"]["rows_to_do"] == 2
    assert found["first_prompt"]["text"] == "Sum up:\none \x1b[31mred\n"
    assert list(found["output_columns"])[:2] == ["id", "generated_text"]


def test_validate_tells_all_mistakes_of_the_file(work, pipe):
    (work / "job.yaml").write_text(JOB.replace("max_tokens: 9", "max_tokens: 0").replace("model:", "modle:"))
    code, out, err = pipe("validate", "job.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("3 mistakes:")
    assert "job.yaml:4: modle: unknown key\n    Did you mean `model`?" in err
    assert "job.yaml:5: sampling.max_tokens: expected an integer of at least 1; got 0" in err


def test_validate_tells_all_mistakes_of_the_data(work, pipe):
    code, _, err = pipe(
        "validate", "job.yaml", "--set", "input.columns=[id, nmae]", "--set", "prompt.template={texts}",
        "--set", "sampling.max_tokens={column: text}", "--set", "model.path=./nowhere",
        "--set", "output.path=data",
    )  # fmt: skip
    assert code == 2
    assert "5 mistakes:" in err
    assert "no column 'nmae'" in err
    assert "did you mean 'text'?" in err
    assert "column 'text' is text, expected numbers" in err
    assert "./nowhere: no such folder" in err
    assert "output.path: data: lies in input.path data, so the next run would read its parts" in err


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("input.path=nowhere", "--set: input.path: nowhere: does not exist; looked for /"),
        ("input.columns=[error]", "--set: output.rename: the input has columns of the same names"),
        ("prompt.template={id}", None),
        ("output.path=memory://test-cli/out", "--set: output.path: memory://test-cli/out: memory:// exists in one"),
        ("output.path=data/out", "--set: output.path: data/out: lies in input.path data, so the next run would read"),
        ("output.path=data/_out", None),
        ("output.path=nothing://bucket/x", "cannot be opened (ValueError)"),
        (
            "model.path=memory://test-cli/model",
            "memory://test-cli/model: no config.json and no tokenizer.json in this folder",
        ),
        ("model.path=nothing://bucket/x", "nothing://bucket/x: cannot be opened (ValueError)"),
        ("model.path=job.yaml", "job.yaml: is a file; expected the folder of a safetensors"),
        ("model.path=data", "data: has no config.json; expected the folder of"),
        ("model.path=owner/name", None),
        ("speculation={method: draft_model, model: demo:draft}", None),
        ("model={path: job.yaml, revision: v1}", "job.yaml: is a file; expected the folder"),
        ("model={path: data, revision: v1}", "model.revision: data is a folder; only a Hugging Face id"),
        (
            "speculation={method: draft_model, model: ./nowhere}",
            "--set: speculation.model: ./nowhere: no such folder, and not a Hugging Face id",
        ),
        ("speculation={method: draft_model, model: data}", "data: has no config.json; expected the folder of"),
        ("engine.max_model_len=2048", "--set: engine.max_model_len: 2048 is more than the 1,024 positions that demo"),
        ("engine.max_model_len=1024", None),
        (
            "model={path: demo:target-awq, quantization: int8}",
            "model.quantization: int8, but demo:target-awq is quantized already",
        ),
        ("storage={s3: {anon: true}}", "storage.s3: no path of this job takes these options"),
    ],
)
def test_validate_looks_at_data_model_and_output(work, pipe, setting: str, expected: str | None):
    code, _, err = pipe("validate", "job.yaml", "--set", setting)
    assert code == (0 if expected is None else 2)
    if expected is not None and "output.rename" in expected:
        assert "output.rename: {error: error_2}" in err
    elif expected is not None:
        assert expected in err


@pytest.mark.parametrize("name", ["w:th", "x!y", "l[0]", "b{r}", "0", "`a`", "a.b:c", "größe 数"])
def test_a_column_of_any_name_is_kept_and_rendered_and_the_message_says_how(work, pipe, name):
    pq.write_table(pa.table({name: ["v"], "text": ["t"]}), work / "data" / "a.parquet")
    written = "`" + name.replace("`", "``") + "`"
    job = JOB.replace("columns: [id]", f"columns: ['{name}']")
    (work / "job.yaml").write_text(job.replace("{text}", f"{{{written}}}"))
    code, out, err = pipe("validate", "job.yaml", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["first_prompt"]["text"] == "Sum up:\nv\n"
    assert found["columns"]["kept"] == [name]
    if name not in ("`a`", "größe 数"):
        (work / "job.yaml").write_text(job.replace("{text}", f"{{{name}}}"))
        code, _, err = pipe("validate", "job.yaml")
        assert code == 2
        assert f"{{{written}}}" in err
        assert "1 mistake" in err or "mistakes" not in err


def test_validate_lists_what_is_odd_about_the_data(work, pipe):
    for name in ("README.md", "dataset_infos.json"):
        (work / "data" / name).write_text("{}")
    texts = [f"<|im_end|>{i}" for i in range(5)]
    pq.write_table(pa.table({"id": range(5), "text": texts}), work / "data" / "a.parquet")
    small = pa.table({"id": pa.array([], pa.int16()), "text": pa.array([], pa.string())})
    pq.write_table(small, work / "data" / "b.parquet")
    habit = JOB.replace("Sum up:\\n{text}\\n", "<|im_start|>user\\n{text}<|im_end|>")
    (work / "job.yaml").write_text(habit)
    code, out, err = pipe("validate", "job.yaml")
    assert code == 0, err
    assert "  Warning   2 files of another format skipped (README.md): " in out
    assert "  Warning   1 column stored in several types (id: int64 in " in out
    assert "b.parquet, read as int64): " in out
    assert "  Warning   5 rows with control tokens that the job file writes as text (<|im_start|>): " in out
    assert "use prompt.messages for chats, prompt.chat for a single turn, or set prompt.special_tokens" in out
    assert "  Warning   5 rows with texts of control tokens in the data (a.parquet row 0: <|im_end|>): " in out
    found = json.loads(pipe("validate", "job.yaml", "--json")[1])
    assert [each["count"] for each in found["warnings"]] == [2, 1, 5, 5]
    (work / "job.yaml").write_text(habit.replace("prompt: {", "prompt: {special_tokens: template, "))
    parsed = json.loads(pipe("validate", "job.yaml", "--json")[1])
    assert [each["kind"] for each in parsed["warnings"]] == [
        "files_passed_over",
        "columns_unified",
        "control_tokens_in_rows",
    ]
    (work / "data" / "b.parquet").unlink()
    assert parsed["first_prompt"]["tokens"] < found["first_prompt"]["tokens"]
    assert parsed["first_prompt"]["text"] == found["first_prompt"]["text"] == f"<|im_start|>user\n{texts[0]}<|im_end|>"
    for name in ("README.md", "dataset_infos.json"):
        (work / "data" / name).unlink()
    (work / "job.yaml").write_text(JOB)
    assert "Warning" in pipe("validate", "job.yaml")[1]
    pq.write_table(pa.table({"id": [1], "text": ["<|im_end|>"]}), work / "data" / "a.parquet")
    assert "Warning" not in pipe("validate", "job.yaml")[1]


def test_validate_lists_the_files_that_a_job_skips(work, pipe):
    (work / "data" / "b.parquet").write_bytes(b"")
    code, _, err = pipe("validate", "job.yaml")
    assert code == 2
    assert "b.parquet" in err
    code, out, err = pipe("validate", "job.yaml", "--set", "input.on_corrupt=skip")
    assert code == 0, err
    assert "Skipped   1 damaged file: b.parquet (" in out
    found = json.loads(pipe("validate", "job.yaml", "--set", "input.on_corrupt=skip", "--json")[1])
    assert [f["file"] for f in found["input"]["skipped_files"]] == ["b.parquet"]


def test_a_store_that_does_not_answer_is_no_mistake_of_the_job(work, pipe, aws, monkeypatch):
    from pipeline.stores.retries import RetryPolicy

    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: RetryPolicy(max_tries=1))
    aws("http://127.0.0.1:1")
    places = [f"--set={key}=s3://bucket/{key}" for key in ("output.path", "input.path", "model.path")]
    code, out, err = pipe("validate", "job.yaml", *places, "--json")
    assert code == 3, err
    assert json.loads(out)["error"]["kind"] == "EnvironmentFailed"
    for key in ("model.path", "input.path", "output.path"):
        assert f"{key}: " in err
    code, _, err = pipe("validate", "job.yaml", *places, "--set", "prompt.template=x")
    assert code == 2, "a mistake is told first"


def test_validate_shows_a_first_row_that_is_an_error_and_an_input_without_rows(work, pipe):
    pq.write_table(pa.table({"id": [1], "text": pa.array([None], pa.string())}), work / "data" / "a.parquet")
    assert "becomes an error row: null_prompt" in pipe("validate", "job.yaml")[1]
    pq.write_table(pa.table({"id": [1], "text": ["x"]}).slice(0, 0), work / "data" / "a.parquet")
    assert "one empty part" in pipe("validate", "job.yaml")[1]


def test_validate_shows_a_chat_through_the_template(work, pipe):
    chat = "--set=prompt.chat={system: Be brief.}"
    _, out, _ = pipe("validate", "job.yaml", chat)
    shown = "| <|bos|><|im_start|>system\n    | Be brief.<|im_end|>\n    | <|im_start|>user\n    | Sum up:"
    assert shown in out
    plain, through = (
        json.loads(pipe("validate", "job.yaml", "--json", *more)[1])["first_prompt"] for more in ([], [chat])
    )
    assert through["tokens"] > plain["tokens"] > 10
    (work / "mine.jinja").write_text("MINE {{ messages[0].content }} {{ tone }}")
    mine = ["--set=prompt.chat.template=mine.jinja", "--set=prompt.chat.template_kwargs={tone: kind}"]
    assert json.loads(pipe("validate", "job.yaml", "--json", *mine)[1])["first_prompt"]["text"].endswith("kind")
    refusing = "{{ raise_exception('no such role') }}"
    (work / "mine.jinja").write_text(refusing)
    assert "becomes an error row: invalid_messages: the chat template refused" in pipe("validate", "job.yaml", *mine)[1]


def test_validate_shows_how_long_the_prompts_of_a_sample_are(work, pipe):
    rows = 3000
    texts = ["word " * (i % 40) for i in range(rows - 1)]
    pq.write_table(pa.table({"id": range(rows), "text": [*texts, None]}), work / "data" / "a.parquet")
    found = json.loads(pipe("validate", "job.yaml", "--json", "--set", "engine.max_model_len=40")[1])["prompt_tokens"]
    assert found["rows"] == 4 * 64
    bars = found["histogram"]
    assert sum(count for _, count in bars) + sum(found["errors"].values()) == 256
    assert [longest for longest, _ in bars] == [bars[0][0] * (i + 1) for i in range(len(bars))]
    assert 0 < found["too_long"] < 256
    assert found["median"] <= found["p90"] <= found["longest"] <= bars[-1][0]
    assert 0.5 < found["estimated_total"] / (found["median"] * rows) < 2
    out = pipe("validate", "job.yaml", "--set", "engine.max_model_len=40", "--limit", "10")[1]
    assert "Prompt tokens of 10 sampled rows: median" in out
    assert "about" in out


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("chat: true", "prompt.chat: bare: the checkpoint has no chat template"),
        ("chat: {template: nowhere.jinja}", "nowhere.jinja: no such file"),
        ("chat: {template: data/a.parquet}", "data/a.parquet: not UTF-8 text"),
    ],
)
def test_a_chat_without_a_template_is_refused_before_anything_is_loaded(work, pipe, prompt, expected):
    from pipeline.demo import demo_model

    shutil.copytree(demo_model("target"), work / "bare")
    (work / "bare" / "chat_template.jinja").unlink()
    job = ["job.yaml", "--set", "model.path=bare", "--set", f"prompt={{{prompt}}}"]
    code, _, err = pipe("validate", *job)
    assert code == 2
    assert expected in err
    code, _, err = pipe("run", *job)
    assert code == 2
    assert expected in err
    assert not (work / "out").exists()


def test_a_model_that_is_not_here_yet_leaves_prompts_untemplated(work, pipe):
    code, out, _ = pipe("validate", "job.yaml", "--set", "model.path=owner/name", "--set", "prompt.chat=true")
    assert code == 0
    assert "First prompt (a.parquet row 0, 21 bytes)" in out
    assert "The tokenizer is not on this machine yet" in out


def test_the_models_own_sampling_is_taken_only_where_asked_and_always_told(work, pipe):
    from pipeline.demo import demo_model

    shutil.copytree(demo_model("target"), work / "own")
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    (work / "own" / "generation_config.json").write_text(json.dumps(values))
    own, take = ["--set", "model.path=own"], ["--set", "sampling.generation_config=model"]
    out = pipe("validate", "job.yaml", *own)[1]
    not_taken = "not taken of the model's generation_config.json: temperature 0.6, top_p 0.95, top_k 20 (sampling.gen"
    assert not_taken in out
    out = pipe("validate", "job.yaml", *own, *take, "--set", "sampling.top_k=5")[1]
    assert "  taken of the model's generation_config.json: temperature 0.6, top_p 0.95; not taken of" in out
    assert "top_k 20 (the job gives its own)" in out
    assert "generation_config" not in pipe("validate", "job.yaml")[1], "greedy as here: nothing to tell"
    (work / "own" / "generation_config.json").write_text('{"temperature": -1}')
    code, _, err = pipe("validate", "job.yaml", *own, *take)
    assert code == 2
    assert "generation_config.json: temperature: " in err


def test_validate_compiles_the_grammar_and_looks_at_the_column_of_grammars(work, pipe):
    asks = "sampling.structured_outputs={json: {type: array, uniqueItems: true}}"
    code, out, err = pipe("validate", "job.yaml", "--set", asks)
    assert (code, out) == (2, "")
    assert 'sampling.structured_outputs: json: Unimplemented keys: ["uniqueItems"]' in err
    code, out, _ = pipe("validate", "job.yaml", "--set", "sampling.structured_outputs={choice: [yes, no]}")
    assert code == 0
    assert 'structured_outputs choice ["yes", "no"]' in out
    for kind, column, expected in (
        ("json", "id", "column 'id' is int64, expected text"),
        ("choice", "text", "column 'text' is string, expected lists of texts"),
        ("regex", "nowhere", "no column 'nowhere'"),
    ):
        code, _, err = pipe(
            "validate", "job.yaml", "--set", f"sampling.structured_outputs={{{kind}: {{column: {column}}}}}"
        )
        assert code == 2
        assert f"sampling.structured_outputs.{kind}: " in err
        assert expected in err
    code, out, _ = pipe("validate", "job.yaml", "--set", "sampling.structured_outputs={json: {column: text}}")
    assert code == 0
    assert "structured_outputs from column text" in out


def of_task(work, text: str) -> None:
    (work / "job.yaml").write_text(
        JOB.replace("sampling: {max_tokens: 9}", text).replace("Sum up:\\n{text}\\n", "{text}")
    )
    table = pa.table({"id": [1, 2], "text": ["one ", "two"], "options": [["a", "b"], None], "number": [1, 2]})
    pq.write_table(table, work / "data" / "a.parquet")


def test_validate_shows_a_task_and_its_columns(work, pipe):
    of_task(work, "task: {type: choice, labels: {column: options}}")
    code, out, err = pipe("validate", "job.yaml")
    assert code == 0, err
    assert "  Task      choice: labels {'column': 'options'}\n" in out
    assert "  Adds      label, label_probability, label_probabilities, error, " in out
    assert '  With it, as task.labels:\n    | ["a", "b"]\n' in out
    assert "Error rows among them: invalid_labels 1" in out
    assert "Sampling" not in out
    of_task(work, "task: {type: score, completion: ' {number:.1f}', token_logprobs: 0}")
    out = pipe("validate", "job.yaml")[1]
    assert "  Task      score: completion ' {number:.1f}', token_logprobs 0\n" in out
    assert "  With it, as task.completion:\n    |  1.0\n" in out
    of_task(work, "task: embed")
    found = json.loads(pipe("validate", "job.yaml", "--json")[1])
    assert found["output_columns"]["embedding"].startswith("fixed_size_list<")
    of_task(work, "task: classify")
    found = json.loads(pipe("validate", "job.yaml", "--json", "--set", "model.path=no/model")[1])
    assert found["task"] == {"type": "classify", "activation": "auto", "columns_known": False}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("task: {type: choice, labels: {column: option}}", "no column 'option' (did you mean 'options'?)"),
        ("task: {type: choice, labels: {column: text}}", "column 'text' is string, expected lists of texts"),
        ("task: {type: score, completion: '{answer}'}", "has no column 'answer' (known: "),
        ("task: {type: score, completion: {column: number}}", "expected text; to convert it, write \"{number}\""),
        ("task: {type: score, completion: '{text:.2f}'}", "task.completion: "),
        ("task: {type: embed, dimensions: 5000}", "job.yaml:5: task.dimensions: 5000: the vectors of demo have "),
        ("task: classify", "job.yaml:5: task: classify: demo has no sequence classification head"),
    ],
)  # fmt: skip
def test_validate_refuses_tasks_that_the_data_or_the_model_cannot_do(work, pipe, task, expected):
    of_task(work, task)
    code, out, err = pipe("validate", "job.yaml")
    assert (code, out) == (2, "")
    assert expected in err


def test_validate_refuses_labels_that_become_the_same_tokens(work, pipe, monkeypatch):
    from pipeline.tokenization.tokenizer import Tokenizer

    monkeypatch.setattr(Tokenizer, "continuation", lambda self, ids, text: [5])
    of_task(work, "task: {type: choice, labels: [a, b]}")
    code, _, err = pipe("validate", "job.yaml")
    assert code == 2
    assert "job.yaml:5: task.labels: 'a' and 'b' have the same tokens" in err


def test_validate_refuses_files_of_different_columns_as_a_run_does(work, pipe):
    """Left out, input.columns are all: one that some files lack, or have as another type, ends a run as well."""
    pq.write_table(pa.table({"id": [4], "text": ["four"]}), work / "data" / "b.parquet")
    every = ("validate", "job.yaml", "--set", "input.columns=null", "--set", "output.rename={error: failure}")
    code, _, err = pipe(*every)
    assert code == 2, err
    assert f"{work}/data/b.parquet: has no column 'error', but other files of {work}/data have it; " in err
    assert "leave 'error' out of input.columns (default: all columns) and the prompt, or move the file" in err
    assert pipe("validate", "job.yaml")[0] == 0
    pq.write_table(pa.table({"id": [4], "text": ["four"], "error": [1.5]}), work / "data" / "b.parquet")
    code, _, err = pipe(*every)
    assert code == 2, err
    assert "column 'error': " in err


def test_validate_counts_prompts_that_the_model_has_no_room_for(work, pipe):
    """By the model's own context where the job file says nothing of it; a task needs no room for a generated token."""
    of_task(work, "sampling: {max_tokens: 9}")
    table = pa.table({"id": [1, 2], "text": ["a" * 1500, "word " * 3]})
    pq.write_table(table, work / "data" / "a.parquet")
    found = json.loads(pipe("validate", "job.yaml", "--json")[1])["prompt_tokens"]
    assert (found["too_long"], found["max_model_len"]) == (1, 1024)
    out = pipe("validate", "job.yaml")[1]
    assert "Too long for 1,024 tokens (engine.max_model_len, or the model's own): 1 row of them; prompt_too_long" in out
    table = pa.table({"id": [1, 2], "text": ["a" * 700, "word " * 3]})
    pq.write_table(table, work / "data" / "a.parquet")
    found = json.loads(pipe("validate", "job.yaml", "--json")[1])["prompt_tokens"]
    assert (found["too_long"], found["max_model_len"]) == (0, 1024)
    longest = ("--json", "--set", f"engine.max_model_len={found['longest']}")
    assert json.loads(pipe("validate", "job.yaml", *longest)[1])["prompt_tokens"]["too_long"] == 1
    of_task(work, "task: score")
    pq.write_table(table, work / "data" / "a.parquet")
    assert json.loads(pipe("validate", "job.yaml", *longest)[1])["prompt_tokens"]["too_long"] == 0
