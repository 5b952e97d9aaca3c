"""Result of a check, and the setup that checks inspect."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.checkpoints.locate import NO_CHECKPOINT
from pipeline.config import JobConfig
from pipeline.engine.config import EngineConfig
from pipeline.formatting import printable

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """Result of one check. todo: how to fix it; empty if ok. exit_code: used if the check failed."""

    group: str
    name: str
    state: State
    found: str
    todo: str = ""
    exit_code: int = 3

    def to_json(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if key != "exit_code"}

    def to_text(self) -> str:
        line = f"  {self.state:<8} {self.name:<20} {printable(self.found)}"
        return f"{line}\n{'':<11}-> {printable(self.todo)}" if self.todo else line


@dataclass(frozen=True)
class Setup:
    """Model, input and output to check, where known. Storage options may be secret and are never shown. engine: options
    of the job; its own paths are not used."""

    model: str | None = None
    input: str | None = None
    output: str | None = None
    storage: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)  # by url prefix
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(""))
    job: JobConfig | None = field(default=None, repr=False)

    @classmethod
    def of_job(cls, job: JobConfig) -> "Setup":
        model = None if job.model.path == NO_CHECKPOINT else job.model.path
        engine = job.engine_config(job.model.path, job.speculation.model)
        return cls(model, job.input.path, job.output.path, job.storage_options, engine, job)

    @property
    def torch_device(self) -> "torch.device":
        """Return the engine's device. Falls back to the CPU if torch sees no GPU, which `devices` reports."""
        import torch

        from pipeline.machine.device import find_device

        return find_device(self.engine.device if torch.cuda.is_available() else "cpu")

    def replacing(self, model: str | None, input: str | None, output: str | None) -> "Setup":
        """Return a copy with the arguments that are not None. Keeps the storage options."""
        given = {"model": model, "input": input, "output": output}
        return replace(self, **{name: path for name, path in given.items() if path is not None})
