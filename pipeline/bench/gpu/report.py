"""What the GPU benchmark found, for people and as JSON, at any moment of a run."""

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.bench.gpu.aims import Aim, aims_of, aims_to_text
from pipeline.bench.gpu.figures import Failure, ModelFigures
from pipeline.bench.gpu.kernels.checks import Correctness
from pipeline.bench.measure import facts_to_text


@dataclass(frozen=True)
class GpuBench:
    """sections, settings and requests: what was asked for. on_card: not on a processor, where times mean nothing.
    complete: whether the run came to its end. command: what was typed."""

    date: str
    machine: dict[str, str]
    sections: tuple[str, ...]
    settings: dict[str, str]
    requests: tuple[str, ...]
    on_card: bool
    correctness: Correctness | None = None
    models: tuple[ModelFigures, ...] = ()
    failures: tuple[Failure, ...] = ()
    complete: bool = False
    command: str = ""

    @property
    def failed(self) -> bool:
        """Whether a check or a section failed."""
        return bool(self.failures) or bool(self.correctness is not None and self.correctness.failed)

    @property
    def aims(self) -> list[tuple[ModelFigures, list[Aim]]]:
        """Of each model; a missed aim is no failure."""
        return [(model, aims_of(model, self.sections, self.failures)) for model in self.models]

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            "bench": "gpu",
            "correctness": None if self.correctness is None else self.correctness.to_json(),
            "models": [model.to_json() for model in self.models],
            "failures": [asdict(failure) for failure in self.failures],
            "aims": [{"model": model.name} | asdict(aim) for model, aims in self.aims for aim in aims],
        }

    def to_text(self) -> str:
        parts = [
            f"{self.date}. {facts_to_text(self.machine)}\nsections: {', '.join(self.sections)}; "
            + "; ".join(f"{key}: {value}" for key, value in self.settings.items()),
            "\n".join(self.requests),
        ]
        if self.correctness is not None:
            parts.append(self.correctness.to_text())
        parts += [model.to_text() for model in self.models]
        parts += [f"FAILED {each.section}, {each.model}: {each.why}" for each in self.failures]
        if self.models:
            parts.append(aims_to_text([(model.model, aims) for model, aims in self.aims], self.on_card))
        return "\n\n".join(parts)
