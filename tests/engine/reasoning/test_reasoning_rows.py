"""Rows that reason: budgets and the answers' grammars hold, however rows are cut, preempted, drafted and batched."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError
from tests.engine.drafts.proposers import looking_up
from tests.engine.drafts.random_rows import same
from tests.engine.grammar import small_vocabulary
from tests.engine.grammar.small_vocabulary import small_tokenizer, text_engine
from tests.engine.grammar.test_grammar_rows import own_drafts
from tests.engine.hash_runner import EOS
from tests.engine.schedule.test_scheduler import run

# The likeliest tokens of the model, so that some rows begin and end reasoning by themselves.
_LIKELY = np.bincount(small_vocabulary._TABLE.argmax(dim=-1).numpy(), minlength=EOS)[:90].argsort()[::-1].tolist()
END, START = _LIKELY[:2]
NUM_GREEDY = 84
TIGHT = {"max_model_len": 100, "max_num_batched_tokens": 24, "max_num_seqs": 12}
GRAMMARS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"regex": "x[a-c]{2,5}!"},
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}},
)  # fmt: skip
SAMPLED = ({"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2},
           {"logprobs": 2}, {"stop": ("b",)}, {"frequency_penalty": 0.4, "ignore_eos": True},
           {"repetition_detection": None, "n": 3, "temperature": 1.1})  # fmt: skip


def markers() -> dict[str, str]:
    tokenizer = small_tokenizer()
    return {"start": tokenizer.decode([START]), "end": tokenizer.decode([END])}


def params_of(row: int, **more: Any) -> SamplingParams:
    budget = (None, 0, 1, 2, 5, 17, 33)[row % 7]
    grammar = GRAMMARS[row % 3]
    return SamplingParams(max_tokens=(60, 25)[row % 5 == 0], seed=row, reasoning=markers(),  # type: ignore[arg-type]
                          thinking_token_budget=budget, structured_outputs=grammar, **more)  # type: ignore[arg-type]  # fmt: skip


@cache
def beginners() -> list[list[int]]:
    """Prompts after which the model begins to reason by itself."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 90, int(rng.integers(1, 30))).tolist() for _ in range(900)]
    first = text_engine().generate(prompts, SamplingParams(max_tokens=1))
    return [p for p, done in zip(prompts, first) if done.token_ids == [START] and not {START, END} & set(p)]


@cache
def requests() -> list[Request]:
    rng, made = np.random.default_rng(8), []
    for row in range(NUM_GREEDY + 60):
        prompt = rng.integers(0, 90, int(rng.integers(1, 30))).tolist()
        prompt = [*prompt, START, 7] if row % 4 < 2 else prompt if row % 4 == 2 else beginners()[row % len(beginners())]
        more = {} if row < NUM_GREEDY else SAMPLED[row % len(SAMPLED)]
        made.append(Request(row, prompt, params_of(row, **more)))
    return made


@pytest.fixture(scope="module")
def plain() -> dict[int, Completion]:
    return run(text_engine(), requests(), check=False)


def by_hand(engine: Engine, request: Request) -> list[int]:
    """Compute a row by definition: runs without reasoning, joined at the markers."""
    params, prompt = request.params, request.prompt_token_ids
    free = replace(params, reasoning=None, thinking_token_budget=None, structured_outputs=None)
    held = replace(free, structured_outputs=params.structured_outputs)

    def tokens(known: list[int], own: SamplingParams) -> list[int]:
        room = params.max_tokens - len(known)
        return engine.generate([prompt + known], replace(own, max_tokens=room))[0].token_ids if room else []

    seen = [token for token in prompt if token in (START, END)]
    known: list[int] = []
    if not seen or seen[-1] != START:
        first = engine.generate([prompt], replace(held, max_tokens=1, logprobs=96))[0]
        assert first.logprobs is not None
        likely = dict(first.logprobs[0].top)
        begins = first.token_ids == [START] or likely.get(START, -1e9) > likely[first.token_ids[0]]
        if not begins:
            return tokens([], held)
        known = [START]
    thoughts = tokens(known, free)
    budget = len(thoughts) if params.thinking_token_budget is None else params.thinking_token_budget
    if END in thoughts[:budget]:
        known += thoughts[: thoughts.index(END) + 1]
    elif EOS in thoughts[:budget] or len(known) + budget >= params.max_tokens:
        return known + thoughts[:budget]
    else:
        known += [*thoughts[:budget], END]
    return known + tokens(known, held)


def test_greedy_rows_follow_the_definition(plain: dict[int, Completion]) -> None:
    engine, kinds = text_engine(), set()
    tokenizer = small_tokenizer()
    for request in requests()[:NUM_GREEDY]:
        done, params = plain[request.row_id], request.params  # type: ignore[index]
        assert done.token_ids == by_hand(engine, request), request
        ids = done.token_ids
        is_open = [t for t in request.prompt_token_ids if t in (START, END)][-1:] == [START]
        begins = ids[:1] == [START]
        thinks, ended = is_open or begins, END in ids
        kinds.add((is_open, begins, ended, params.structured_outputs is not None, done.finish_reason))
        if thinks and ended:
            assert done.num_reasoning_tokens == ids.index(END) - begins
            assert done.reasoning == (tokenizer.decode(ids[begins : ids.index(END)]).strip() or None)
        elif thinks:
            assert (done.text, done.num_reasoning_tokens) == ("", len(ids) - begins)
        if params.structured_outputs is not None and done.finish_reason == "stop" and (ended or not thinks):
            form = "x[a-c]{2,5}!" if params.structured_outputs.kind == "regex" else r'\{"a":(true|false)\}'
            assert re.fullmatch(form, done.text), done.text
    assert {(o, b) for o, b, *_ in kinds} >= {(True, False), (False, True), (False, False)}
    assert {e for *_, e, _, _ in kinds} == {True, False}
    limited = [(plain[r.row_id].num_reasoning_tokens, r.params.thinking_token_budget or 0) for r in requests()]  # type: ignore[index]
    assert sum(tokens == budget > 0 for tokens, budget in limited) > 10
    assert sum(0 < tokens < budget for tokens, budget in limited) > 10


ENGINES: dict[str, Callable[[], Engine]] = {
    "chunks and preemption": lambda: text_engine(100, **TIGHT),
    "lookup": lambda: looking_up(text_engine(max_num_batched_tokens=200)),
    "drafts": lambda: own_drafts(text_engine(max_num_batched_tokens=200), exposes=False),
    "drafts, chunks and preemption": lambda: own_drafts(text_engine(65, **TIGHT), exposes=False),
    "overlapped": lambda: text_engine(is_asynchronous=True),
    "overlapped, chunks and preemption": lambda: text_engine(100, is_asynchronous=True, **TIGHT),
    "overlapped, drafts": lambda: own_drafts(text_engine(is_asynchronous=True, max_num_batched_tokens=200), False),
}


@pytest.mark.parametrize("name", ENGINES)
def test_no_token_changes(name: str, plain: dict[int, Completion]) -> None:
    engine = ENGINES[name]()
    done = run(engine, requests(), check="preemption" in name, arrivals=np.random.default_rng(1))
    assert same(done, plain)
    for row, expected in plain.items():
        if expected.logprobs is not None:  # of a marker that the budget forced too
            assert [token.token_id for token in done[row].logprobs] == done[row].token_ids
        for mine, theirs in zip(done[row].each, expected.each, strict=True):
            assert (mine.token_ids, mine.reasoning) == (theirs.token_ids, theirs.reasoning)
    assert (engine.stats.num_preemptions > 0) == ("preemption" in name)
    if "drafts" in name:
        assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


@pytest.mark.parametrize("name", ["lookup", "drafts", "overlapped", "overlapped, drafts"])
def test_budgets_alone_hold_where_no_other_row_needs_a_mask(name: str, plain: dict[int, Completion]) -> None:
    """Steps of greedy rows only are not awaited, except where a budget may end."""
    engine = ENGINES[name]()
    wanted = [r for r in requests()[:NUM_GREEDY] if r.params.structured_outputs is None]
    done = run(engine, wanted, check=False)
    assert same(done, {r.row_id: plain[r.row_id] for r in wanted})  # type: ignore[index,arg-type]
    assert engine.stats.masked_tokens == 0


def test_markers_that_are_no_tokens_are_refused_before_anything_runs() -> None:
    engine, params = text_engine(), SamplingParams(reasoning="auto")
    message = "sampling.reasoning: auto: the checkpoint's tokenizer has no known start-of-reasoning token"
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.generate([[1]], params)
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.add(Request(0, [1], params))
    assert not engine.has_unfinished
    for given, message in (
        ({"thinking_token_budget": 3}, "sampling.thinking_token_budget = 3: expected none without sampling.reasoning"),
        ({"thinking_token_budget": -2, "reasoning": "auto"}, "expected an integer of at least 0"),
        ({"reasoning": True}, "sampling.reasoning = True: expected auto, or"),
        ({"reasoning": {"start": "a", "end": "a"}}, "are both 'a'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            SamplingParams(**given)  # type: ignore[arg-type]


def test_markers_of_several_tokens_divide_the_text_and_change_no_token() -> None:
    """Drafts, batches and several samples work; options that need markers while a row runs are refused by name."""
    given = [replace(r, params=replace(r.params, reasoning=None, thinking_token_budget=None, structured_outputs=None))
             for r in requests()]  # fmt: skip
    whole = run(text_engine(), given, check=False)
    pairs = Counter(text[i : i + 2] for done in whole.values() for text in [done.text] for i in range(len(text)))
    found = [pair for pair, _ in pairs.most_common() if len(pair) == 2 and small_tokenizer().token_id(pair) is None]
    markers = {"start": found[1], "end": found[0]}
    divided_requests = [replace(r, params=replace(r.params, reasoning=markers)) for r in given]
    engine = looking_up(text_engine(**TIGHT))
    done, num_divided = run(engine, divided_requests, check=False), 0
    assert sum(engine.stats.accepted_by_position) > 0
    for row, completion in done.items():
        for one, plain_one in zip(completion.each, whole[row].each, strict=True):
            assert one.token_ids == plain_one.token_ids
            thought, end, answer = plain_one.text.partition(found[0])
            begins = plain_one.text.lstrip().startswith(found[1])
            if end and not begins:
                num_divided += 1
                assert (one.reasoning, one.text) == (thought.strip() or None, answer.lstrip())
                assert one.num_reasoning_tokens <= len(small_tokenizer().encode(thought)) + 1
    assert num_divided > 10
    for name, value in (("thinking_token_budget", 3), ("structured_outputs", {"regex": "a+"})):
        params = SamplingParams(reasoning=markers, **{name: value})  # type: ignore[arg-type]
        (refused,) = engine.generate([[1]], params)
        assert refused.error == "invalid_sampling"
        assert f"sampling.{name}: needs markers that are one token each" in (refused.error_message or "")
