"""Messages between an engine's process and its supervisor: pickled frozen dataclasses over a socket pair.

Times are microseconds of the machine's monotonic clock, which both processes share.
"""

from dataclasses import dataclass, field

from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.engine.request import Request

# To the engine's process


@dataclass(frozen=True)
class Start:
    """First message: the engine to build. `factory` is `module:callable`, called with `config` and a progress function.
    reference: the model to compare some rows with, if any."""

    factory: str
    config: EngineConfig | EndpointConfig
    reference: ReferenceConfig | None = None


@dataclass(frozen=True)
class Add:
    requests: tuple[Request | EndpointRequest, ...]


@dataclass(frozen=True)
class Grant:
    """Cost in US dollars up to which the process may send requests to a server, from its start on."""

    usd: float


@dataclass(frozen=True)
class Drain:
    """Begin no further rows. The process answers with Drained once none is open."""


@dataclass(frozen=True)
class Stop:
    """Give up all rows, report the last counters, and exit."""


# From the engine's process


@dataclass(frozen=True)
class Loading:
    """The engine is being built. `activity` is its current one. First sent after the imports, when the checkpoint is
    about to be read."""

    now_us: int
    activity: str


@dataclass(frozen=True)
class Ready:
    now_us: int
    resolved: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class StartFailed:
    """The engine could not be built. `kind` names a class of `pipeline.errors`, or is empty for any other exception,
    with the traceback in `message`."""

    kind: str
    message: str


@dataclass(frozen=True)
class Finished:
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Drained:
    """No row is open after Drain."""


@dataclass(frozen=True)
class Failed:
    """The engine failed in a way that a restart does not heal. `kind` names a class of `pipeline.errors`. All finished
    rows have been sent; the process ends right after."""

    kind: str
    message: str


@dataclass(frozen=True)
class Worked:
    """Sums since `Ready`. busy_us: time with requests in the engine; the rest was idle. idle_us: idle time up to now
    since the last step. `stats`: the engine's counters. waits_for: why it cannot work now; empty if it can."""

    now_us: int
    busy_us: int
    idle_us: int
    stats: dict[str, int]
    waits_for: str = ""


@dataclass(frozen=True)
class Crashed:
    """A step raised an exception; the process ends right after."""

    message: str
    out_of_memory: bool = False


ToEngine = Start | Add | Grant | Drain | Stop
FromEngine = Loading | Ready | StartFailed | Finished | Drained | Failed | Worked | Crashed
