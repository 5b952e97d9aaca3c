"""Steps of a row: each request's prompt and seed, errors midway, stops, copies, servers, and equality with separate
jobs."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config import load_job
from pipeline.config.jobfile import JobFileError
from pipeline.data.output.parts import PartStore
from pipeline.engine.tasks import Choice, ChoiceResult
from pipeline.errors import FingerprintError, Interrupted
from pipeline.job.actor.steps import num_needed
from pipeline.job.actor.tokenize import row_seed, step_seed
from pipeline.job.output.audit import audit
from pipeline.job.preview.validation import validate_job
from pipeline.job.process.supervisor import Supervisor
from pipeline.job.running.run import run_job
from pipeline.job.running.sample import read_sample
from pipeline.report.render import text as text_report
from tests.endpoint.fake_server import FakeServer, answer_text
from tests.job.actor.test_units import complete
from tests.job.conftest import TEXTS, run, runs
from tests.job.fake_engine import answer, result_of, text_of

pytestmark = pytest.mark.usefixtures("without_ray")
LABELS = (" yes", " no")
CRITIQUE = {"name": "critique", "prompt": {"template": "{text} is {draft}, why"}, "sampling": {"max_tokens": 4}}
CHECK = {
    "name": "check",
    "prompt": {"template": "{text}: {draft}; {critique.generated_text} ok?"},
    "task": {"type": "choice", "labels": list(LABELS)},
}
REPAIR = {
    "name": "repair",
    "prompt": {"template": "{other} {draft}{check.label} then"},
    "sampling": {"max_tokens": 5},
    "replaces": "draft",
}
STEPS = [CRITIQUE, CHECK, REPAIR]


def texts_of(path: Path, texts: list[str | None]) -> None:
    ids = pa.array(range(len(texts)), pa.int64())
    table = pa.table({"id": ids, "text": texts, "other": [f"other {i}" for i in range(len(texts))]})
    pq.write_table(table, path / "in" / "f0.parquet", row_group_size=10)


@pytest.fixture
def chain(job):
    """A job of three steps over `TEXTS`; columns that only steps read are not kept."""
    texts_of(job.folder, list(TEXTS))
    job.settings["steps"] = STEPS
    return job


def generated(prompt: str, seed: int, max_tokens: int) -> str:
    return text_of(answer(list(prompt.encode()), seed, max_tokens))


def expected(i: int, text: str, job_seed: int = 0) -> dict[str, Any]:
    """Return the texts of row `i`, computed one after the other."""

    def seed(name: str) -> int:
        return step_seed(job_seed, "f0.parquet", i, name, 0)

    first = generated(f"Say {text}", row_seed(job_seed, "f0.parquet", i), 6)
    critique = generated(f"{text} is {first}, why", seed("critique"), 4)
    labels = tuple(tuple(label.encode()) for label in LABELS)
    chosen = result_of(list(f"{text}: {first}; {critique} ok?".encode()), Choice(labels))
    assert isinstance(chosen, ChoiceResult)
    label = LABELS[chosen.best]
    repaired = generated(f"other {i} {first}{label} then", seed("repair"), 5)
    return {"generated_text": repaired, "critique": critique, "check": label, "repair": repaired}


def by_id(job) -> dict[int, dict[str, Any]]:
    rows = job.table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def check(job, job_seed: int = 0) -> None:
    """Assert that each row is there once, as if its prompts had been computed one after the other."""
    rows = by_id(job)
    assert sorted(rows) == list(range(len(TEXTS)))
    for i, row in rows.items():
        found = {
            "generated_text": row["generated_text"],
            "critique": row["critique"]["generated_text"],
            "check": row["check"]["label"],
            "repair": row["repair"]["generated_text"],
        }
        assert found == expected(i, str(TEXTS[i]), job_seed)
        assert row["error"] is None


def test_each_request_has_the_earlier_answers_and_its_own_seed(chain):
    report, _ = run(chain, sampling={"seed": 7})
    check(chain, job_seed=7)
    assert report.rows.completed == len(TEXTS)
    row = by_id(chain)[3]
    assert set(row) == {"id", "generated_text", "finish_reason", "error", "error_message", "num_input_tokens",
                        "num_cached_tokens", "num_generated_tokens", "source_file", "source_row", "critique", "check",
                        "repair"}  # fmt: skip
    first = len(f"Say {TEXTS[3]}")
    assert row["num_input_tokens"] == first + sum(
        row[name]["num_input_tokens"] for name in ("critique", "check", "repair")
    )
    assert [row[name]["attempts"] for name in ("critique", "check", "repair")] == [1, 1, 1]
    (record,) = runs(chain)
    (actor,) = record["actors"]
    assert actor["stats"]["prompt_tokens"] == report.tokens.computed
    assert actor["stats"]["generated_tokens"] - 2 * len(TEXTS) <= report.tokens.generated
    assert (report.work.wasted_generated_tokens, report.work.unrecorded_tokens) == (0, 0)
    assert audit(PartStore(str(chain.output)), deep=True, log=lambda _: None).sound


def test_follow_ups_precede_rows_that_wait_and_all_but_the_last_expect_another(chain, monkeypatch):
    seen: list[tuple[bool, bool]] = []

    def generate_steps(self, requests, steps):
        while requests:
            seen.extend((request.is_follow_up, request.expects_follow_up) for request in requests)
            requests = steps.follow_up(complete(requests))

    monkeypatch.setattr(Supervisor, "generate_steps", generate_steps)
    run(chain, steps=[CRITIQUE, {**REPAIR, "prompt": {"template": "{draft}"}}])
    assert Counter(seen) == dict.fromkeys([(False, True), (True, True), (True, False)], len(TEXTS))


def test_the_first_prompt_keeps_its_random_numbers():
    """Outputs of earlier versions are resumed with these."""
    assert row_seed(7, "f0.parquet", 3) == 7081474217583152418
    seeds = {step_seed(7, "f0.parquet", 3, step, attempt) for step in ("a", "b") for attempt in range(3)}
    assert len(seeds | {row_seed(7, "f0.parquet", 3)}) == 7


@pytest.mark.parametrize("code", ["prompt_too_long", "engine_failure"])
def test_an_error_midway_ends_the_row_and_keeps_its_earlier_steps(chain, tmp_path, code):
    """The prompt of `check` is too long, and that of `critique` for some rows; or it ends the engine's process."""
    limit, cured = {"engine": {"max_model_len": 40}}, tmp_path / "cured"
    if code == "engine_failure":
        limit = {}
        chain.fake(kill="text 11 xxxxxxxxxxx:", cured_by=str(cured))
    report, _ = run(chain, run={"max_error_rate": 1.0}, **limit)
    rows, failed = by_id(chain), 0
    for i, row in rows.items():
        right = expected(i, str(TEXTS[i]))
        if row["error"] is None:
            assert row["generated_text"] == right["generated_text"]
            continue
        failed += 1
        names = [name for name in ("critique", "check", "repair") if row[name] is not None]
        last = row[names[-1]]
        assert (row["error"], row["finish_reason"], last["error"]) == (code, "error", code)
        assert row["error_message"] == f"step {names[-1]}: {last['error_message']}"
        assert row["generated_text"] == generated(f"Say {TEXTS[i]}", row_seed(0, "f0.parquet", i), 6)
        assert names in (["critique"], ["critique", "check"])
        if names[-1] == "check":
            assert row["critique"]["generated_text"] == right["critique"]
            assert last["label"] is None
    assert failed == report.rows.errors_by_code[code] == (1 if code == "engine_failure" else failed) > 0
    cured.touch()
    run(chain, retry_failed=True)
    check(chain)


def test_a_null_or_an_empty_answer_makes_an_error_row_unless_it_is_filled(chain):
    texts_of(chain.folder, ["a", None])
    steps = [{"name": "again", "prompt": {"template": "{other}{text}"}}]
    table = pa.table({"id": [0, 1], "text": ["a", "b"], "other": pa.array([None, "x"], pa.string())})
    pq.write_table(table, chain.folder / "in" / "f0.parquet")
    run(chain, steps=steps)
    rows = by_id(chain)
    assert (rows[0]["error"], rows[0]["error_message"]) == ("null_prompt", "step again: column 'other' is null")
    assert (rows[0]["again"]["error"], rows[0]["again"]["num_input_tokens"]) == ("null_prompt", 0)
    steps[0]["prompt"]["fill_null"] = {"other": "-"}
    run(chain, steps=steps, output={"path": str(chain.folder / "filled")})
    (part,) = (chain.folder / "filled").glob("part-*")
    assert pq.read_table(part).column("error").null_count == 2


def test_finished_requests_of_rows_between_two_steps_are_kept_at_a_stop(chain):
    chain.fake(step_s=0.04, max_num_seqs=3)
    sections = {"output": {"rows_per_file": 50}, "run": {"window_rows": 50, "drain_timeout": "5 s"}}
    kept: list[int] = []
    for stop_at in (1, 12):
        with pytest.raises(Interrupted):
            run(chain, [(lambda status, at=stop_at: status.rows_done >= at, signal.SIGTERM)], **sections)
        (partial,) = (chain.output / "_pipeline" / "partial").iterdir()
        kept += [sum(len(row["runs"]) for row in json.loads(partial.read_text())["rows"])]
    assert 2 < kept[0] < kept[1] < 4 * len(TEXTS)
    report, _ = run(chain, **sections)
    check(chain)
    computed = sum(actor["stats"]["prompt_tokens"] for record in runs(chain) for actor in record["actors"])
    assert computed == report.tokens.computed  # no request was computed twice
    assert report.work.unrecorded_tokens == report.work.wasted_generated_tokens == 0


def test_a_run_after_a_sample_computes_only_the_other_rows(chain):
    run(chain, sample=6)
    shown = list(read_sample(PartStore(str(chain.output)), runs(chain)[-1]["run_id"]))
    assert len(shown) == 6
    report, _ = run(chain)
    check(chain)
    assert report.work.resumed_rows == 6
    assert sum(r["actors"][0]["stats"]["prompt_tokens"] for r in runs(chain)) == report.tokens.computed


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_equal_rows_are_copied_if_all_their_steps_are_greedy_and_read_equal_columns(chain, temperature):
    others = ["same", "same", "other", "same"]
    table = pa.table({"id": range(4), "text": ["a"] * 4, "other": others})
    pq.write_table(table, chain.folder / "in" / "f0.parquet")
    report, _ = run(chain, steps=[CRITIQUE, CHECK, {**REPAIR, "sampling": {"temperature": temperature}}])
    assert report.rows.copied == (0 if temperature else 2)
    rows = by_id(chain)
    copied = [row for row in rows.values() if row["num_cached_tokens"] == row["num_input_tokens"]]
    assert len(copied) == report.rows.copied
    for row in copied:
        assert row["repair"]["num_cached_tokens"] == row["repair"]["num_input_tokens"]
        assert row["generated_text"] in [rows[i]["generated_text"] for i in (0, 1, 3) if rows[i]["id"] != row["id"]]


def test_another_text_of_a_step_is_another_job_and_outputs_before_steps_are_resumed(chain):
    run(chain, input={"limit": 20})
    with pytest.raises(FingerprintError, match="why not"):
        run(chain, steps=[{**CRITIQUE, "prompt": {"template": "{draft} why not"}}, CHECK, REPAIR], input={"limit": 20})
    identity = json.loads((chain.output / "_pipeline" / "job.json").read_text())["identity"]
    assert "chat" not in identity["steps"][0]["prompt"]  # defaults are left out: a new key changes nothing


CHAT = {"chat": {"system": "Be brief."}}


def test_a_step_may_continue_the_chat(job):
    job.rows(TEXTS[:4])
    (job.folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    steps = [
        {"name": "why", "prompt": {"template": "Why {draft}?", "continues_chat": True}},
        {"name": "apart", "prompt": {"template": "Apart {why.generated_text}"}},
        {"name": "fine", "prompt": {"template": "Fine?", "continues_chat": True}, "replaces": "draft"},
    ]
    run(job, prompt={"template": "Say {text}", **CHAT}, steps=steps, sampling={"max_tokens": 3})
    for i, row in by_id(job).items():
        chat = f"[Be brief.]<user>Say {TEXTS[i]}"
        first = generated(chat, row_seed(0, "f0.parquet", i), 3)
        chat += f"<assistant>{first}<user>Why {first}?"
        reason = generated(chat, step_seed(0, "f0.parquet", i, "why", 0), 256)
        apart = generated(f"[Be brief.]<user>Apart {reason}", step_seed(0, "f0.parquet", i, "apart", 0), 256)
        chat += f"<assistant>{reason}<user>Fine?"
        fine = generated(chat, step_seed(0, "f0.parquet", i, "fine", 0), 256)
        texts = (row["why"]["generated_text"], row["apart"]["generated_text"], row["generated_text"])
        assert texts == (reason, apart, fine)


def test_a_server_computes_steps(tmp_path):
    texts = [f"row{i}. a b c" for i in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    steps = [
        {"name": "first", "prompt": {"template": "first {draft}"}, "sampling": {"max_tokens": 5}, "replaces": "draft"},
        {"name": "last", "prompt": {"template": "last {first.generated_text} {text}"}, "sampling": {"max_tokens": 3}},
    ]
    with FakeServer(slots=4) as server:
        job = {
            "input": {"path": str(tmp_path / "in.parquet")},
            "prompt": {"template": "say {text}"},
            "server": {"base_url": server.url},
            "sampling": {"max_tokens": 4},
            "steps": steps,
            "output": {"path": str(tmp_path / "out"), "rows_per_file": 8},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        report = run_job(load_job(tmp_path / "job.yaml"))
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["text"] for row in found) == sorted(texts)
    for row in found:
        first = answer_text(f"say {row['text']}", 4)
        draft = answer_text(f"first {first}", 5)
        assert row["generated_text"] == draft
        assert row["last"]["generated_text"] == answer_text(f"last {draft} {row['text']}", 3)
    assert report.work.computed_generated_tokens == report.tokens.generated + 2  # and the probe


def test_a_finished_output_is_the_input_of_another_job(chain):
    """The second model of a flow: its job reads the first one's draft and the column of a step."""
    renamed = {"generated_text": "draft_text", "error": "first_error"}
    run(chain, output={"rename": renamed, "accept": "check.label = ' yes'"})
    first, folder = by_id(chain), chain.output
    second = chain.folder / "second"
    sections = {
        "steps": [],
        "input": {"path": str(folder), "columns": ["id", "draft_text", "check"], "when": "dropped_by is null"},
        "prompt": {"template": "{draft_text} {check.label} {repair.attempts}"},
    }
    report, _ = run(chain, **sections, output={"path": str(second), "rename": {}})
    rows = [row for part in second.glob("part-*") for row in pq.read_table(part).to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(len(TEXTS)))
    for row in rows:
        before = first[row["id"]]
        assert (row["draft_text"], row["check"]) == (before["draft_text"], before["check"])
        assert row["dropped_by"] == (None if before["check"]["label"] == " yes" else "input.when")
        if row["dropped_by"] is None:
            prompt = f"{before['draft_text']} {before['check']['label']} 1"
            seed = row_seed(0, row["source_file"], row["source_row"])
            assert row["generated_text"] == generated(prompt, seed, 6)
    assert 0 < report.rows.completed < len(TEXTS)


LOOP = [
    {**CHECK, "prompt": {"template": "{text}: {draft}; ok?"}},
    {
        **REPAIR,
        "prompt": {"template": "{other} {draft} then"},
        "when": "check.label = ' no'",
        "repeat": {"from": "check", "until": "check.label = ' yes' or draft = ''", "at_most": 2},
    },
    {
        "name": "last",
        "when": "repair is null and kind = 'even'",
        "prompt": {"template": "{draft} at last"},
        "sampling": {"max_tokens": 5},
    },
]


def loop_of(i: int, text: str) -> dict[str, Any]:
    """Return the texts of row `i` of a job of `check`, `repair` with repetitions, and `last`, one after the other."""

    def seed(name: str, attempt: int) -> int:
        return step_seed(0, "f0.parquet", i, name, attempt)

    draft = generated(f"Say {text}", row_seed(0, "f0.parquet", i), 6)
    checks, repairs, label = 0, 0, ""
    tokens = tuple(tuple(label.encode()) for label in LABELS)
    for _ in range(3):
        chosen = result_of(list(f"{text}: {draft}; ok?".encode()), Choice(tokens))
        assert isinstance(chosen, ChoiceResult)
        label, checks = LABELS[chosen.best], checks + 1
        if label == " no":
            draft = generated(f"other {i} {draft} then", seed("repair", repairs), 5)
            repairs += 1
        else:
            break
    last = None if repairs or i % 2 else generated(f"{draft} at last", seed("last", 0), 5)
    return {"draft": draft, "label": label, "checks": checks, "repairs": repairs or None, "last": last}


@pytest.mark.parametrize("is_stopped", [False, True])
def test_steps_are_skipped_and_repeated_by_conditions(chain, is_stopped):
    path = chain.folder / "in" / "f0.parquet"
    kinds = pa.array([None if i % 3 == 1 and i % 2 else ("even", "odd")[i % 2] for i in range(len(TEXTS))])
    pq.write_table(pq.read_table(path).append_column("kind", kinds), path)
    sections = {"steps": LOOP, "output": {"accept": "check.label = ' yes'", "rows_per_file": 50}}
    if is_stopped:
        chain.fake(step_s=0.04, max_num_seqs=3)
        for stop_at in (1, 12):
            with pytest.raises(Interrupted):
                run(chain, [(lambda status, at=stop_at: status.rows_done >= at, signal.SIGTERM)], **sections)
    report, _ = run(chain, **sections)
    counts: Counter[Any] = Counter()
    for i, row in by_id(chain).items():
        right = loop_of(i, str(TEXTS[i]))
        repair, final = row["repair"], row["last"]
        found = {
            "draft": row["generated_text"],
            "label": row["check"]["label"],
            "checks": row["check"]["attempts"],
            "repairs": repair and repair["attempts"],
            "last": final and final["generated_text"],
        }
        assert found == right
        assert row["dropped_by"] == (None if right["label"] == " yes" else "output.accept")
        counts[right["repairs"], right["last"] is None] += 1
    assert {repairs for repairs, _ in counts} == {None, 1, 2, 3}
    rows, total = by_id(chain), report.tokens
    steps = {step.name: step.completed for step in report.steps}
    assert list(steps) == ["", "check", "repair", "last"]
    for name in ("check", "repair", "last"):
        passed = [row[name] for row in rows.values() if row[name] is not None]
        found = steps[name].rows, steps[name].requests, steps[name].input_tokens
        assert found == (len(passed), sum(s["attempts"] for s in passed), sum(s["num_input_tokens"] for s in passed))
    assert sum(step.input_tokens for step in steps.values()) == total.input
    assert sum(step.generated_tokens for step in steps.values()) == total.generated
    assert sum(step.machine_us for step in report.steps) == report.machine_us
    assert "first prompt" in text_report(report)
    assert counts[None, False]
    assert counts[None, True]
    assert sum(record["actors"][0]["stats"]["prompt_tokens"] for record in runs(chain)) == report.tokens.computed


def voted(answers: list[str], n: int, stop_at: float) -> tuple[str, int, int]:
    """Return the winner of a vote with its votes, and the number of samples, if they are computed one by one."""
    for count in range(1, n + 1):
        votes = Counter(answers[:count])
        most, needed = max(votes.values()), -(-stop_at * n // 1)
        if most >= needed or most + n - count < needed or count == n:
            winner = max(votes, key=votes.__getitem__)  # the first of equal ones
            return winner, most, count
    raise AssertionError


def test_the_rounds_of_a_vote_have_no_more_samples_than_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n, stop_at = int(rng.integers(2, 12)), float(rng.choice([0.25, 0.5, 0.6, 0.75, 1.0]))
        answers = rng.choice(["a", "b", "c"], n, p=[0.7, 0.2, 0.1]).tolist()
        count = 0
        while more := num_needed(n, stop_at, answers[:count]):
            count += more
        assert count == voted(answers, n, stop_at)[2]


VOTE = {
    "name": "answer",
    "prompt": {"template": "{text} {draft}: answer"},
    "sampling": {"temperature": 0.5},
    "vote": {"n": 8, "stop_at": 0.75},
    "replaces": "draft",
}
KINDS = 2


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_vote_stops_sampling_a_row_once_it_is_settled(chain, is_stopped):
    """The step after the vote decides whether it is repeated, with the next seeds."""
    again = {**CHECK, "prompt": {"template": "{draft}; {text} ok?"}}
    again["repeat"] = {"from": "answer", "until": "check.label = ' yes'", "at_most": 1}
    chain.fake(kinds=KINDS, **({"step_s": 0.02, "max_num_seqs": 3} if is_stopped else {}))
    sections = {"steps": [VOTE, again], "output": {"rows_per_file": 50}, "sampling": {"max_tokens": 1}}
    if is_stopped:
        for stop_at in (1, 12):
            with pytest.raises(Interrupted):
                run(chain, [(lambda status, at=stop_at: status.rows_done >= at, signal.SIGTERM)], **sections)
    report, _ = run(chain, **sections)
    labels = tuple(tuple(label.encode()) for label in LABELS)
    counts: Counter[Any] = Counter()
    for i, row in by_id(chain).items():
        first = answer(list(f"Say {TEXTS[i]}".encode()), row_seed(0, "f0.parquet", i), 1)
        draft, attempts, votes, count = str(first[0] % KINDS), 0, 0, 0
        for _ in range(2):
            prompt = list(f"{TEXTS[i]} {draft}: answer".encode())
            seeds = [step_seed(0, "f0.parquet", i, "answer", attempts + sample) for sample in range(8)]
            answers = [str(answer(prompt, seed, 256)[0] % KINDS) for seed in seeds]
            draft, votes, count = voted(answers, 8, 0.75)
            attempts += count
            chosen = result_of(list(f"{draft}; {TEXTS[i]} ok?".encode()), Choice(labels))
            assert isinstance(chosen, ChoiceResult)
            if chosen.best == 0:
                break
        found = row["answer"]
        assert (row["generated_text"], found["generated_text"]) == (draft, draft)
        assert (found["votes"], found["attempts"]) == (votes, attempts)
        counts[count] += 1
    assert set(counts) == {6, 7, 8}
    assert sum(record["actors"][0]["stats"]["prompt_tokens"] for record in runs(chain)) == report.tokens.computed


def mistakes_of(job, steps: list[Any], **sections: Any) -> list[str]:
    """Return the mistakes of a job file with these steps, each with the line of its step."""
    try:
        config = job.config(steps=json.loads(json.dumps(steps)), **sections)
    except JobFileError as error:
        return [str(mistake) for mistake in error.mistakes]
    return [str(mistake) for mistake in validate_job(config).mistakes]


GENERATE = {"name": "s", "prompt": {"template": "{draft}"}}
CHOICE = {**GENERATE, "task": {"type": "choice", "labels": ["a", "b"]}}
REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([{**GENERATE, "prompt": {"template": "{later.label}"}}, {**CHOICE, "name": "later"}], {},
     "steps[0].prompt.template: 'later' is this step or a later one; expected draft, an earlier step or a column"),
    ([{**GENERATE, "prompt": {"template": "{s.generated_text}"}}], {}, "template: 's' is this step or a later one"),
    ([{**GENERATE, "prompt": {"template": "{unknown.label}"}}], {}, "the input has no column 'unknown'"),
    ([CHOICE, {"name": "t", "prompt": {"template": "{s.lable}"}}], {}, "no field 'lable' (did you mean 'label'?)"),
    ([CHOICE, {"name": "t", "prompt": {"template": "{s.generated_text}"}}], {}, "no field 'generated_text'"),
    ([{**GENERATE, "prompt": {"template": "{draft.text}"}, "name": "text"}], {}, "the input has a column 'text'"),
    ([{**GENERATE, "prompt": {"column": "s"}}], {}, "steps[0].prompt.column: 's' is this step or a later one"),
    ([{**GENERATE, "prompt": {"messages": "draft"}}], {}, "steps[0].prompt.chat: needs prompt.chat in the job"),
    ([{**GENERATE, "prompt": {"template": "{draft"}}], {}, "steps[0].prompt.template: no } closes"),
    ([{**GENERATE, "prompt": {"template": "no column"}}], {}, "names no column"),
    ([{**GENERATE, "prompt": {"template": "{draft}", "column": "id"}}], {}, "expected exactly one of template"),
    ([{**GENERATE, "prompt": {"template": "{draft}", "fill_null": {"x": ""}}}], {}, "'x' is not in the prompt"),
    ([{"name": "s"}], {}, "steps[0].prompt: required, but missing"),
    ([{"prompt": {"template": "{draft}"}}], {}, "steps[0].name: required, but missing"),
    ([{**GENERATE, "name": "two words"}], {}, "expected letters, digits and _, after a letter; got 'two words'"),
    ([{**GENERATE, "name": "draft"}], {}, "steps[0].name: is the name of the latest text in prompts"),
    ([{**GENERATE, "name": "error"}], {}, "steps[0].name: the output has a column 'error'"),
    ([GENERATE, GENERATE], {}, "steps[1].name: 's' is the name of two steps"),
    ([{**GENERATE, "name": "id"}], {}, "steps[0].name: the input has a column 'id'"),
    ([{**GENERATE, "promt": 1}], {}, "Did you mean `prompt`?"),
    ([{**GENERATE, "sampling": {"max_token": 1}}], {}, "Did you mean `max_tokens`?"),
    ([{**GENERATE, "sampling": {"n": 2}}], {}, "steps[0].sampling.n: is not supported in a step"),
    ([{**GENERATE, "sampling": {"seed": 2}}], {}, "steps[0].sampling.seed: is not supported in a step"),
    ([{**GENERATE, "sampling": {"max_tokens": {"column": "id"}}}], {}, "not supported in a step as {column: name}"),
    ([{**GENERATE, "sampling": {"temperature": -1.0}}], {}, "steps[0].sampling.temperature"),
    ([{**GENERATE, "sampling": {"structured_outputs": {"regex": "("}}}], {}, "steps[0].sampling.structured_outputs"),
    ([{**CHOICE, "sampling": {"max_tokens": 2}}], {}, "has no effect with task choice, which generates no text"),
    ([{**CHOICE, "replaces": "draft"}], {}, "steps[0].replaces: needs task generate"),
    ([{**CHOICE, "task": {"type": "choice"}}], {}, "steps[0].task.labels: required by task choice"),
    ([{**GENERATE, "task": {"type": "generate", "labels": ["a", "b"]}}], {}, "steps[0].task.labels: has no effect"),
    ([{**GENERATE, "task": "embed"}], {}, "steps[0].task.type: embed is not supported in a step"),
    ([{**GENERATE, "task": {"type": "score", "completion": "{nothing}"}}], {}, "steps[0].task.completion"),
    ([{**GENERATE, "adapter": "judge"}], {}, "steps[0].adapter: 'judge' is not in model.adapters"),
    ([{**GENERATE, "prompt": {"template": "{draft}", "images": ["text"]}}], {}, "steps[0].prompt.images"),
    ([{**GENERATE, "prompt": {"template": "x", "continues_chat": True}}], {}, "continues_chat: needs prompt.chat in"),
    ([{**GENERATE, "when": "s.attempts = 1"}], {}, "steps[0].when: 's' is this step or a later one"),
    ([{**GENERATE, "when": "id ="}], {}, "steps[0].when: character 5: found the end"),
    ([{**GENERATE, "when": "draft > 5"}], {}, "steps[0].when: character 7: `draft` is a text"),
    ([{**GENERATE, "when": "other = 5"}], {}, "steps[0].when: character 1: no column 'other'"),
    ([{**CHOICE, "repeat": {"from": "s", "until": "s.label = 1", "at_most": 2}}], {}, "[0].repeat.until: character"),
    ([{**CHOICE, "repeat": {"from": "t", "until": "s.label = ''", "at_most": 2}}, {**CHOICE, "name": "t"}], {},
     "steps[0].repeat.from: 't': expected this step or an earlier one: s"),
    ([{**CHOICE, "repeat": {"from": "s", "until": "s.label = ''"}}], {}, "steps[0].repeat.at_most: required"),
    ([{**CHOICE, "repeat": {"from": "s", "until": "s.label = ''", "at_most": 0}}], {}, "expected at least 1"),
    ([{**CHOICE, "repeat": {"until": "s.label = ''", "at_most": 1}}], {}, "steps[0].repeat.from: required"),
    ([{**GENERATE, "vote": {"n": 8}}], {}, "steps[0].vote: needs task generate and sampling.temperature above 0"),
    ([{**CHOICE, "vote": {"n": 8}}], {}, "steps[0].vote: needs task generate"),
    ([{**VOTE, "vote": {"n": 1}}], {}, "steps[0].vote.n: expected at least 2"),
    ([{**VOTE, "vote": {"n": 8, "stop_at": 1.5}}], {}, "steps[0].vote.stop_at: expected at most 1"),
    ([GENERATE], {"prompt": {"template": "{text}", "continues_chat": True}}, "has no effect in the first prompt"),
    ([GENERATE], {"task": "score", "sampling": {}}, "steps: the first prompt must generate text"),
    ([GENERATE], {"sampling": {"n": 2, "temperature": 1.0}}, "sampling.n: must be 1 with steps"),
    ([{**GENERATE, "name": f"s{i}"} for i in range(33)], {}, "steps"),
    ([5], {}, "steps[0]: expected `key: value` lines; got 5"),
]  # fmt: skip


def test_mistakes_in_steps_are_found_before_the_run_with_their_place(job):
    job.rows(TEXTS[:3])
    for steps, sections, problem in REFUSED:
        found = mistakes_of(job, steps, **sections)
        assert any(problem in mistake for mistake in found), (problem, found)
        assert all(mistake.startswith(f"{job.folder / 'job.yaml'}:") for mistake in found), found
    (mistake,) = mistakes_of(job, [GENERATE, {**CHOICE, "name": "t"}])
    assert "the tokenizer cannot be loaded" in mistake  # the fake has none
    texts = pa.table({"id": [1], "text": ["a"], "draft": ["b"]})
    pq.write_table(texts, job.folder / "in" / "f0.parquet")
    assert "steps: the input has a column 'draft'" in mistakes_of(job, [GENERATE])[0]


def real_job(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """Run a job of the embedded model; return its rows in input order."""
    job = {
        "model": "demo",
        # room for all rows: in a thread of a busy machine a row's next request may come late
        "engine": {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 96 << 20},
        "output": {"path": str(folder), "rows_per_file": 8},
        **sections,
    }
    folder.with_suffix(".yaml").write_text(json.dumps(job))
    run_job(load_job(folder.with_suffix(".yaml")))
    rows = [row for part in sorted(folder.glob("part-*")) for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


def test_rows_equal_those_of_separate_jobs_and_later_prompts_come_from_the_cache(tmp_path, engines_in_threads):
    reports = "Client: Garpol. Engineer: Nura Renni. Device: furnace 724. Problem: no power. Cost: $1517. "
    texts = [f"Visit {i}. " + reports * 15 for i in range(24)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
    first, judges = "{text}\nSummary:", "{text}\nSummary: {draft} Right?"
    betters = "{text}\nSummary: {draft} Right?{check.label} Better:"
    choice, short = {"type": "choice", "labels": [" yes", " no"]}, {"max_tokens": 12}
    together = real_job(
        tmp_path / "together",
        input={"path": str(path)},
        prompt={"template": first},
        sampling=short,
        steps=[
            {"name": "check", "prompt": {"template": judges}, "task": choice},
            {"name": "better", "prompt": {"template": betters}, "sampling": short, "replaces": "draft"},
        ],
    )
    one = real_job(tmp_path / "one", input={"path": str(path)}, prompt={"template": first}, sampling=short)
    table = pa.table({"id": range(len(texts)), "text": texts, "draft": [row["generated_text"] for row in one]})
    pq.write_table(table, tmp_path / "two.parquet")
    two = real_job(
        tmp_path / "two", input={"path": str(tmp_path / "two.parquet")}, prompt={"template": judges}, task=choice
    )
    checks = pa.array([{"label": row["label"]} for row in two])
    pq.write_table(table.append_column("check", checks), tmp_path / "three.parquet")
    three = real_job(
        tmp_path / "three",
        input={"path": str(tmp_path / "three.parquet")},
        prompt={"template": betters},
        sampling=short,
    )
    assert len(together) == len(texts)
    for row, checked, better in zip(together, two, three, strict=True):
        assert row["check"]["label"] == checked["label"]
        assert row["check"]["label_probability"] == pytest.approx(checked["label_probability"], abs=1e-4)
        assert row["generated_text"] == row["better"]["generated_text"] == better["generated_text"]
    for name in ("check", "better"):
        cached, read = (sum(row[name][f"num_{n}_tokens"] for row in together) for n in ("cached", "input"))
        assert read / len(texts) > 512
        assert cached / read >= 0.9
