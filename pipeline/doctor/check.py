"""What a check says, and what there is to be looked at."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import JobConfig
from pipeline.formatting import printable

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One thing looked at. `todo` is empty where it is well; `exit_code` counts where it failed."""

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
    """What is to be run, as far as it is known. Storage options may be secret and are never shown."""

    model: str | None = None
    input: str | None = None
    output: str | None = None
    storage: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)  # by url prefix
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    job: JobConfig | None = field(default=None, repr=False)

    @classmethod
    def of_job(cls, job: JobConfig) -> "Setup":
        paths = (job.model.path, job.input.path, job.output.path)
        return cls(*paths, job.storage, job.engine.device, job.engine.dtype, job.engine.kv_cache_dtype, job)

    @property
    def torch_device(self) -> "torch.device":
        """The device that an engine would take; the CPU where torch sees no GPU, which a check of its own reports."""
        import torch

        from pipeline.machine.device import find_device

        return find_device(self.device if torch.cuda.is_available() else "cpu")

    @property
    def activation_dtype(self) -> str:
        return "auto" if self.job is None else self.job.engine.activation_dtype

    @property
    def quantization(self) -> str:
        """What is made of the model's linears while it is loaded."""
        return "none" if self.job is None else self.job.model.quantization

    def replacing(self, model: str | None, input: str | None, output: str | None) -> "Setup":
        """With what is given in the place of the job's; the storage options stay."""
        given = {"model": model, "input": input, "output": output}
        return replace(self, **{name: path for name, path in given.items() if path is not None})
