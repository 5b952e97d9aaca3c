"""What a process of the GPU session is told, its section and where everything lies, and what became of it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Options = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all sections of a session share. work: the folder of results, logs and traces. models: where checkpoints of
    shapes are written; None: the cache. is_smoke: on a processor, with tiny shapes, to see that everything runs."""

    work: str
    device: str = "cuda"
    dtype: str = "auto"
    models: str | None = None
    is_smoke: bool = False

    @property
    def results(self) -> Path:
        return Path(self.work) / "results"

    @property
    def traces(self) -> Path:
        return Path(self.work) / "traces"


@dataclass(frozen=True)
class Task:
    """One process. name: of its files, once in a session. section: the module of `sections` that it runs, with
    `options`. limit_s: after which it is ended."""

    name: str
    section: str
    limit_s: float
    options: Options = field(default_factory=dict)

    def command_line(self, setting: Setting) -> str:
        """As one argument."""
        return json.dumps({"task": asdict(self), "setting": asdict(setting)})

    @classmethod
    def from_command_line(cls, text: str) -> tuple["Task", Setting]:
        told = json.loads(text)
        return cls(**told["task"]), Setting(**told["setting"])


Verdict = Literal["done", "failed", "ended", "not started"]


@dataclass(frozen=True)
class Outcome:
    """What became of a task. began_s: after the session's beginning. why: of all but `done`."""

    name: str
    verdict: Verdict
    began_s: float
    seconds: float
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
