"""Completions in the harmony format of gpt-oss: messages on channels, of which only the final one is the answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.reasoning.channels import ChannelReasoning
from pipeline.engine.reasoning.markers import CHANNELS, ChannelTokens, find_markers, marker_tokens
from pipeline.engine.reasoning.tracking import Thinking
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.step.output_processor import split_reasoning
from pipeline.errors import ConfigError
from pipeline.tokenization.tokenizer import Tokenizer
from tests.engine.drafts.proposers import draft_with, looking_up
from tests.engine.drafts.random_rows import same
from tests.engine.drafts.test_draft_model import draft_with_itself
from tests.engine.hash_runner import VOCAB, _with, hash_engine
from tests.engine.reasoning.test_markers import tokenizer_with
from tests.engine.reasoning.test_reasoning_rows import GRAMMARS, SAMPLED
from tests.engine.schedule.test_scheduler import run

CONTROL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
WORDS = ("assistant", "analysis", "commentary", "final")
ANSWER = "<|end|><|start|>assistant<|channel|>final<|message|>"
PIECE = re.compile("|".join(re.escape(word) for word in (*CONTROL, *WORDS)) + "|.", re.DOTALL)


MESSAGE = re.compile(
    r"(?:^|<\|start\|>)\w*(?:<\|channel\|>([^<]*)(?:<\|constrain\|>\w+)?)?<\|message\|>"
    r"(.*?)(?=<\|(?:end|start)\|>|$)",
    re.DOTALL,
)


def by_pattern(text: str) -> tuple[str | None, str, int]:
    """Return reasoning, answer and number of reasoning characters and control tokens of a completion, by a regular
    expression over its text with control tokens."""
    if not re.search(r"<\|(start|channel|message|end)\|>", text):
        return None, re.sub(r"<\|\w+\|>", "", text), 0
    thoughts, answer = [], ""
    for channel, content in MESSAGE.findall(text):
        if not channel or channel.startswith("final"):
            answer = re.sub(r"<\|\w+\|>", "", content)
            break
        thoughts.append(content)
    shown = re.sub(r"<\|\w+\|>", "", "\n".join(thoughts))
    return shown.strip() or None, answer.lstrip(), len(re.findall(r"<\|\w+\|>|.", "".join(thoughts), re.DOTALL))


@cache
def harmony() -> Tokenizer:
    return tokenizer_with(*CONTROL, "<|constrain|>", is_special=True)


def ids_of(text: str) -> list[int]:
    return harmony()._parsing.encode(text, add_special_tokens=False).ids


def row_after(prompt: str, budget: int | None = None, has_grammar: bool = True) -> ChannelReasoning:
    markers = marker_tokens("auto", harmony())
    assert isinstance(markers, ChannelTokens)
    return ChannelReasoning.after(np.array(ids_of(prompt), dtype=np.int64), markers, budget, has_grammar)


COMPLETIONS = {
    "one analysis": "<|channel|>analysis<|message|>so!" + ANSWER + " yes<|return|>",
    "no analysis": "<|channel|>final<|message|>yes<|return|>",
    "two analyses": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>analysis<|message|>but<|end|>"
        "<|start|>assistant<|channel|>final<|message|>final<|return|>"
    ),
    "commentary": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary<|message|>I look<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes<|return|>"
    ),
    "tool call": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=f <|constrain|>json"
        '<|message|>{"a":1}<|call|>'
    ),
    "constrained": (
        "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}"
        "<|return|>"
    ),
    "after the answer": "<|channel|>final<|message|>yes<|end|><|start|>user<|message|>no",
    "without a channel": "<|message|>yes<|return|>",
    "not in the format": "yes, final<|return|>",
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_divided_wherever_it_is_cut(name: str) -> None:
    row, tokenizer, whole = (
        row_after("<|start|>user<|message|>why<|end|><|start|>assistant"),
        harmony(),
        COMPLETIONS[name],
    )
    pieces = ids_of(whole)
    assert row.is_open
    texts = [tokenizer._parsing.id_to_token(token) for token in pieces]
    for cut in range(len(pieces) + 1):
        ids, text = pieces[:cut], "".join(texts[:cut]).replace("\u0120", " ")
        done = split_reasoning(Completion(0, ids, tokenizer.decode(ids), "length", 1), row, tokenizer.decode)
        assert (done.reasoning, done.text, done.num_reasoning_tokens) == by_pattern(text), text
        has_answer = bool(re.search(r"<\|channel\|>final[^>]*(<\|constrain\|>json)?<\|message\|>|^<\|message\|>", text))
        assert row.thinking(np.array(ids)) == (Thinking.NO if has_answer else Thinking.YES), text
    assert cut == len(pieces)


def test_a_stop_string_cuts_the_text_in_which_it_is() -> None:
    row, tokenizer, whole = row_after("<|start|>assistant"), harmony(), COMPLETIONS["two analyses"]
    ids = ids_of(whole)
    shown = tokenizer.decode(ids)
    for num_cut, expected in ((2, ("so\nbut", "fin")), (5, ("so\nbut", "")), (20, ("so\nbu", "")), (36, ("so\n", ""))):
        text = shown[: len(shown) - num_cut]
        thought, answer, _ = row.split(ids, text, tokenizer.decode)
        assert (thought, answer) == expected, text


@pytest.mark.parametrize(
    ("prompt", "generated", "expected"),
    [
        ("<|start|>assistant", "", ANSWER[25:]),
        ("<|start|>assistant", "<|channel|>", ANSWER[36:]),
        ("<|start|>assistant", "<|channel|>fin", ANSWER[39:]),
        ("<|start|>assistant", "<|channel|>final", ANSWER[41:]),
        ("<|start|>assistant", "<|channel|>ana", "<|message|>" + ANSWER),
        ("<|start|>assistant", "<|channel|>analysis<|message|>", ANSWER),
        ("<|start|>assistant", "<|channel|>analysis<|message|>so", ANSWER),
        ("<|start|>assistant<|channel|>analysis<|message|>", "so", ANSWER),
        ("<|start|>assistant", "<|channel|>analysis<|message|>so<|end|>", ANSWER[7:]),
        ("<|start|>assistant", "<|channel|>analysis<|message|>so<|end|><|start|>", ANSWER[16:]),
        ("<|start|>assistant", "<|channel|>analysis<|message|>so<|end|><|start|>assis", ANSWER[21:]),
        ("<|start|>user<|message|>why<|end|>", "", ANSWER[7:]),
    ],
)
def test_reasoning_is_closed_from_wherever_it_is(prompt: str, generated: str, expected: str) -> None:
    row, ids, closed = row_after(prompt, budget=1), ids_of(generated), []
    while row.thinking(np.array([*ids, *closed])) == Thinking.YES:
        closed.append(row.closing_id(np.array([*ids, *closed])))
        assert len(closed) < 60
    assert closed == ids_of(expected)


def test_only_a_prompt_in_the_format_without_an_answer_opens_reasoning() -> None:
    for prompt, is_open in (("why", False), ("<|start|>assistant<|channel|>final<|message|>so", False),
                            ("<|start|>assistant<|channel|>analysis<|message|>so", True),
                            ("<|start|>user<|message|>why<|end|>", True)):  # fmt: skip
        assert row_after(prompt).is_open == is_open, prompt
    assert row_after("why").split(ids_of("a final"), "a final", harmony().decode) == (None, "a final", 0)
    answer = ids_of("re<|return|>")
    assert row_after("<|start|>assistant<|channel|>final<|message|>so").split(answer, "re", harmony().decode)[1] == "re"
    for budget, header, deadline in ((0, "", 100), (5, "", 108), (5, "<|channel|>analysis<|message|>", 105)):
        assert row_after("<|start|>assistant" + header, budget).thinking_deadline(100) == deadline


def test_auto_finds_the_format_by_its_tokens() -> None:
    assert find_markers("auto", harmony()) == CHANNELS
    assert isinstance(marker_tokens(CHANNELS, harmony()), ChannelTokens)
    fewer = tokenizer_with(*CONTROL[:-1], is_special=True)
    with pytest.raises(ConfigError, match=r"no known start-of-reasoning token \(<think>, .*, <\|channel\|>\)"):
        find_markers("auto", fewer)


# -- whole engines

_TABLE = torch.from_numpy(np.random.default_rng(12).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32))


@cache
def channel_tokenizer() -> Tokenizer:
    """Build a tokenizer of 87 characters that can spell JSON, and one token for each word of the format."""
    pieces = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in "~^|`@#%&"] + ["\u0120"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    backend.add_special_tokens(list(CONTROL))
    ends = frozenset(backend.token_to_id(text) for text in ("<|call|>", "<|return|>"))
    assert backend.get_vocab_size() == VOCAB
    return Tokenizer(backend, name="channels", eos_token_ids=ends, digest="")


@cache
def structure() -> torch.Tensor:
    """Return what is added to logits (last token, next token), so that completions have the format's form."""
    start, channel, message, end, call, _, assistant, analysis, commentary, final = (
        channel_tokenizer().token_id(text) for text in (*CONTROL, *WORDS)
    )
    added = torch.zeros(VOCAB, VOCAB)
    added[:, [start, channel, message, assistant, analysis, commentary, final]] = -90
    added[:, end], added[:, call] = 2.0, -4.0
    for last, following in ((start, [assistant]), (assistant, [channel]), (end, [start]),
                            (channel, [analysis, commentary, final]), (analysis, [message]),
                            (commentary, [message]), (final, [message])):  # fmt: skip
        added[last, following] = 100
    return added


def add_form(runner: Any) -> None:
    """Replace the runner's logits by a row of a table that the hash selects, in the format's form."""
    execute = runner.execute

    def with_form(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits_RV = _TABLE[execute(step, future).argmax(dim=-1)]
        known = step if future is None else _with(step, future)
        return logits_RV + structure()[torch.from_numpy(known.token_id_T[known.logit_row_R].astype(np.int64))]

    runner.execute = with_form


def engine_of(num_blocks: int = 1200, is_asynchronous: bool = False, **options: Any) -> Engine:
    options = {"max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    tokenizer = channel_tokenizer()
    engine = hash_engine(num_blocks, is_asynchronous=is_asynchronous, tokenizer=tokenizer, **options)
    add_form(engine.runner)
    return engine


def own_drafts(engine: Engine) -> Engine:
    proposer = draft_with_itself(engine, 5)
    proposer.exposes_draft_probs = False
    add_form(proposer.runner)
    return draft_with(engine, proposer)


def encoded(text: str) -> list[int]:
    return channel_tokenizer()._parsing.encode(text, add_special_tokens=False).ids


NUM_GREEDY = 60
PROMPTS = ("<|start|>assistant",) * 4 + ("<|start|>assistant<|channel|>final<|message|>x", "")
TIGHT = {"max_model_len": 100, "max_num_batched_tokens": 24, "max_num_seqs": 12}


@cache
def requests() -> list[Request]:
    rng, made = np.random.default_rng(8), []
    for row in range(NUM_GREEDY + 30):
        prompt = [*rng.integers(0, 87, int(rng.integers(1, 20))).tolist(), *encoded(PROMPTS[row % len(PROMPTS)])]
        more = {} if row < NUM_GREEDY else SAMPLED[row % len(SAMPLED)]
        params = SamplingParams(max_tokens=(60, 14)[row % 5 == 0], seed=row, reasoning="auto",
                                thinking_token_budget=(None, 0, 1, 2, 5, 17)[row // 2 % 6],
                                structured_outputs=GRAMMARS[row % 3], **more)  # type: ignore[arg-type]  # fmt: skip
        made.append(Request(row, prompt, params))
    return made


@pytest.fixture(scope="module")
def plain() -> dict[int, Completion]:
    return run(engine_of(), requests(), check=False)


def pieces_of(ids: list[int]) -> list[str]:
    return [str(channel_tokenizer()._parsing.id_to_token(token)) for token in ids]


def by_hand(engine: Engine, request: Request) -> list[int]:
    """Compute a row by definition: runs without reasoning, joined where the answer begins."""
    params, prompt = request.params, request.prompt_token_ids
    free = replace(params, reasoning=None, thinking_token_budget=None, structured_outputs=None)
    held = replace(free, structured_outputs=params.structured_outputs)

    def tokens(known: list[int], own: SamplingParams) -> list[int]:
        room = params.max_tokens - len(known)
        return engine.generate([prompt + known], replace(own, max_tokens=room))[0].token_ids if room > 0 else []

    if pieces_of(prompt)[-2:] != ["<|start|>", "assistant"]:
        return tokens([], held)
    thoughts = tokens([], free)
    begun = ["", "", *pieces_of(thoughts)]
    begins = [i - 1 for i in range(2, len(begun)) if begun[i - 1 : i + 1] == ["final", "<|message|>"]]
    budget = params.thinking_token_budget
    deadline = len(thoughts) if budget is None else budget and budget + 3
    if begins and begins[0] <= deadline:
        return thoughts[: begins[0]] + tokens(thoughts[: begins[0]], held)
    if len(thoughts) <= deadline and (len(thoughts) == params.max_tokens or thoughts[-1] >= VOCAB - 2):
        return thoughts
    known = thoughts[:deadline]
    closing, tail = PIECE.findall(ANSWER), ["<|start|>", "assistant", *pieces_of(known)]
    matches = [j for j in range(1, 6) for i in range(j) if tail[-(j - i) :] == closing[i:j]]
    if tail[-1] in ("analysis", "commentary"):
        matches, closing = [0], ["<|message|>", *closing]
    known += encoded("".join(closing[max(matches, default=0) :]))
    return (known + tokens(known, held))[: params.max_tokens]


def test_greedy_rows_follow_the_definition(plain: dict[int, Completion]) -> None:
    engine, kinds = engine_of(), set()
    for request in requests()[:NUM_GREEDY]:
        done, params, prompt = plain[request.row_id], request.params, pieces_of(request.prompt_token_ids)  # type: ignore[index]
        assert pieces_of(done.token_ids) == pieces_of(by_hand(engine, request)), request
        shown = "".join(pieces_of(done.token_ids)).replace("\u0120", " ")
        if prompt[-1] == "assistant":
            assert (done.reasoning, done.text) == by_pattern(shown)[:2], shown
            budget = params.thinking_token_budget
            kinds.add((len(re.findall("analysis|commentary", shown)), "final<" in shown, budget, done.finish_reason))
            assert budget is None or done.num_reasoning_tokens <= budget
            is_answer = "final<" in shown
        else:
            is_answer = True
            assert done.reasoning is None or prompt[-1] != "x"
        if params.structured_outputs is not None and done.finish_reason == "stop" and is_answer:
            form = "x[a-c]{2,5}!" if params.structured_outputs.kind == "regex" else r'\{"a":(true|false)\}'
            assert re.fullmatch(form, done.text), shown
    assert {num for num, *_ in kinds} >= {0, 1, 2}
    assert {(final, reason) for _, final, _, reason in kinds} == {
        (True, "stop"), (True, "length"), (False, "length"), (False, "stop")}  # fmt: skip


ENGINES: dict[str, Callable[[], Engine]] = {
    "chunks and preemption": lambda: engine_of(40, **TIGHT),
    "lookup": lambda: looking_up(engine_of(max_num_batched_tokens=200)),
    "drafts": lambda: own_drafts(engine_of(max_num_batched_tokens=200)),
    "overlapped, chunks and preemption": lambda: engine_of(40, is_asynchronous=True, **TIGHT),
    "overlapped, drafts": lambda: own_drafts(engine_of(is_asynchronous=True, max_num_batched_tokens=200)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_no_token_changes(name: str, plain: dict[int, Completion]) -> None:
    engine = ENGINES[name]()
    done = run(engine, requests(), check="preemption" in name, arrivals=np.random.default_rng(1))
    assert same(done, plain)
    for row, expected in plain.items():
        for mine, theirs in zip(done[row].each, expected.each, strict=True):
            assert (mine.token_ids, mine.reasoning) == (theirs.token_ids, theirs.reasoning)
    assert (engine.stats.num_preemptions > 0) == ("preemption" in name)
    if "drafts" in name:
        assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)
