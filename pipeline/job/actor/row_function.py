"""Function of the user that makes the requests of each row, passed to `run_job` with a version and its columns."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.engine.completion import Completion
from pipeline.errors import ConfigError

Generate = Callable[..., Coroutine[Any, Any, Completion]]  # makes a request of the row
RowFn = Callable[[dict[str, Any], Generate], Awaitable[Mapping[str, Any] | None]]


class RequestFailed(Exception):
    """Failure of one request, raised where a row function awaits it. completion: with `error` and `error_message`."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(f"{completion.error}: {completion.error_message}")
        self.completion = completion


@dataclass(frozen=True)
class RowFunction:
    """Row function of a job. version: identifies its code. columns: of the values that it returns."""

    function: RowFn
    version: str
    columns: tuple[pa.Field, ...] = ()

    @classmethod
    def from_arguments(cls, function: object, version: object, columns: object) -> "RowFunction | None":
        """Return the row function that arguments of `run_job` describe; None without one. Raises ConfigError."""
        if function is None and version is None and columns is None:
            return None
        if not callable(function) or not inspect.iscoroutinefunction(function):
            raise ConfigError(f"row_fn {function!r:.80}: expected a function: async def f(row, generate)")
        if not isinstance(version, str) or not version:
            reason = "expected a text, such as '1', for the code of row_fn. Change it whenever the results change"
            raise ConfigError(f"version {version!r:.80}: {reason}")
        try:
            fields = tuple(pa.field(*pair) for pair in dict(columns or {}).items())  # type: ignore[call-overload]
        except (TypeError, ValueError) as error:
            reason = "expected names with types of pyarrow, such as {'ok': pa.bool_()}"
            raise ConfigError(f"columns {columns!r:.80}: {reason} ({error})") from None
        return cls(function, version, fields)

    def to_identity(self) -> dict[str, Any]:
        """Return what identifies the function in the job's identity."""
        return {"version": self.version, "columns": {field.name: str(field.type) for field in self.columns}}
