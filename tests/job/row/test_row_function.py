"""Row functions: the prompts, seeds and columns of their requests, errors, stops and replay, servers and Ray."""

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import RequestFailed, load_job, run_job
from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError, FingerprintError, Interrupted
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.output.audit import audit
from pipeline.job.process.supervisor import Supervisor
from pipeline.job.running.sample import read_sample
from tests.endpoint.fake_server import FakeServer, answer_text
from tests.job.actor.test_units import complete
from tests.job.conftest import FAKES, TEXTS, runs
from tests.job.fake_engine import FakeEngine, answer, text_of

pytestmark = pytest.mark.usefixtures("without_ray")
COLUMNS = {"short": pa.string(), "num": pa.int32()}


async def flow(row, generate):
    """Two requests after each other, then two branches at once; some rows end earlier."""
    draft = await generate()
    short = await generate(f"{draft.text} of {row['text']}", max_tokens=4)
    if row["id"] % 3 == 0:
        return {"short": short.text}
    both = await asyncio.gather(*(branch(generate, f"{short.text} {name}") for name in "ab"))
    return {"short": short.text, "num": sum(map(len, both))}


async def held(row, generate):
    """The flow, in a run that never ends: the last rows wait after their first request."""
    if row["id"] >= 25:
        await generate()
        await asyncio.sleep(3600)
    return await flow(row, generate)


async def branch(generate, text):
    """Two requests, the second of which may be made before or after that of another branch."""
    first = await generate(text)
    return (await generate(f"{first.text} {text[-1]}", temperature=0.5)).text


def run(job, row_fn=flow, signals=(), version="1", columns=COLUMNS, **sections):
    to_send = list(signals)

    def show(status):
        if to_send and to_send[0][0](status):
            os.kill(os.getpid(), to_send.pop(0)[1])

    options = {key: sections.pop(key) for key in ("retry_failed", "sample") if key in sections}
    config = job.config(**sections)
    return run_job(config, row_fn=row_fn, version=version, columns=columns, backend=FAKES, progress=show, **options)


def by_id(job) -> dict[int, dict[str, Any]]:
    rows = job.table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.fixture
def counted(job):
    """A job over `TEXTS` with a file that has a line for each computed request."""
    job.rows(list(TEXTS)).fake(computed=str(job.folder / "computed"))
    return job


def computed(job) -> Counter[str]:
    return Counter((job.folder / "computed").read_text().split())


def once_computed(job, num: int):
    """Return a condition of a signal: this number of requests has been computed."""
    return lambda status: (job.folder / "computed").exists() and computed(job).total() >= num


def texts(rows: dict[int, dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(i, row["generated_text"], row["short"], row["num"], row["error"]) for i, row in sorted(rows.items())]


def test_a_function_makes_the_requests_of_each_row(counted):
    report = run(counted)
    rows = by_id(counted)
    assert sorted(rows) == list(range(len(TEXTS)))
    for i, row in rows.items():
        draft = text_of(
            answer(list(f"Say {TEXTS[i]}".encode()), row_seed(0, "f0.parquet", i), 6)
        )  # as without function
        assert (row["generated_text"], row["error"]) == (draft, None)
        assert (row["num"] is None) == (i % 3 == 0)
        tokens = len(f"Say {TEXTS[i]}") + len(f"{draft} of {TEXTS[i]}")
        assert row["num_input_tokens"] == tokens if i % 3 == 0 else row["num_input_tokens"] > tokens
    assert counted.table().schema.field("num").type == pa.int32()
    assert max(computed(counted).values()) == 1
    (record,) = runs(counted)
    assert record["actors"][0]["stats"]["prompt_tokens"] == report.tokens.computed
    assert (report.work.wasted_generated_tokens, report.work.unrecorded_tokens) == (0, 0)
    assert audit(PartStore(str(counted.output)), deep=True, log=lambda _: None).sound
    other = counted.folder / "other"
    run(counted, output={"path": str(other), "rows_per_file": 3}, sampling={"seed": 1})
    counted.output = other
    assert all(a != b for a, b in zip(texts(rows), texts(by_id(counted)), strict=True))


def test_finished_requests_are_replayed_after_a_stop_in_any_order(counted):
    limit = {"limit": 30}
    run(counted, input=limit, output={"path": str(counted.folder / "whole")})
    num_requests, counted.output = computed(counted).total(), counted.folder / "whole"
    expected = texts(by_id(counted))
    counted.output = counted.folder / "out"
    counted.fake(step_s=0.01, max_num_seqs=3, computed=str(counted.folder / "computed"))
    sections = {"input": limit, "output": {"rows_per_file": 50}, "run": {"window_rows": 50, "drain_timeout": "5 s"}}
    for num_new in (10, 60):
        with pytest.raises(Interrupted):
            run(counted, held, signals=[(once_computed(counted, num_requests + num_new), signal.SIGTERM)], **sections)
    report = run(counted, **sections)
    assert texts(by_id(counted)) == expected
    assert set(computed(counted).values()) == {2}  # once in each output
    assert len(computed(counted)) == num_requests
    assert report.work.unrecorded_tokens == report.work.wasted_generated_tokens == 0
    assert sum(r["actors"][0]["stats"]["prompt_tokens"] for r in runs(counted)) == report.tokens.computed


def test_later_requests_of_a_row_precede_rows_that_wait(counted, monkeypatch):
    seen: list[bool] = []

    def generate_steps(self, requests, steps):
        while requests:
            assert all(request.expects_follow_up for request in requests)
            seen.extend(request.is_follow_up for request in requests)
            requests = steps.follow_up(complete(requests))

    monkeypatch.setattr(Supervisor, "generate_steps", generate_steps)
    run(counted, input={"limit": 3})
    assert Counter(seen) == {False: 3, True: 3 + 2 * 4}


def test_a_run_after_a_sample_computes_only_the_other_rows(counted):
    run(counted, sample=6)
    shown = list(read_sample(PartStore(str(counted.output)), runs(counted)[-1]["run_id"]))
    assert len(shown) == 6
    assert all(row.results["short"] for row in shown)
    assert run(counted).work.resumed_rows == 6
    assert max(computed(counted).values()) == 1


def test_prompts_that_differ_in_each_run_are_computed_again_after_a_stop(counted):
    """Answers are never mixed up: a kept one is used only for the same prompt."""
    attempt, seen = 0, {}

    async def changing(row, generate):
        first = await generate()
        second = await generate(f"{first.text}, run {attempt}")
        seen[row["id"], attempt] = second.text
        await asyncio.sleep(0 if attempt else 3600)
        return {"short": f"{attempt} {second.text}"}

    counted.fake(step_s=0.01, max_num_seqs=3, computed=str(counted.folder / "computed"))
    sections = {"output": {"rows_per_file": 50}, "run": {"window_rows": 50, "drain_timeout": "0 s"}}
    with pytest.raises(Interrupted):
        run(counted, changing, signals=[(once_computed(counted, 60), signal.SIGTERM)], **sections)
    attempt = 1
    run(counted, changing, **sections)
    rows = by_id(counted)
    assert sorted(rows) == list(range(len(TEXTS)))
    assert all(row["short"] == f"1 {seen[i, 1]}" for i, row in rows.items())
    assert all(seen[i, 1] != seen.get((i, 0)) for i in rows)


def test_equal_requests_of_a_row_have_different_random_numbers(counted):
    async def votes(row, generate):
        own = [await generate(), await generate(), await generate(temperature=1.0)]
        made = await asyncio.gather(*(generate("a", temperature=1.0) for _ in range(4)))
        return {"short": " | ".join(one.text for one in (*own, *made))}

    run(counted, votes, input={"limit": 10})
    assert set(computed(counted).values()) == {1}
    assert computed(counted).total() == 70


async def mistaken(row, generate):
    match row["id"]:
        case 0:
            return {"num": "many"}
        case 1:
            return {"other": 1}
        case 2:
            return ["short"]
        case 3:
            raise KeyError("abc")
        case 4:
            await generate(n=2)
        case 5:
            await generate("\ud800")
        case 6:
            await generate("")
        case 7:
            await generate("a", temperature=-1)
        case 8:
            await generate("x" * 200)
        case 9:
            try:
                await generate("x" * 200)
            except RequestFailed as failed:
                return {"short": failed.completion.error}
        case 10:
            async with asyncio.TaskGroup() as group:
                group.create_task(generate("fine"))
                group.create_task(wrapped(generate))
        case 11:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await generate("b")
        case 12:
            await generate([{"role": "user", "content": "a"}])
        case 13:
            await generate(5)
        case 14:
            first = asyncio.ensure_future(generate("fine", max_tokens=64))  # ends after the other one
            await asyncio.gather(first, generate("x" * 200))
        case 15:
            raise SystemExit(1)
    return {"short": "-"}


async def wrapped(generate):
    await generate("x" * 200)


MISTAKES = [
    ("row_fn_failed", "row_fn returned 'many' for 'num', expected int32"),
    ("row_fn_failed", "row_fn returned 'other', which is not in columns (short, num)"),
    ("row_fn_failed", "row_fn returned ['short'], expected a dict or None"),
    ("row_fn_failed", "KeyError: 'abc' (test_row_function.py, line "),
    ("row_fn_failed", "generate: no option n"),
    ("row_fn_failed", "UnicodeEncodeError"),
    ("empty_prompt", "only whitespace in 'prompt'"),
    ("invalid_sampling", "sampling.temperature"),
    ("prompt_too_long", ""),
    (None, "prompt_too_long"),
    ("prompt_too_long", ""),
    ("row_fn_failed", "CancelledError"),
    ("row_fn_failed", "messages need prompt.chat"),
    ("row_fn_failed", "generate(5): expected a text, or a list of messages"),
    ("prompt_too_long", ""),
    ("row_fn_failed", "SystemExit: 1"),
    (None, "-"),
]


def test_a_mistake_of_the_function_makes_an_error_row(counted):
    limits = {"engine": {"max_model_len": 100}, "run": {"max_error_rate": 1.0}, "input": {"limit": len(MISTAKES)}}
    run(counted, mistaken, sample=len(MISTAKES), **limits)
    report = run(counted, mistaken, **limits)
    rows = by_id(counted)
    for i, (code, text) in enumerate(MISTAKES):
        assert rows[i]["error"] == code
        assert text in (rows[i]["short"] if code is None else rows[i]["error_message"] or ""), rows[i]
        assert (rows[i]["finish_reason"] == "error") == (code is not None)
    assert (rows[9]["num_input_tokens"], rows[9]["generated_text"]) == (0, None)  # a failed request of a completed row
    assert rows[14]["num_input_tokens"] == len("fine") + 200
    assert report.rows.completed == 2
    assert runs(counted)[-1]["actors"][0]["resumed_generated_tokens"] == 0  # those of error rows do not count
    run(counted, retry_failed=True, **limits)
    assert {row["error"] for row in by_id(counted).values()} == {None}


def test_rows_without_a_prompt_are_error_rows_without_a_call_and_rows_without_requests_are_complete(job):
    called = []

    async def silent(row, generate):
        called.append(row["id"])

    job.rows(["a", None, "a"])
    report = run(job, silent, columns=None)
    rows = by_id(job)
    assert sorted(called) == [0, 2]  # also of equal rows
    assert rows[1]["error"] == "null_prompt"
    for i in (0, 2):
        assert (rows[i]["generated_text"], rows[i]["num_input_tokens"], rows[i]["error"]) == (None, 0, None)
    assert report.rows.completed == 2


def test_a_function_may_await_something_else_while_others_continue(counted):
    """Also with no request open in the whole unit, and in a thread."""

    async def slow(row, generate):
        await asyncio.sleep(0.05 if row["id"] % 2 else 0)
        name = await asyncio.to_thread(lambda: threading.current_thread().name)
        done = await generate("after")
        background = asyncio.create_task(asyncio.sleep(60))  # ended with the unit
        return {"short": name, "num": len(done.text) if background else None}

    run(counted, slow, input={"limit": 16})
    assert all(row["short"] and row["num"] for row in by_id(counted).values())


def test_a_row_that_awaited_something_else_does_not_wait_for_requests_of_others(
    counted, engines_in_threads, monkeypatch
):
    """The engine stops in the request of one row until the other row has slept and made one."""
    was_made, step = threading.Event(), FakeEngine.step

    def held(self):
        if any(b"held" in bytes(request.prompt_token_ids) for request, *_ in self.running.values()):
            assert was_made.wait(30)
        return step(self)

    async def sleeping(row, generate):
        if row["id"] == 0:
            return {"short": (await generate("held", max_tokens=64)).text}
        await asyncio.sleep(0.02)
        request = asyncio.ensure_future(generate("free"))
        await asyncio.sleep(0)
        was_made.set()
        return {"short": (await request).text}

    monkeypatch.setattr(FakeEngine, "step", held)
    run(counted, sleeping, input={"limit": 2})
    assert all(row["error"] is None for row in by_id(counted).values())


def test_a_stop_does_not_wait_for_what_functions_await(counted):
    async def sleeping(row, generate):
        done = await generate()
        await asyncio.sleep(3600 if row["id"] == 0 else 0)
        return {"short": done.text}

    sections = {"input": {"limit": 8}, "run": {"drain_timeout": "60 s"}}
    with pytest.raises(Interrupted):
        run(counted, sleeping, signals=[(once_computed(counted, 8), signal.SIGTERM)], **sections)
    (partial,) = (counted.output / "_pipeline" / "partial").iterdir()
    assert len(json.loads(partial.read_text())["rows"]) == 8
    run(counted, flow, **sections)
    assert computed(counted).total() == len(computed(counted))


def test_a_row_has_the_kept_columns_and_those_of_the_prompt(job):
    table = pa.table({"id": [1], "text": ["a"], "more": [{"list": [1, 2]}], "last": [None]})
    pq.write_table(table, job.folder / "in" / "f0.parquet")

    async def names(row, generate):
        return {"short": json.dumps(row, sort_keys=True)}

    run(job, names, input={"columns": ["more", "last"]})
    assert json.loads(job.table()["short"][0].as_py()) == {"text": "a", "more": {"list": [1, 2]}, "last": None}


def test_with_a_chat_texts_are_turns_of_the_user_and_messages_are_chats(job):
    job.rows(["a"])
    (job.folder / "model" / "chat_template.jinja").write_text("{{ messages }}")

    async def talk(row, generate):
        first = await generate(max_tokens=2)
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": first.text}]
        second = await generate([*turns, {"role": "user", "content": "y"}])
        return {"short": first.text, "num": second.num_prompt_tokens - len((await generate("z")).text) * 0}

    job.fake(computed=str(job.folder / "computed"))
    run(job, talk, prompt={"template": "Say {text}", "chat": {"system": "Be brief."}})
    (row,) = by_id(job).values()
    chats = ("[Be brief.]<user>Say a", f"[Be brief.]<user>x<assistant>{row['short']}<user>y", "[Be brief.]<user>z")
    assert row["num_input_tokens"] == sum(map(len, chats))
    assert row["num"] == len(chats[1])


def test_a_server_computes_the_requests(tmp_path):
    names = [f"row{i}. a b c" for i in range(20)]
    pq.write_table(pa.table({"text": names}), tmp_path / "in.parquet")

    async def two(row, generate):
        first = await generate()
        last = await generate(f"last {first.text}", max_tokens=3)
        return {"last": last.text}

    with FakeServer(slots=4) as server:
        job = {
            "input": {"path": str(tmp_path / "in.parquet")},
            "prompt": {"template": "say {text}"},
            "server": {"base_url": server.url},
            "sampling": {"max_tokens": 4},
            "output": {"path": str(tmp_path / "out"), "rows_per_file": 8},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        report = run_job(load_job(tmp_path / "job.yaml"), row_fn=two, version="1", columns={"last": "string"})
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["text"] for row in found) == sorted(names)
    for row in found:
        draft = answer_text(f"say {row['text']}", 4)
        last = answer_text(f"last {draft}", 3)
        assert (row["generated_text"], row["last"]) == (draft, last)
    assert report.work.computed_generated_tokens == report.tokens.generated + 2  # and the probe


def test_another_version_or_other_columns_are_another_job(counted):
    run(counted, input={"limit": 5})
    for version, columns, changed in (
        ("2", COLUMNS, 'row_fn.version: "1" -> "2"'),
        ("1", {"short": "string"}, "row_fn.columns.num"),
    ):
        with pytest.raises(FingerprintError) as refused:
            run(counted, version=version, columns=columns, input={"limit": 5})
        assert changed in str(refused.value)
    with pytest.raises(FingerprintError, match=r"row_fn.* -> nothing"):
        run_job(counted.config(input={"limit": 5}), backend=FAKES)
    assert run(counted, input={"limit": 5}).was_complete


async def unused(row, generate): ...


@pytest.mark.parametrize(
    ("options", "sections", "problem"),
    [
        ({"row_fn": lambda row, generate: None}, {}, "expected a function: async def f(row, generate)"),
        ({"version": None}, {}, "version None: expected a text, such as '1'"),
        ({"version": 1}, {}, "version 1: expected a text"),
        ({"row_fn": None, "columns": None}, {}, "row_fn None: expected a function"),
        ({"columns": ["a"]}, {}, "columns ['a']: expected names with types"),
        ({"columns": {"a": "nothing"}}, {}, "columns {'a': 'nothing'}: expected names with types"),
        ({"columns": {"id": "string"}}, {}, "columns of row_fn: the output has a column 'id'"),
        ({"columns": {"error": "string"}}, {}, "columns of row_fn: the output has a column 'error'"),
        ({}, {"steps": [{"name": "s", "prompt": {"template": "{draft}"}}]}, "steps: a job with row_fn makes all"),
        ({}, {"task": "score", "sampling": None}, "row_fn: the first prompt must generate text"),
        ({}, {"sampling": {"n": 2, "temperature": 1.0}}, "sampling.n: must be 1 with row_fn"),
    ],
)
def test_arguments_and_keys_without_effect_are_refused(job, options, sections, problem):
    job.rows(TEXTS[:3])
    if sections.get("sampling", 1) is None:
        sections = {"task": "score"}
        del job.settings["sampling"]
    arguments = {"row_fn": unused, "version": "1", "columns": None, **options}
    with pytest.raises(ConfigError) as refused:
        run_job(job.config(**sections), backend=FAKES, **arguments)
    assert problem in str(refused.value)
    assert not Path(job.output).exists()
