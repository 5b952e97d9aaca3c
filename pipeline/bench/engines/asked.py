"""The requests that all contenders of `pipeline bench engine` get, round by round."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.bench.engines.lineup import TRIAL
from pipeline.bench.request_sets import BenchRequest, Reports, workload
from pipeline.tokenization.tokenizer import Tokenizer

SINGLE_TOKENS = 64
WARM_REQUESTS = 16  # of the round before the counted ones, where it has no batch size to choose
WARM_UP = [BenchRequest([16] * 8, 4), BenchRequest([17] * 5, 3)]


@dataclass(frozen=True)
class Asked:
    """What all contenders are asked for. `round` makes a round's requests by its name, `one` a single request of a
    number of tokens."""

    work: str  # in words
    round: Callable[[str], list[BenchRequest]]
    one: Callable[[str, int], BenchRequest]

    @classmethod
    def reports(cls, folder: Path, requests: int) -> "Asked":
        """The rows of the demonstration job."""
        rows = Reports(requests, Tokenizer.from_folder(str(folder)).encode_batch)
        return cls(rows.to_text(), rows.round, rows.one)

    @classmethod
    def random(cls, requests: int, prompt_tokens: int, output_tokens: tuple[int, int], vocab_size: int) -> "Asked":
        """Prompts of random tokens."""
        made = workload(requests, prompt_tokens, output_tokens)
        new_round, new_one = partial(made.round, vocab_size=vocab_size), partial(made.one, vocab_size=vocab_size)
        return cls(f"{made.to_text()}; greedy, EOS ignored", new_round, new_one)

    def sets(self, rounds: int, chooses: bool) -> dict[str, list[BenchRequest]]:
        """The requests of every round by name. chooses: whether the trial has a batch size to choose, which takes all
        requests."""
        trial = self.round(str(TRIAL))
        if not chooses:
            trial = trial[:WARM_REQUESTS]
        single = min(SINGLE_TOKENS, max(request.max_tokens for request in trial))
        sets = {"warm-up": WARM_UP, f"set {TRIAL}": trial}
        for number in range(1, rounds + 1):
            sets[f"set {number}"] = self.round(str(number))
            sets[f"one {number}"] = [self.one(str(number), single)]
        return sets
