"""Rows with a grammar in the engine: their outputs conform, however they are cut, preempted, drafted and batched."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import EnvironmentFailed
from tests.engine.drafts.proposers import draft_with, looking_up
from tests.engine.drafts.random_rows import same
from tests.engine.drafts.test_draft_model import draft_with_itself
from tests.engine.grammar.small_vocabulary import add_noise, text_engine
from tests.engine.hash_runner import before_each_step
from tests.engine.schedule.test_scheduler import run

NUM_SCHEMAS = 100
PARAMS = ({}, {}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "repetition_penalty": 1.2},
          {"frequency_penalty": 0.4, "logprobs": 1}, {"ignore_eos": True}, {"stop": ("zz",), "presence_penalty": 0.1},
          {"temperature": 1.3, "min_p": 0.01})  # fmt: skip


def random_schema(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of bounded texts, so that every row ends."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": int(rng.integers(-50, 1)), "maximum": int(rng.integers(1, 900))},
        lambda: {"type": "string", "minLength": int(rng.integers(0, 3)), "maxLength": int(rng.integers(3, 7))},
        lambda: {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
        lambda: {"type": "string", "format": "date"},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"enum": ["a\"b", 7, None, {"x": [1]}, "long text"][: int(rng.integers(1, 6))]},
        lambda: {"const": [1, "two", {"three": 3}]},
    ]  # fmt: skip
    if depth < 3:
        inner = [random_schema(rng, depth + 1) for _ in range(int(rng.integers(1, 4)))]
        names = ["a", "b c", 'd"e'][: len(inner)]
        required = [name for name in names if rng.random() < 0.6]
        kinds += [
            lambda: {"type": "object", "properties": dict(zip(names, inner)), "required": required,
                     "additionalProperties": False},
            lambda: {"type": "array", "items": inner[0], "minItems": 1, "maxItems": 3},
            lambda: {"anyOf": [{"type": "null"}, inner[0]]},
        ] * 2  # fmt: skip
    if depth == 0:
        kinds = [*kinds[7:], lambda: {"type": "array", "items": {"$ref": "#/$defs/it"}, "minItems": 2, "maxItems": 2,
                                      "$defs": {"it": inner[0]}}]  # fmt: skip
    return kinds[int(rng.integers(len(kinds)))]()


@pytest.fixture(scope="module")
def schemas() -> dict[int, tuple[dict[str, Any], Request]]:
    rng = np.random.default_rng(4)
    made = {}
    for row in range(NUM_SCHEMAS + 20):  # the last ones without a grammar
        schema = random_schema(rng) if row < NUM_SCHEMAS else {}
        given: dict[str, Any] = {"json": schema} | ({"whitespace_pattern": "[ ]{0,2}"} if row % 7 == 0 else {})
        params = SamplingParams(max_tokens=300, seed=row, structured_outputs=given, **PARAMS[row % len(PARAMS)])  # type: ignore[arg-type]
        if row >= NUM_SCHEMAS:
            params = SamplingParams(max_tokens=30, seed=row, **PARAMS[row % 4])  # type: ignore[arg-type]
        made[row] = schema, Request(row, rng.integers(0, 90, int(rng.integers(1, 40))).tolist(), params)
    return made


@pytest.fixture(scope="module")
def plain(schemas) -> dict[int, Completion]:
    engine = text_engine()
    done = run(engine, [request for _, request in schemas.values()], check=False)
    assert engine.stats.num_preemptions == 0
    stats, num_tokens = engine.stats, sum(len(done[row].token_ids) for row in range(NUM_SCHEMAS))
    assert stats.masked_tokens + stats.forced_tokens == num_tokens
    assert min(stats.forced_tokens, stats.masked_tokens) > 0.3 * num_tokens
    assert 0 < stats.filled_masks < stats.masked_tokens  # the best of random logits is rarely allowed
    assert stats.mask_us > 0
    return done


def test_every_output_parses_and_is_valid(schemas, plain: dict[int, Completion]) -> None:
    for row, (schema, request) in schemas.items():
        if row >= NUM_SCHEMAS:
            continue
        text = plain[row].text
        assert (plain[row].finish_reason, plain[row].error) == ("stop", None), text
        jsonschema.validate(json.loads(text), schema)
        if request.params.structured_outputs.whitespace_pattern is None:
            assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) or "\\" in text
    assert any(" " in plain[row].text.replace("b c", "") for row in range(0, NUM_SCHEMAS, 7))
    assert len({c.text for c in plain.values()}) > NUM_SCHEMAS * 0.7


def own_drafts(engine: Engine, exposes: bool) -> Engine:
    """Draft with the model itself without a grammar: many drafts are refused."""
    proposer = draft_with_itself(engine, 3)
    proposer.exposes_draft_probs = exposes
    add_noise(proposer.runner)
    return draft_with(engine, proposer)


def mask_by_mask(engine: Engine) -> Engine:
    """Make the engine fill a mask and run a step for each token."""
    matcher = engine._masks._compiler.matcher

    def blind(wanted: StructuredOutputs, can_force: bool) -> RowMatcher:
        made = matcher(wanted)
        made.look, made.is_open = lambda: False, False  # type: ignore[method-assign]
        return made

    engine._masks._compiler.matcher = blind  # type: ignore[method-assign]
    return engine


def some(schemas: dict[int, tuple[dict[str, Any], Request]]) -> list[Request]:
    return [schemas[row][1] for row in (*range(30), *range(NUM_SCHEMAS, NUM_SCHEMAS + 6))]


TIGHT = {"num_blocks": 80, "max_num_batched_tokens": 13, "max_num_seqs": 12}
ENGINES: dict[str, Callable[[], Engine]] = {
    "mask by mask": lambda: mask_by_mask(text_engine()),
    "mask by mask, lookup": lambda: mask_by_mask(looking_up(text_engine(max_num_batched_tokens=200))),
    "one at a time": lambda: text_engine(max_num_seqs=1),
    "lookup": lambda: looking_up(text_engine(max_num_batched_tokens=200)),
    "lookup, chunks and preemption": lambda: looking_up(text_engine(**TIGHT)),
    "overlapped": lambda: text_engine(is_asynchronous=True),
    "overlapped, chunks and preemption": lambda: text_engine(is_asynchronous=True, **TIGHT),
    "overlapped, lookup": lambda: looking_up(text_engine(is_asynchronous=True, max_num_batched_tokens=200)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_no_token_changes(name: str, schemas, plain: dict[int, Completion]) -> None:
    engine = ENGINES[name]()
    requests = [request for _, request in schemas.values()]
    if "preemption" not in name and name != "mask by mask":
        requests = some(schemas)
    done = run(engine, requests, check=name.startswith("lookup, chunks"), arrivals=np.random.default_rng(1))
    assert same(done, {row: plain[row] for row in done})
    assert len(done) == len(requests)
    if "preemption" in name:
        assert engine.stats.num_preemptions > 3
    assert (engine.stats.forced_tokens == 0) == ("mask by mask" in name)
    if name in ("mask by mask", "one at a time"):
        assert (engine.stats.filled_masks == engine.stats.masked_tokens) == (name == "mask by mask")
    if "lookup" in name:
        assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("exposes", [False, True])
def test_a_draft_model_that_knows_no_grammar_changes_no_token(
    exposes: bool, is_asynchronous: bool, schemas, plain: dict[int, Completion]
) -> None:
    """If sampled drafts are accepted by probability, sampled rows change, but conform to their grammar."""
    engine = own_drafts(text_engine(is_asynchronous=is_asynchronous, max_num_batched_tokens=200), exposes)
    done = run(engine, some(schemas), check=False)
    greedy = [row for row in done if schemas[row][1].params.temperature == 0.0 or not exposes]
    assert same({row: done[row] for row in greedy}, {row: plain[row] for row in greedy})
    for row in set(done) & set(range(NUM_SCHEMAS)):
        assert done[row].finish_reason == "stop"
        jsonschema.validate(json.loads(done[row].text), schemas[row][0])
    assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_step_that_is_undone_does_not_advance_grammars(
    is_asynchronous: bool, schemas, plain: dict[int, Completion]
) -> None:
    engine = text_engine(is_asynchronous=is_asynchronous)

    def fail(step: StepInput, future: object) -> None:
        if len(step.token_id_T) > 5:
            raise MemoryError

    before_each_step(engine, fail)
    done = run(engine, some(schemas), check=False)
    assert engine.stats.num_out_of_memory > 5
    assert same(done, {row: plain[row] for row in done})


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"choice": ["yes", "no", "yes and no"]}, "yes|no|yes and no"), ({"regex": "[a-c]{2,5}!"}, "[a-c]{2,5}!"),
     ({"grammar": 'start: pair ("," pair)~0..2\npair: /[a-z]{1,3}/ "=" /[0-9]/'}, "([a-z]{1,3}=[0-9],?){1,3}"),
     ({"json_object": True}, r"\{.*\}")],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_regular_expressions_and_grammars(given: dict, expected: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=300, temperature=temperature, structured_outputs=given)  # type: ignore[arg-type]
    done = text_engine().generate([[row, 3] for row in range(12)], params)
    for completion in done:
        assert completion.finish_reason in ("stop", "length" if "json_object" in given else "stop")
        assert completion.finish_reason == "length" or re.fullmatch(expected, completion.text)
    assert len({completion.text for completion in done}) > 1


def test_a_row_ends_with_its_grammar_and_not_one_token_later() -> None:
    engine = text_engine()
    whole, longer = engine.generate(
        [[1], [1]],
        [
            SamplingParams(max_tokens=9, structured_outputs={"choice": [choice]}, ignore_eos=ignore)  # type: ignore[arg-type]
            for choice, ignore in (("abab", False), ("abab!", True))
        ],
    )
    assert (whole.text, whole.finish_reason, len(whole.token_ids)) == ("abab", "stop", 2)
    assert (longer.text, longer.finish_reason, len(longer.token_ids)) == ("abab!", "stop", 3)
    cut = engine.generate([[1]], SamplingParams(max_tokens=1, structured_outputs={"choice": ["abab"]}))[0]  # type: ignore[arg-type]
    assert (cut.text, cut.finish_reason) == ("ab", "length")


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("drafting", [False, True])
def test_a_dead_end_and_a_wrong_grammar_are_errors_of_their_rows_alone(drafting: bool, is_asynchronous: bool) -> None:
    engine = text_engine(is_asynchronous=is_asynchronous, max_num_batched_tokens=200)
    engine = looking_up(engine) if drafting else engine
    wanted = {
        "at once": {"regex": "é+"},
        "later": {"regex": "aa[é~]"},
        "malformed": {"json": {"type": "array", "uniqueItems": True}},
        "fine": {"choice": ["aa"]},
    }
    params = SamplingParams(max_tokens=9)
    requests = [
        Request(name, [7, 7, 7, 7, 7, 7], replace(params, structured_outputs=given)) for name, given in wanted.items()
    ] + [Request("free", [7, 8], params)]
    done = run(engine, requests)
    errors = {name: (done[name].error, done[name].error_message) for name in wanted}
    nothing = "generated tokens its grammar allows no token of the vocabulary"
    assert errors["at once"] == ("grammar_error", f"sampling.structured_outputs: after 0 {nothing}")
    assert errors["later"] == ("grammar_error", f"sampling.structured_outputs: after 2 {nothing}")
    assert errors["malformed"][0] == "grammar_error"
    assert "uniqueItems" in errors["malformed"][1]
    assert (done["fine"].text, done["fine"].error, done["free"].error) == ("aa", None, None)
    assert (engine.num_unfinished, engine.pool.num_held) == (0, 0)


TWICE = {"type": "object", "patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False,
         "minProperties": 2, "maxProperties": 2}  # fmt: skip


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_finished_row_that_is_not_valid_is_an_error(is_asynchronous: bool) -> None:
    """Each sample is checked, only the answer if a row reasons; a truncated row is not checked."""
    engine = text_engine(is_asynchronous=is_asynchronous)
    params = SamplingParams(max_tokens=30, temperature=1.0, structured_outputs={"json": TWICE})  # type: ignore[arg-type]
    done = engine.generate([[row] for row in range(12)], params)
    errors = [c for c in done if c.error]
    assert 2 < len(errors) < 12
    for c in errors:
        assert (c.error, c.finish_reason, c.text, c.token_ids) == ("grammar_error", "error", "", [])
        assert re.fullmatch(r"sampling.structured_outputs.json: the finished .* '[ab]' twice", c.error_message)
        assert (c.num_lost_prompt_tokens, c.num_lost_generated_tokens > 3) == (1 - c.num_cached_tokens, True)
    assert all(len(json.loads(c.text)) == 2 for c in done if not c.error)
    (four,) = engine.generate([[1]], replace(params, n=4, seed=7))
    assert four.error == "grammar_error"
    assert re.match("sample [0-3] of 4: sampling", four.error_message)
    assert four.num_lost_generated_tokens > 4 * 6
    assert {c.finish_reason for c in engine.generate([[row] for row in range(12)], replace(params, max_tokens=5))} == {
        "length"
    }
    stopped = replace(params, temperature=0.0, stop=(":1",), structured_outputs={"json_object": True})  # type: ignore[arg-type]
    held = replace(stopped, structured_outputs={"json": {"enum": [{"a": 1}]}})  # type: ignore[arg-type]
    assert "cannot be read as JSON" in engine.generate([[1]], held)[0].error_message
    thoughts = replace(held, stop=(), reasoning={"start": "<", "end": ">"}, thinking_token_budget=2)  # type: ignore[arg-type]
    (reasoned,) = engine.generate([engine.tokenizer.encode("<")], thoughts)
    assert (reasoned.text, reasoned.error, reasoned.num_reasoning_tokens > 0) == ('{"a":1}', None, True)


def test_json_is_refused_by_name_before_it_runs_without_jsonschema(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = text_engine()
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(EnvironmentFailed, match=r"needs the package jsonschema.*pip install jsonschema"):
        engine.generate([[1]], SamplingParams(structured_outputs={"json": {"type": "null"}}))  # type: ignore[arg-type]
    assert engine.stats.generated_tokens == 0
    (done,) = engine.generate([[1]], SamplingParams(structured_outputs={"choice": ["aa"]}))  # type: ignore[arg-type]
    assert done.text == "aa"
