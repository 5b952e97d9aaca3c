"""A session as it is asked for, by `pipeline bench gpu` or by this package's own command line."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.bench.engines.peer import parse_peer
from pipeline.bench.gpu.peers import MODES
from pipeline.bench.gpu.results.report import SessionReport
from pipeline.bench.gpu.session.plan import MODELS, SMOKE_MODELS, follow_up_plan, installed_peers, main_plan, only
from pipeline.bench.gpu.session.run import run_session
from pipeline.bench.gpu.task import Setting
from pipeline.errors import ConfigError

_BUDGET = re.compile(r"(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)\s*s?)?")


@dataclass(frozen=True)
class SessionRequest:
    """models: empty for MODELS. sections: empty for all. peers: as `--peer`. folder: of checkpoints. work: None for a
    folder in the temporary one, which a session after this one finds."""

    budget_s: float
    output: str
    models: tuple[str, ...] = ()
    device: str = "cuda"
    dtype: str = "auto"
    sections: tuple[str, ...] = ()
    is_follow_up: bool = False
    caches: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    folder: str | None = None
    work: str | None = None
    is_smoke: bool = False
    command: str = ""

    def run(self, say: Callable[[str], None]) -> SessionReport:
        """Raises ConfigError for what makes no sense, OutputError where the results cannot be written."""
        work = Path(self.work) if self.work else Path(tempfile.gettempdir()) / "pipeline-bench-gpu"
        output = Path(self.output).expanduser()
        if work.resolve().is_relative_to(output.resolve()):
            raise ConfigError(f"--work {work}: lies in --output {output}, where only archives are to be")
        peers = [parse_peer(peer) for peer in self.peers] or installed_peers()
        if unknown := [name for name, _ in peers if name not in MODES]:
            raise ConfigError(f"--peer {unknown[0]}: expected one of {', '.join(MODES)} here")
        models = self.models or (SMOKE_MODELS if self.is_smoke else MODELS)
        stages = follow_up_plan(models, self.is_smoke) if self.is_follow_up else main_plan(models, peers, self.is_smoke)
        setting = Setting(str(work.resolve()), self.device, self.dtype, self.folder, self.is_smoke)
        return run_session(
            only(stages, self.sections) if self.sections else stages,
            setting,
            output,
            self.budget_s,
            caches=[Path(path).expanduser() for path in self.caches],
            goes_on=self.is_follow_up,
            command=self.command,
            say=say,
        )


def parse_budget(text: str) -> float:
    """Seconds of `600`, `10m`, `9m40s` or `90s`. Raises ConfigError."""
    match = _BUDGET.fullmatch(text.strip())
    seconds = 60.0 * float(match[1] or 0) + float(match[2] or 0) if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"--budget {text}: expected a time, such as 10m, 9m40s or 580 (seconds)")
    return seconds
