"""What a session found, for people and as JSON, at any moment of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.bench.gpu.kernels.checks import Check, Correctness
from pipeline.bench.gpu.result import Found
from pipeline.bench.gpu.results.aims import aims_of, aims_to_text
from pipeline.bench.gpu.results.figures import Failure, ModelFigures, model_figures
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.gpu.shares import shares_to_text
from pipeline.bench.gpu.subject import MACHINE
from pipeline.bench.gpu.task import Outcome, Task
from pipeline.bench.measure import facts_to_text, table
from pipeline.roofline.cards import card_of_device


@dataclass(frozen=True)
class SessionReport:
    """outcomes: what became of each task, in their order. on_card: not on a processor, where times mean nothing.
    left_out: files that the archives had no room for. complete: whether the session came to its end."""

    date: str
    command: str
    budget_s: float
    on_card: bool
    tasks: tuple[Task, ...]
    outcomes: tuple[Outcome, ...]
    results: Mapping[str, Found]
    left_out: tuple[str, ...] = ()
    complete: bool = False

    @property
    def failed(self) -> bool:
        """Whether a check or a section failed. One that the budget had no time for did not."""
        ended = any(outcome.verdict in ("failed", "ended") for outcome in self.outcomes)
        return ended or any(found.failures for found in self._own) or bool(self.correctness.failed)

    @property
    def correctness(self) -> Correctness:
        """All checks of all shards."""
        told = [check for found in self._own for check in found.figures.get("checks", ())]
        return Correctness(rows_of(Check, told))

    @property
    def _own(self) -> list[Found]:
        """Results of this session's tasks: there may be some of the session before."""
        return [self.results[task.name] for task in self.tasks if task.name in self.results]

    @property
    def models(self) -> list[ModelFigures]:
        names = dict.fromkeys(found.figures.get("model") for found in self.results.values())
        found = [model_figures(self.results, name) for name in names if name is not None]
        return [each for each in found if each is not None]

    @property
    def failures(self) -> list[Failure]:
        """By section and model, for the aims."""
        tasks = {task.name: task for task in self.tasks}
        wrong = {each.name: each.why for each in self.outcomes if each.verdict in ("failed", "ended")}
        wrong |= {name: found.failures[0] for name, found in self.results.items() if found.failures}
        return [
            Failure(_section(tasks[name]), str(tasks[name].options.get("model", "")), why)
            for name, why in wrong.items()
            if name in tasks
        ]

    @property
    def aims(self) -> list[tuple[str, list[Any]]]:
        """Of each model; a missed aim is no failure."""
        run = {outcome.name for outcome in self.outcomes if outcome.verdict != "not started"}

        def sections(model: str) -> list[str]:
            return [_section(task) for task in self.tasks if task.name in run and task.options.get("model") == model]

        return [(model.name, aims_of(model, sections(model.name), self.failures)) for model in self.models]

    def to_json(self) -> dict[str, Any]:
        machine = self.results[MACHINE].figures.get("machine", {}) if MACHINE in self.results else {}
        return {
            "bench": "gpu",
            "date": self.date,
            "command": self.command,
            "budget_s": self.budget_s,
            "on_card": self.on_card,
            "complete": self.complete,
            "machine": machine,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "correctness": {"checks": len(self.correctness.checks), "failed": _told(self.correctness.failed)},
            "models": [model.to_json() for model in self.models],
            "failures": [asdict(each) for each in self.failures],
            "aims": [{"model": model} | asdict(aim) for model, aims in self.aims for aim in aims],
            "left_out": self.left_out,
        }

    def to_text(self) -> str:
        machine = self.results[MACHINE].figures.get("machine", {}) if MACHINE in self.results else {}
        parts = [f"{self.date}. {facts_to_text(machine)}", "\n".join(self._outcome_lines())]
        if self.correctness.checks:
            parts.append(self.correctness.to_text())
        for task in self.tasks:
            found = self.results.get(task.name)
            if found is not None and found.text:
                parts.append(f"=== {task.name}\n{found.text}")
        parts += [f"FAILED {found.task.name}, {why}" for found in self._own for why in found.failures]
        card = card_of_device(machine.get("card", ""))
        if card is not None:
            parts += [shares_to_text(m.name, m.reached, m.rates, card) for m in self.models if m.has_kernels]
        if self.models:
            parts.append(aims_to_text(self.aims, self.on_card))
        if self.left_out:
            parts.append(f"No room in the archives for {len(self.left_out)} files: {', '.join(self.left_out[:10])}")
        return "\n\n".join(parts)

    def _outcome_lines(self) -> list[str]:
        state = "to its end" if self.complete else "as far as it has come"
        rows = [(each.began_s, each.seconds, each.verdict, each.name, each.why) for each in self.outcomes]
        columns = "at s >6.0f | took s >7.1f | what became <12 | section <34 | why <1"
        return [f"Session with {self.budget_s:.0f} s, {state}:", *table(columns, rows)]


def _section(task: Task) -> str:
    """As `aims` calls it."""
    return str(task.options.get("what", task.section))


def _told(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) for check in checks]
