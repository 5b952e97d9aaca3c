"""What an engine's process and its supervisor tell each other: pickled frozen dataclasses over one socket
pair.

Times are microseconds of the machine's monotonic clock, which both processes share.
"""

from dataclasses import dataclass, field

from pipeline.engine.params import Completion, EngineConfig, Request
from pipeline.engine.quality.reference_config import ReferenceConfig

# To the engine's process


@dataclass(frozen=True)
class Start:
    """First message: the engine to build. `factory` is `module:callable`, called with `config` and with a function
    that it tells what it does while it loads. reference: the model that some rows are compared with, if any."""

    factory: str
    config: EngineConfig
    reference: ReferenceConfig | None = None


@dataclass(frozen=True)
class Add:
    requests: tuple[Request, ...]


# From the engine's process


@dataclass(frozen=True)
class Loading:
    """The engine is being built, and what it does from now on. Sent first when imports are done and the checkpoint
    is about to be read."""

    now_us: int
    what: str


@dataclass(frozen=True)
class Ready:
    now_us: int
    resolved: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class StartFailed:
    """The engine could not be built. `kind` names a class of `pipeline.errors`, or is empty for any other
    exception, whose traceback is then in `message`."""

    kind: str
    message: str


@dataclass(frozen=True)
class Finished:
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Worked:
    """Sums since `Ready`: time with requests in the engine, the rest of the time was idle; the last `idle_us`
    of it in one stretch up to now. `stats` are the engine's counters."""

    now_us: int
    busy_us: int
    idle_us: int
    stats: dict[str, int]


@dataclass(frozen=True)
class Crashed:
    """A step raised; the process ends right after."""

    message: str
    out_of_memory: bool = False


ToEngine = Start | Add
FromEngine = Loading | Ready | StartFailed | Finished | Worked | Crashed
