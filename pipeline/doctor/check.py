"""Result of a check, and the setup that checks inspect."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.checkpoints.locate import NO_CHECKPOINT
from pipeline.config import JobConfig
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
    """Model, input and output to check, where known. Storage options may be secret and are never shown."""

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
        model = None if job.model.path == NO_CHECKPOINT else job.model.path
        paths = (model, job.input.path, job.output.path)
        return cls(*paths, job.storage_options, job.engine.device, job.engine.dtype, job.engine.kv_cache_dtype, job)

    @property
    def torch_device(self) -> "torch.device":
        """Return the engine's device. Falls back to the CPU if torch sees no GPU, which `devices` reports."""
        import torch

        from pipeline.machine.device import find_device

        return find_device(self.device if torch.cuda.is_available() else "cpu")

    @property
    def activation_dtype(self) -> str:
        return "auto" if self.job is None else self.job.engine.activation_dtype

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.job is None else self.job.engine.tensor_parallel_size

    @property
    def cpu_offload_gb(self) -> float:
        return 0.0 if self.job is None else self.job.engine.cpu_offload_gb

    @property
    def quantization(self) -> str:
        """Return the job's quantization of the model's linears on load."""
        return "none" if self.job is None else self.job.model.quantization

    def replacing(self, model: str | None, input: str | None, output: str | None) -> "Setup":
        """Return a copy with the arguments that are not None. Keeps the storage options."""
        given = {"model": model, "input": input, "output": output}
        return replace(self, **{name: path for name, path in given.items() if path is not None})
