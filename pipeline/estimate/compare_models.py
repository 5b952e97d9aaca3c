"""Compare models on the first rows of a dataset, before one of them computes all: tokens, hours, dollars, and how often
they agree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import JobConfig
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import result_names
from pipeline.estimate.job_estimate import JobEstimate, estimate_job
from pipeline.estimate.measured import PoolEstimate
from pipeline.estimate.server_estimate import ServerEstimate
from pipeline.formatting import duration, money, percent, table
from pipeline.job.running.run import run_job
from pipeline.stores.filesystem import storage_for

_ANSWERS = ("label", "generated_text")  # the first of them that the output has
_POSITION = ("source_file", "source_row")


@dataclass(frozen=True)
class ModelOnRows:
    """A model on the compared rows, and its estimate for the whole dataset.

    agreement: share of the rows that both models completed with the same answer as the first model; None for the first
    model, and for tasks whose results are numbers.
    """

    model: str
    rows: int
    errors: int
    agreement: float | None
    estimate: JobEstimate | ServerEstimate

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "estimate": self.estimate.to_json()}

    @property
    def here(self) -> PoolEstimate | None:
        return self.estimate.here[0] if self.estimate.here else None

    @property
    def cheapest(self) -> PoolEstimate | None:
        """Return the card that computes the dataset for the least money, by the cost model; None for a server."""
        cards = self.estimate.cards if isinstance(self.estimate, JobEstimate) else ()
        fitting = [card for card in cards if not card.lacks and card.usd is not None]
        return min(fitting, key=lambda card: card.usd.expected if card.usd else 0.0, default=None)


def compare_models(
    jobs: Mapping[str, tuple[JobConfig, JobConfig]], log: Callable[[str], None], **options: Any
) -> tuple[ModelOnRows, ...]:
    """Compute some rows with each model and compare the answers.

    jobs: by model, the job of the compared rows, in an output of its own, and that of the whole dataset. options: of
    `estimate_job`. Raises what running and planning a job raise.
    """
    found: list[ModelOnRows] = []
    first: dict[tuple[str, int], Any] = {}
    for model, (compared, whole) in jobs.items():
        log(f"{model}: computing {compared.input.limit:,} rows")
        run_job(compared)
        answers, rows, errors = _answers(compared)
        both = answers.keys() & first.keys()
        agreement = sum(answers[row] == first[row] for row in both) / len(both) if both else None
        first = first or answers
        estimate = estimate_job(whole, log=log, **options)
        found.append(ModelOnRows(model, rows, errors, agreement, estimate))
    return tuple(found)


def _answers(job: JobConfig) -> tuple[dict[tuple[str, int], Any], int, int]:
    """Return the answer of each completed row by its position, and the numbers of rows and error rows."""
    store = PartStore(job.output.path, storage_for(job.output.path, job.storage_options))
    found: dict[tuple[str, int], Any] = {}
    rows = errors = 0
    for part in store.tables(lambda schema: schema.names):
        names = result_names(part.schema)
        answer = next((names[name] for name in _ANSWERS if name in names), None)
        for row in part.to_pylist():
            rows += 1
            if row[names["error"]] is not None:
                errors += 1
            elif answer is not None:
                text = row[answer]
                position = tuple(row[names[name]] for name in _POSITION)
                found[position] = text.strip() if isinstance(text, str) else text  # type: ignore[index]
    return found, rows, errors


def text(found: tuple[ModelOnRows, ...], width: int | None = None) -> str:
    """Return a table of the models for a terminal."""
    head = ["model", "errors", "tokens in", "out", "here", "USD here", "cheapest card", "time", "USD", "same answers"]
    lines = []
    for each in found:
        estimate, here, card = each.estimate, each.here, each.cheapest
        prompts, out = estimate.prompts, estimate.generated if isinstance(estimate, JobEstimate) else None
        if isinstance(estimate, ServerEstimate) and estimate.estimate is not None:
            out = estimate.estimate.generated_tokens
        lines.append(
            [
                Path(each.model).name if Path(each.model).exists() else each.model,
                f"{each.errors:,}",
                "" if prompts is None else f"{prompts.expected:,.0f}",
                "" if out is None else f"{out.expected:,.0f}",
                "complete" if not estimate.rows_left else "" if here is None else duration(here.wall_us.expected / 1e6),
                "" if here is None or here.usd is None else money(here.usd.expected),
                "" if card is None else f"{card.actors} x {card.machine}",
                "" if card is None else duration(card.wall_us.expected / 1e6),
                "" if card is None or card.usd is None else money(card.usd.expected),
                "" if each.agreement is None else percent(each.agreement),
            ]
        )
    rows = f"errors and same answers (as the first model) on the first {found[0].rows:,} rows; the rest for all rows"
    return f"{table(lines, head=head, sides='<>', width=width)}\n\n  {rows[0].upper()}{rows[1:]}."
