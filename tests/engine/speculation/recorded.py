"""The policy on recorded rows of the demonstration job: real tokens and look-ups, and time by formula. So two runs give
the same figures, whatever else the machine does.

`python -m tests.engine.speculation.recorded` has the demonstration model generate the rows (half a minute) and replays
them in jobs of several sizes at three prices of drafts: plain, with forced lookup, and with the measuring policy. The
scheduler, the look-ups and the policy are the engine's own. What its model computes is read from the record.
"""

import numpy as np
import torch

from pipeline.bench.speculation import _rows
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.compiled import select_lookup
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts, Offer, StepOutcome
from pipeline.engine.drafts.replay import MOST_REPLAYED, replay
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig, Request
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.speculation.bandit import MeasuredDrafts
from tests.engine.hash_runner import HashRunner, PlainTokenizer
from tests.engine.speculation.machines import DEMO, OTHER_DEMOS, Machine
from tests.engine.speculation.simulation import DRAFTED_HOST_S, PLAIN_HOST_S, REPLAY_HOST_S, STEP_TOKENS

MODEL, MOST, EOS = "demo:target-awq", 6, 2
RECORDED = {"reports": 384, "extractive": 128}  # rows of each text
JOBS = (  # text, sequences at once, rows of a job, jobs
    ("reports", 1, 16, 6),
    ("reports", 8, 32, 5),
    ("reports", 32, 64, 4),
    ("reports", 64, 128, 3),
    ("reports", 128, 256, 1),
    ("reports", 64, 384, 1),
    ("extractive", 8, 32, 3),
    ("extractive", 32, 64, 2),
    ("extractive", 64, 128, 1),
)


def record(text: str, num_rows: int) -> list[tuple[Request, list[int]]]:
    """Rows and their completions."""
    with Engine(EngineConfig(str(locate_model(MODEL)), max_num_seqs=64, num_threads=1)) as engine:
        requests = _rows(engine, text, 1, num_rows)
        done = {each.row_id: each.token_ids for each in engine.stream(requests)}
        return [(request, done[request.row_id]) for request in requests]


class RecordedRunner(HashRunner):
    """The next token of a sequence is the one in the record, whatever comes before it."""

    vocab_size = hidden_size = 1024

    def __init__(self, rows: list[tuple[Request, list[int]]], machine: Machine) -> None:
        self.tokens = {request.row_id: token_ids for request, token_ids in rows}
        self.machine, self.now_s = machine, 0.0
        self.engine: Engine | None = None

    def execute(self, step: StepInput, future: object = None) -> torch.Tensor:
        assert self.engine is not None
        plan, table = self.engine.loop.computing, self.engine.table
        assert plan is not None
        slot_S = plan.sampling_slot_S
        draft_S = np.zeros_like(slot_S) if plan.draft_S is None else plan.draft_S[plan.samples_S]
        num, drafts = len(slot_S), int(draft_S.sum())
        if num:
            self.now_s += self.machine.step_s(num + drafts, num, int(table.num_known[slot_S].sum()), drafts > 0)
        self.now_s += self.machine.prefill_s * (plan.num_tokens - num - drafts)
        next_ids: list[int] = []
        for slot, count in zip(slot_S.tolist(), (draft_S + 1).tolist()):
            begin = int(table.num_known[slot] - table.num_prompt[slot])
            token_ids = self.tokens[table.at(slot).request.row_id][begin : begin + count]
            next_ids += token_ids + [EOS] * (count - len(token_ids))
        logits_RV = torch.zeros(len(next_ids), self.vocab_size)
        logits_RV[torch.arange(len(next_ids)), torch.tensor(next_ids, dtype=torch.int64)] = 1.0
        return logits_RV


class RecordedTokenizer(PlainTokenizer):
    eos_token_ids = frozenset({EOS})
    vocab_size = RecordedRunner.vocab_size


def job_s(rows: list[tuple[Request, list[int]]], batch: int, way: str, machine: Machine = DEMO) -> float:
    """Seconds of a job of these rows. way: "plain", "forced", or "auto"."""
    runner = RecordedRunner(rows, machine)
    sizes = {"max_model_len": 1024, "max_num_seqs": batch, "max_num_batched_tokens": STEP_TOKENS}
    engine = Engine.from_parts(runner, RecordedTokenizer(), num_blocks=64 * batch, block_size=16, **sizes)
    runner.engine = engine
    lookup = NgramProposer(engine.table, MOST, compiled=select_lookup())
    offer_at = lookup.offer_at

    def timed_offer_at(slot_S: np.ndarray, known_S: np.ndarray) -> Offer:
        runner.now_s += machine.lookup_s(len(slot_S))
        return offer_at(slot_S, known_S)

    lookup.offer_at = timed_offer_at  # type: ignore[method-assign]

    def timed_replay() -> tuple[np.ndarray, np.ndarray]:
        runner.now_s += REPLAY_HOST_S
        return replay(lookup, engine.table, np.sort(engine.scheduler.running)[:MOST_REPLAYED])

    if way != "plain":
        policy = FixedDrafts(MOST)
        if way == "auto":
            policy = MeasuredDrafts([timed_replay], MOST, clock=lambda: round(1e9 * runner.now_s))
            observe = policy.observe

            def timed_observe(outcome: StepOutcome) -> None:
                runner.now_s += PLAIN_HOST_S if outcome.verdict is None else DRAFTED_HOST_S
                observe(outcome)

            policy.observe = timed_observe  # type: ignore[method-assign]
        engine.draft_as(Drafting([lookup], policy, engine.scheduler))
    for completion in engine.stream([request for request, _ in rows]):
        assert completion.token_ids == runner.tokens[completion.row_id], "drafts changed tokens"
    engine.close()
    return runner.now_s


def main() -> None:
    shares, losses = [], []
    recorded = {text: record(text, num_rows) for text, num_rows in RECORDED.items()}
    print("how many times as fast as plain: forced lookup, auto; then auto by the better of plain and forced")
    for text, batch, num_rows, jobs in JOBS:
        line = []
        for machine in (DEMO, *OTHER_DEMOS):
            parts = [recorded[text][n * num_rows : (n + 1) * num_rows] for n in range(jobs)]
            times = [[job_s(rows, batch, way, machine) for way in ("plain", "forced", "auto")] for rows in parts]
            losses += [auto_s / plain_s - 1.0 for plain_s, _, auto_s in times]
            shares.append(np.mean([min(each[:2]) / each[2] for each in times]))
            plain, forced, auto = np.sum(times, axis=0)
            line.append(f"{plain / forced:.2f} {plain / auto:.2f} {shares[-1]:6.1%}")
        print(f"{text:>10}, {batch:>3} at once, {jobs} jobs of {num_rows:>3} rows: {' | '.join(line)}", flush=True)
    print(f"mean {np.mean(shares):.2%}; the worst against plain {max(losses):+.1%}")


if __name__ == "__main__":
    main()
