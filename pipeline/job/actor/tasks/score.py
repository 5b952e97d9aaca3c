"""Task score: how likely a text is, after the prompt or by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.data.output.result_columns import LOGPROBS_FIELD
from pipeline.engine.params import Completion
from pipeline.engine.tasks import Score, ScoreResult, Task
from pipeline.errors import RowError
from pipeline.job.actor.tasks.job_task import Ask, RowRefused
from pipeline.job.actor.tasks.task_results import plain_logprobs
from pipeline.tokenization.labels import Encodes


@dataclass(frozen=True)
class ScoreTask:
    """of_completion: the row's completion is scored, after its prompt; else the prompt, from its second token on. top:
    as `Score` has it."""

    of_completion: bool
    top: int | None = None

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        sums = (
            pa.field("logprob", pa.float64()),
            pa.field("num_scored_tokens", pa.int32()),
            pa.field("perplexity", pa.float64()),
        )
        return sums if self.top is None else (*sums, pa.field("token_logprobs", LOGPROBS_FIELD.type))

    def asker(self, tokenizer: Encodes) -> Ask:
        def ask(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            if not self.of_completion:
                if len(prompt) < 2:
                    why = f"the text has {len(prompt)} tokens; a text is scored from its second token on"
                    raise RowRefused(RowError.EMPTY_PROMPT, why)
                return prompt, Score(1, self.top)
            completion = tokenizer.continuation(prompt, own or "")
            if not completion:
                raise RowRefused(RowError.INVALID_COMPLETION, "task.completion: it has no tokens")
            if not prompt:
                raise RowRefused(RowError.EMPTY_PROMPT, "the prompt has no tokens")
            return [*prompt, *completion], Score(len(prompt), self.top)

        return ask

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        found = [c.result if isinstance(c.result, ScoreResult) else None for c in done]
        sums = [
            [result and result.logprob for result in found],
            [result and result.num_tokens for result in found],
            [result and result.perplexity for result in found],
        ]
        return sums if self.top is None else [*sums, [plain_logprobs(result and result.tokens) for result in found]]
