"""The distribution of verified tokens: exact on small vocabularies, by chi-square of many runs.

The model of these tests is a table: logits of the next token by the two tokens before it. Whatever is drafted, the
first tokens of a run must have the joint distribution that plain steps give them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pipeline.engine.sampling import random_numbers as draws
from pipeline.engine.sampling import rejection
from pipeline.engine.sampling import top_p as weights
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_host import distribution, sample
from pipeline.engine.sampling.random_numbers import DRAFT, draw, uniforms
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.sampling.verify import verify
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.sampling_options import SAMPLING_OPTIONS, sampling_options
from pipeline.engine.schedule.slot_table import ranges
from tests.engine.sampling import sampled_rows
from tests.engine.sampling.sampled_rows import p_value

V, LENGTH, MAX_DRAFTS = 4, 3, 3  # tokens of the vocabulary, tokens with a tested joint distribution, drafts of a step
NUM_RUNS = 7_000
FALSE_ALARM = 1e-4  # of all chi-square tests here together

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p, top_k, top_p, hot": {"temperature": 1.7, "min_p": 0.15, "top_k": 3, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (1,)},
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few tokens of these vocabularies are several blocks of the cumulative sum, not one of them padded to 512."""
    monkeypatch.setattr(draws, "_BLOCK", 2)


def table_of(seed: int, scale: float = 1.2) -> torch.Tensor:
    """Return logits (V + 1, V + 1, V) of the next token, by the two last ones; V: none yet."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (V + 1, V + 1, V)).astype(np.float32))


def batch_of(options: dict, token_ids: np.ndarray, slots: np.ndarray, known: np.ndarray, seeds: np.ndarray):
    params = SamplingParams(**{"max_tokens": 9, "temperature": 1.0} | options)
    ending_ids = np.full(len(slots), None, dtype=object)
    ending_ids.fill(np.array(params.stop_token_ids, dtype=np.int64))
    return SamplingBatch(
        options=np.full(len(slots), np.array(sampling_options(params), dtype=SAMPLING_OPTIONS)),
        seeds=seeds[slots],
        positions=known,
        ending_ids=ending_ids,
        token_ids=token_ids,
        slots=slots,
        num_prompt=np.zeros(len(slots), dtype=np.int64),
        num_known=known,
    )


def logits_behind(table: torch.Tensor, token_ids: np.ndarray, slots: np.ndarray, known: np.ndarray) -> torch.Tensor:
    last, before = (np.where(known >= back, token_ids[slots, np.maximum(known - back, 0)], V) for back in (1, 2))
    return table[torch.from_numpy(before.astype(np.int64)), torch.from_numpy(last.astype(np.int64))]


def joint_distribution(table: torch.Tensor, options: dict) -> np.ndarray:
    """Return the distribution of the first LENGTH tokens, by enumeration of the plain sampler's distributions."""
    joint = np.ones((V,) * LENGTH)
    for tokens in itertools.product(range(V), repeat=LENGTH):
        text, slots = np.array([tokens], dtype=np.int32), np.zeros(LENGTH, dtype=np.int64)
        known = np.arange(LENGTH)
        batch = batch_of(options, text, slots, known, np.zeros(1, dtype=np.uint64))
        p = distribution(logits_behind(table, text, slots, known), batch).double().numpy()
        p /= p.sum(axis=1, keepdims=True)
        joint[tokens] = np.prod(p[known, list(tokens)])
    return joint


@dataclass
class Draft:
    """Sampler of drafts from `table` under `options`; without a table, `guess` drafts without a distribution."""

    table: torch.Tensor | None = None
    options: dict = field(default_factory=dict)
    guess: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None

    def next(self, text: np.ndarray, slots: np.ndarray, known: np.ndarray, seeds: np.ndarray):
        if self.table is None:
            assert self.guess is not None
            return self.guess(text, slots, known), None
        batch = batch_of(self.options, text, slots, known, seeds)
        q_SV = distribution(logits_behind(self.table, text, slots, known), batch)
        u = torch.from_numpy(uniforms(seeds[slots], known, DRAFT))
        return draw(q_SV, u).numpy(), q_SV


def runs_of(table: torch.Tensor, options: dict, draft: Draft, seed: int) -> tuple[np.ndarray, int]:
    """Return the first LENGTH tokens of NUM_RUNS runs and the number of accepted drafts. Some steps draft less."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 2**63, NUM_RUNS).astype(np.uint64)
    text = np.zeros((NUM_RUNS, LENGTH + MAX_DRAFTS + 1), dtype=np.int32)
    known = np.zeros(NUM_RUNS, dtype=np.int64)
    num_accepted = 0
    while (known < LENGTH).any():
        slots = np.flatnonzero(known < LENGTH)
        count_S = rng.choice([MAX_DRAFTS, MAX_DRAFTS, 1, 0], len(slots))
        q_SKV = torch.zeros(len(slots), MAX_DRAFTS, V)
        for position in range(MAX_DRAFTS):
            drafting = np.flatnonzero(count_S > position)
            tokens, q = draft.next(text, slots[drafting], known[slots[drafting]] + position, seeds)
            text[slots[drafting], known[slots[drafting]] + position] = tokens
            if q is not None:
                q_SKV[torch.from_numpy(drafting), position] = q
        row_slot, position_R = np.repeat(slots, count_S + 1), ranges(np.zeros_like(count_S), count_S + 1)
        known_R = known[row_slot] + position_R
        is_draft_R = position_R < np.repeat(count_S, count_S + 1)
        draft_R = np.where(is_draft_R, text[row_slot, known_R], -1).astype(np.int64)
        proposal = None
        if draft.table is not None:
            sequence_R = np.repeat(np.arange(len(slots)), count_S + 1)
            q_DV = q_SKV[torch.from_numpy(sequence_R[is_draft_R]), torch.from_numpy(position_R[is_draft_R])]
            proposal = ProposalDistribution(np.flatnonzero(is_draft_R), draft_R[is_draft_R], q_DV)
        batch = batch_of(options, text, row_slot, known_R, seeds)
        verified = verify(sample(logits_behind(table, text, row_slot, known_R), batch, proposal), draft_R)
        assert verified.output.finite.all()
        num_accepted += int(verified.num_accepted_S.sum())
        for number in range(int(verified.num_accepted_S.max()) + 1):
            taking = np.flatnonzero(verified.num_accepted_S >= number)
            text[slots[taking], known[slots[taking]] + number] = verified.output.token_ids[
                verified.first_S[taking] + number
            ]
        known[slots] += verified.num_accepted_S + 1
    return text[:, :LENGTH], num_accepted


def likeliest(table: torch.Tensor) -> Draft:
    return Draft(guess=lambda text, slots, known: logits_behind(table, text, slots, known).argmax(-1).numpy())


TARGET = table_of(1)
DISJOINT = torch.where(TARGET.topk(2, -1).values[..., 1:] <= TARGET, float("-inf"), TARGET)  # never what top_k 2 keeps
DRAFTS = {
    "the target itself": lambda options: Draft(TARGET, options),
    "another model": lambda options: Draft(table_of(2), options),
    "another model without the target's options": lambda options: Draft(table_of(2)),
    "one-hot, distribution known": lambda options: Draft(TARGET, {"temperature": 0.0}),
    "one-hot, distribution unknown": lambda options: likeliest(TARGET),
    "always the same": lambda options: Draft(guess=lambda text, slots, known: np.full(len(slots), 2)),
}
CASES = [(name, draft) for name in OPTIONS for draft in DRAFTS if name in ("plain", "top_p") or "hot" not in draft]
CASES = [*CASES, ("top_k", "disjoint supports")]


@pytest.mark.parametrize(("name", "draft"), CASES)
def test_the_joint_distribution_of_the_first_tokens_is_that_of_plain_steps(name: str, draft: str) -> None:
    options = OPTIONS[name]
    drafts = Draft(DISJOINT) if draft == "disjoint supports" else DRAFTS[draft](options)
    texts, num_accepted = runs_of(TARGET, options, drafts, seed=CASES.index((name, draft)))
    assert p_value(texts, joint_distribution(TARGET, options)) > FALSE_ALARM / len(CASES)
    if draft == "the target itself":
        assert num_accepted > 1.2 * NUM_RUNS
    assert (num_accepted == 0) == (draft == "disjoint supports")


MISTAKES = {
    "residual not normalised": (rejection, "draw", lambda w, u: draw(w, (u / w.sum(dim=-1)).clamp(max=1.0))),
    "resampling from p": (rejection, "residual", lambda p, q: p.clone()),
    "probabilities before top-p": (weights, "cut_top_p", lambda w, top_p: w),
    "every draft is accepted": (rejection, "uniforms", lambda seeds, positions, stream: np.zeros(len(seeds))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_negative_control(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The same test detects each of these mistakes."""
    options = OPTIONS["top_p"]
    expected = joint_distribution(TARGET, options)
    monkeypatch.setattr(*MISTAKES[name])
    texts, _ = runs_of(TARGET, options, Draft(table_of(2)), seed=7)
    assert p_value(texts, expected) < FALSE_ALARM / len(CASES)


def test_without_a_distribution_tokens_are_those_of_plain_steps_one_by_one() -> None:
    """The same seed gives the same tokens, whatever was drafted."""
    for options in OPTIONS.values():
        texts = []
        for draft in (likeliest(TARGET), Draft(guess=lambda text, slots, known: known % V)):
            texts.append(runs_of(TARGET, options, draft, seed=5)[0])
        seeds = np.random.default_rng(5).integers(0, 2**63, NUM_RUNS).astype(np.uint64)
        plain = np.zeros((NUM_RUNS, LENGTH), dtype=np.int32)
        slots = np.arange(NUM_RUNS)
        for position in range(LENGTH):
            known = np.full(NUM_RUNS, position)
            batch = batch_of(options, plain, slots, known, seeds)
            plain[:, position] = sample(logits_behind(TARGET, plain, slots, known), batch).token_ids
        assert (texts[0] == plain).all()
        assert (texts[1] == plain).all()


@pytest.mark.parametrize("temperature", [None, 0.0, 0.01])
def test_ragged_drafts_are_accepted_as_far_as_they_are_the_models(temperature: float | None) -> None:
    best = [3, 1, 4, 1, 5, 0, 2, 6, 5]
    draft_R = np.array([3, 1, -1, 4, -1, -1, 7, 3, -1])  # two drafts; one; none; two that are wrong
    draft_R[3] = 1  # right: row 3's best
    batch = None if temperature is None else sampled_rows.batch_of([SamplingParams(temperature=temperature)] * 9)
    logits = torch.zeros(9, 8)
    logits[torch.arange(9), torch.tensor(best)] = 5.0
    verified = verify(sample(logits, batch), draft_R)
    assert verified.first_S.tolist() == [0, 3, 5, 6]
    assert verified.num_accepted_S.tolist() == [2, 1, 0, 0]
    assert verified.output.token_ids.tolist() == best


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_rows_that_are_not_finite_accept_nothing(value: float, temperature: float | None) -> None:
    """The output of such a row is token 0, as its draft."""
    batch = None if temperature is None else sampled_rows.batch_of([SamplingParams(temperature=temperature)] * 4)
    logits = torch.full((4, 8), -50.0)
    logits[:, 0] = 50.0
    logits[1] = value
    q_DV = torch.full((3, 8), 0.125)
    for proposal in (None, ProposalDistribution(np.arange(3), np.zeros(3, dtype=np.int64), q_DV)):
        verified = verify(sample(logits, batch, proposal), np.array([0, 0, 0, -1]))
        assert verified.num_accepted_S.tolist() == [1]
        assert verified.output.finite.tolist() == [True, False, True, True]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_a_distribution_that_cannot_have_given_the_draft_is_ignored(broken: float) -> None:
    logits = TARGET[0, 0].expand(400, -1)
    batch = sampled_rows.batch_of([SamplingParams(temperature=1.0)] * 400)
    q_DV = torch.full((200, V), 0.25)
    q_DV[:, 1] = broken
    proposal = ProposalDistribution(np.arange(0, 400, 2), np.ones(200, dtype=np.int64), q_DV)
    assert (sample(logits, batch, proposal).token_ids == sample(logits, batch).token_ids).all()


def test_greedy_rows_and_rows_with_a_proposal_share_a_step() -> None:
    logits = TARGET[0, 0].expand(6, -1)
    best = int(TARGET[0, 0].argmax())
    params = [SamplingParams()] * 2 + [SamplingParams(temperature=1.0, logprobs=1)] * 4
    draft_R = np.array([best, -1, 1, -1, 2, -1])
    proposal = ProposalDistribution(np.array([0, 2, 4]), draft_R[[0, 2, 4]], torch.full((3, V), 0.25))
    verified = verify(sample(logits, sampled_rows.batch_of(params), proposal), draft_R)
    assert verified.num_accepted_S[0] == 1
    assert verified.output.token_ids[:2].tolist() == [best, best]
    for row, entry in verified.output.logprobs.items():
        assert entry.token_id == verified.output.token_ids[row]
