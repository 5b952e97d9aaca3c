"""A unit in Tokenize and Write."""

import json
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import JobConfig
from pipeline.config.identity import identity_of
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import ResultShape
from pipeline.data.prompts import PromptSpec
from pipeline.data.units import Unit, UnitSpec, make_units
from pipeline.engine.completion import Completion
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import PipelineError
from pipeline.job.actor.control_tokens import AuthorTexts, author_texts
from pipeline.job.actor.tokenize import Chat, Tokenize, chat_of, failed_row, row_seed
from pipeline.job.actor.worker import Worker
from pipeline.job.actor.write import PartWriter, row_stats
from pipeline.job.planning.actor_specs import flow_spec
from pipeline.job.planning.plan import make_plan
from pipeline.job.process import supervisor
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import now_us
from pipeline.report.record.row_stats import MAX_MESSAGE, Computed, Histogram
from pipeline.tokenization.chat_messages import ChatTemplateError
from tests.engine.hash_runner import hash_engine
from tests.job.conftest import FAKES, units_as_written
from tests.job.fake_engine import FakeTokenizer


def unit_of(columns: dict, spec: UnitSpec | None = None, start: int = 0) -> Unit:
    """Return one unit of these columns, with its prompts in `p` unless `spec` names others."""
    spec = spec or UnitSpec(PromptSpec(column="p"))
    table = pa.table(columns)
    table = table.append_column("source_file", pa.array(["a.parquet"] * table.num_rows))
    table = table.append_column("source_row", pa.array(range(start, start + table.num_rows), pa.int64()))
    (unit,) = make_units(table, spec, window=3)
    return Unit.from_bytes(unit.to_bytes())


def complete(requests) -> list[Completion]:
    return [Completion(r.row_id, [1, 2], "t", "stop", len(r.prompt_token_ids), 1) for r in requests]


def tokenizing(tokenizer: FakeTokenizer | None = None, params=SamplingParams(), **options) -> Tokenize:  # noqa: B008
    return Tokenize(tokenizer or FakeTokenizer(), params, 0, options.pop("chat", None), **options)


def write(tmp_path, results=ResultShape()) -> PartWriter:  # noqa: B008
    store = PartStore(str(tmp_path / "out"))
    store.folder.probe()
    return PartWriter(store, fingerprint="0123abcd", rename={"reasoning": "r"}, results=results, metadata={})


def test_reasoning_has_columns_of_its_own_a_text_for_each_sample(tmp_path):
    unit = unit_of({"p": ["a", "b", "c"]})
    at = rows_by_source(unit)
    thought, plain = complete([Request(at[row], [1], SamplingParams()) for row in (0, 2)])
    thought = replace(thought, reasoning="why", num_reasoning_tokens=3)
    done = [thought, failed_row(at[1], "empty_prompt", "none"), replace(plain, samples=(thought, plain))]
    for samples, expected in (("one", ["why", None, None]), ("lists", [["why"], None, ["why", None]])):
        table = write(tmp_path, ResultShape(samples, reasoning=True)).table(unit, done)
        assert table["r"].to_pylist() == expected
        assert table["num_reasoning_tokens"].to_pylist() == [3, 0, 3]
    stats = row_stats(unit, done).reasoned
    assert (stats.rows, stats.tokens) == (2, 6)


def rows_by_source(unit: Unit) -> dict[int, int]:
    """Return each source row -> the row's index in the unit."""
    return {row: i for i, row in enumerate(unit.own("source_row").to_pylist())}


def test_rows_get_their_own_seed_which_depends_only_on_their_source_position():
    tokenize = Tokenize(FakeTokenizer(), SamplingParams(max_tokens=5, temperature=1.0), 7, None)
    unit = unit_of({"p": ["same", "same", "other"]}, start=10)
    requests, failed = tokenize(unit)
    assert not failed
    seeds = {unit.own("source_row")[r.row_id].as_py(): r.params.seed for r in requests}
    assert seeds == {row: row_seed(7, "a.parquet", row) for row in (10, 11, 12)}
    assert len(set(seeds.values())) == 3
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert row_seed(8, "a.parquet", 10) != seeds[10] != row_seed(7, "b.parquet", 10)
    assert all(r.params.max_tokens == 5 and r.params.temperature == 1.0 for r in requests)


def test_failed_rows_never_reach_the_engine_and_keep_their_reason():
    spec = UnitSpec(PromptSpec(column="p"), sampling_columns={"max_tokens": "n", "temperature": "t"})
    unit = unit_of(
        {"p": ["fine", None, " ", "bad n", "bad t"], "n": [3, 3, 3, 0, 3], "t": [0.5, 0.5, 0.5, 0.5, -1.0]}, spec
    )
    requests, failed = tokenizing()(unit)
    at = rows_by_source(unit)
    assert [r.row_id for r in requests] == [at[0]]
    assert (requests[0].params.max_tokens, requests[0].params.temperature) == (3, 0.5)
    assert {c.row_id: c.error for c in failed} == {
        at[1]: "null_prompt",
        at[2]: "empty_prompt",
        at[3]: "invalid_sampling",
        at[4]: "invalid_sampling",
    }
    assert "max_tokens" in next(c.error_message for c in failed if c.row_id == at[3])


def test_a_row_of_a_batch_api_may_have_a_response_format_of_its_own():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [
        json.dumps({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        '{"type": "json_object"}',
        None,
        '{"type": "xml"}',
        '"json"',
    ]
    spec = UnitSpec(PromptSpec(column="p"), sampling_columns={"response_format": "f"})
    unit = unit_of({"p": ["a"] * 5, "f": forms}, spec)
    requests, failed = tokenizing(params=SamplingParams(structured_outputs={"regex": "a+"}))(unit)
    at = rows_by_source(unit)
    wanted = {request.row_id: request.params.structured_outputs for request in requests}
    expected = [{"json": schema}, {"json_object": True}, {"regex": "a+"}]
    assert [wanted[at[row]] for row in range(3)] == [StructuredOutputs.from_config(each) for each in expected]
    assert {c.row_id: c.error for c in failed} == {at[3]: "invalid_sampling", at[4]: "invalid_sampling"}
    assert all("sampling.response_format" in c.error_message for c in failed)


def test_chats_from_text_and_from_messages():
    requests, _ = tokenizing(chat=Chat(system="be kind"))(unit_of({"p": ["hello"]}))
    assert bytes(requests[0].prompt_token_ids) == b"[be kind]<user>hello"
    requests, _ = tokenizing(chat=Chat(from_messages=True))(unit_of({"m": TURNS}, UnitSpec(PromptSpec(messages="m"))))
    assert bytes(requests[0].prompt_token_ids) == b"<user>hi<assistant>yo"


TURNS = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]]


def prompt_job(**prompt) -> JobConfig:
    base = {"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}}
    return JobConfig.model_validate(base | {"prompt": prompt})


def author_of(config: JobConfig) -> AuthorTexts:
    return author_texts(config.prompt.spec(), config.prompt)


ENDED = ["fine", None, "a<|end|>", "<|end|>", "<|end|><|start|>", "<|END|>", "{q}", "|>"]


@pytest.mark.parametrize(
    ("prompt", "in_template", "in_values"),
    [
        ({"column": "q"}, 0, 3),
        ({"template": "Q: {q}"}, 0, 3),
        ({"template": "<|start|>{q}<|end|>"}, 7, 3),
        ({"template": "<|start|>{q}<|end|>", "special_tokens": "template"}, 0, 3),
        # a control token across a value and a literal counts as text of the row
        ({"template": "<|end{q}"}, 0, 4),
        ({"template": "<|end{q}", "special_tokens": "template"}, 0, 3),
        ({"column": "q", "chat": {"system": "Be <|end|>"}}, 7, 3),
        ({"messages": "m"}, 0, 3),
        ({"template": "{n}"}, 0, 0),
    ],
)
def test_rows_with_texts_of_control_tokens_are_counted(prompt, in_template, in_values):
    config = prompt_job(**prompt)
    chats = [q and [{"role": "user", "content": q}] for q in ENDED]
    unit = unit_of({"q": ENDED, "m": chats, "n": range(8)}, units_as_written(config))
    tokenize = tokenizing(chat=chat_of(config.prompt, "generate", None), author=author_of(config))
    found = tokenize.control_tokens(unit)
    assert (found.in_template, found.in_values) == (in_template, in_values)
    assert found.template_example in (("<|start|>", "<|end|>") if in_template else ("",))
    assert found.value_example == ("a.parquet row 2: <|end|>" if in_values else "")


def test_control_tokens_of_any_spelling_are_found():
    odd = ("<｜end▁of▁sentence｜>", "[INST] ", "\n\n#", "a.b*", "\\x", "</s>", '"q"')

    class Odd(FakeTokenizer):
        control_texts = odd

    rows = [f"x{text}y" for text in odd] + ["a!b*", "x"]
    unit = unit_of({"p": rows})
    assert tokenizing(Odd()).control_tokens(unit).in_values == len(odd)
    Odd.control_texts = ()
    assert tokenizing(Odd()).control_tokens(unit).in_values == 0


def test_a_template_of_control_tokens_goes_to_the_tokenizer_in_pieces():
    class Pieces(FakeTokenizer):
        def encode_template(self, pieces):
            encoded.append(pieces)
            return [1]

    encoded: list[list[str]] = []
    config = prompt_job(template="<|start|>{q}<|end|>{n:03d}", special_tokens="template")
    unit = unit_of({"q": ['"\\é\n<|end|>'], "n": [7]}, units_as_written(config))
    tokenize = tokenizing(Pieces(), author=author_of(config))
    tokenize(unit)
    assert encoded == [["<|start|>", '"\\é\n<|end|>', "<|end|>", "007", ""]]
    assert tokenize.shown(unit.own("_prompt")[0].as_py()) == '<|start|>"\\é\n<|end|><|end|>007'


def test_the_job_file_decides_if_the_last_turn_is_continued():
    class EchoesContinuation(FakeTokenizer):
        def encode_chat(self, messages, *rest):
            return [int(rest[-2])]

    unit = unit_of({"m": TURNS}, UnitSpec(PromptSpec(messages="m")))
    for chat, expected in (({}, 1), ({"continue_final_message": True}, 1), ({"continue_final_message": False}, 0)):
        config = prompt_job(messages="m", chat=chat)
        requests, _ = tokenizing(EchoesContinuation(), chat=chat_of(config.prompt, config.task.type, None))(unit)
        assert requests[0].prompt_token_ids == [expected]
        assert identity_of(config)["prompt"]["chat"]["continue_final_message"] is (expected == 1)


def test_a_chat_that_the_template_refuses_is_the_rows_error():
    class Refusing(FakeTokenizer):
        def encode_chat(self, messages, *rest):
            if messages[0]["content"] == "bad":
                raise ChatTemplateError("roles must alternate")
            return super().encode_chat(messages)

    requests, failed = tokenizing(Refusing(), chat=Chat())(unit_of({"p": ["good", "bad"]}))
    assert len(requests) == 1
    assert [(c.error, c.error_message) for c in failed] == [("invalid_messages", "roles must alternate")]


def test_a_part_holds_the_rows_in_source_order_whatever_order_they_finished_in(tmp_path):
    prompts = ["p" * (1 + 100 * (7 * i % 11)) for i in range(10)]
    spec = UnitSpec(PromptSpec(column="p"), kept=("p", "id"))
    unit = unit_of({"p": [*prompts, None], "id": list(range(11))}, spec)
    assert unit.own("source_row").to_pylist() != list(range(11))  # longest first
    requests, failed = tokenizing()(unit)
    completions = complete(requests)[::-1] + failed
    summary = write(tmp_path)(unit, completions)
    (part,) = (tmp_path / "out").glob("part-0123abcd-w00003-u0000of0001-n11.parquet")
    rows = pq.read_table(part).to_pylist()
    assert [row["id"] for row in rows] == [row["source_row"] for row in rows] == list(range(11))
    assert [row["num_input_tokens"] for row in rows] == [*map(len, prompts), 0]
    assert summary.written
    assert (summary.totals.rows, summary.totals.num_generated_tokens) == (11, 20)
    assert summary.totals.error_rows == {"null_prompt": 1}
    (example,) = summary.row_stats.errors["null_prompt"]
    assert (example.source_file, example.row) == ("a.parquet", 10)
    assert "null" in example.message
    assert UnitSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    again = write(tmp_path)(unit, completions)
    assert not again.written


def test_a_part_counts_as_computed_what_an_engine_computed_for_it(tmp_path):
    """An engine counts cached prompts, but no refused ones. Tokens of a row that failed later are only in the engine's
    counters: `account.py` prices no such token, `faults.py` calls it lost."""
    prompts = [[*range(20), row] for row in range(6)] + [[9] * 70, [1, 2, 77, 4]]
    unit = unit_of({"p": [str(row) for row in range(8)]})
    engine = hash_engine(96, 4, bad_token=77, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    at = rows_by_source(unit)
    done = list(engine.stream(Request(at[row], ids, params) for row, ids in enumerate(prompts)))
    totals = write(tmp_path)(unit, done).totals
    assert totals.error_rows == {"non_finite_logits": 1, "prompt_too_long": 1}
    assert totals.num_input_tokens == 6 * 21
    assert totals.num_cached_tokens == engine.stats.cached_tokens > 0
    assert totals.num_error_input_tokens == 70 + 4
    computed = Computed.from_stats(asdict(engine.stats))
    assert computed.less(supervisor.computed(done)) == Computed(prompt=4)
    assert totals.num_computed_tokens == computed.all - 4


def test_latency_and_lengths_of_rows():
    """Latency and lengths cover completed rows; each error code shows its first three rows of the input."""
    prompts = ["a" * 60, "b" * 70, "c" * 128, "d" * 129, *([None] * 5)]
    unit = unit_of({"p": prompts})
    requests, failed = tokenizing()(unit)
    done = [
        replace(c, queued_us=1_000, first_token_us=1_010, last_token_us=1_010 + 20 * i, num_cached_tokens=i)
        for i, c in enumerate(complete(requests))
    ]
    broken = failed_row(done[0].row_id, "non_finite_logits", "x" * 1000, done[0].num_prompt_tokens)
    stats = row_stats(unit, [broken, *done[1:], *reversed(failed)])
    at = rows_by_source(unit)
    prompt_of = {i: prompts[row] for row, i in at.items()}
    expected: dict[int, int] = {}
    for c in done[1:]:
        longest = 64 if len(prompt_of[c.row_id]) <= 64 else 128 if len(prompt_of[c.row_id]) <= 128 else 256
        expected[longest] = expected.get(longest, 0) + 1
    assert {longest: bucket.rows for longest, bucket in stats.lengths.items()} == expected
    assert sum(b.cached_tokens for b in stats.lengths.values()) == 1 + 2 + 3
    assert sum(b.generated_tokens for b in stats.lengths.values()) == 2 * 3
    assert stats.latency.first_token_us.counts == {10: 3}
    assert stats.latency.per_token_us == Histogram.from_values([20, 40, 60])
    assert stats.latency.row_us == Histogram.from_values([30, 50, 70])
    assert [e.row for e in stats.errors["null_prompt"]] == [4, 5, 6]
    assert [len(e.message) for e in stats.errors["non_finite_logits"]] == [MAX_MESSAGE]


def test_a_missing_or_doubled_completion_is_never_written(tmp_path):
    unit = unit_of({"p": ["a", "b"]})
    done = complete(tokenizing()(unit)[0])
    for wrong in (done[:1], [done[0], done[0]], [*done, done[0]]):
        with pytest.raises(PipelineError, match=r"completions of .* came back for 2 rows"):
            write(tmp_path)(unit, wrong)
    assert not list((tmp_path / "out").glob("part-*"))


def test_a_unit_whose_part_exists_is_found_and_not_computed(job):
    PartStore(str(job.output)).folder.probe()
    plan = make_plan(job.rows(["any"]).config(), "cpu")
    worker = Worker(flow_spec(plan, (), FAKES, "0001-run").work, 0, now_us())
    try:
        unit = unit_of({"p": [f"row {i}" for i in range(5)]}).to_bytes()
        first = worker.process(unit)
        (part,) = job.parts()
        before, stats = part.stat(), worker.state().record.stats
        again = worker.process(unit)
        assert (first.written, first.found, again.written, again.found) == (True, False, False, True)
        assert again.totals == first.totals
        assert not again.row_stats.lengths
        assert worker.state().record.stats == stats
        assert (part.stat().st_ino, part.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    finally:
        worker.close()
