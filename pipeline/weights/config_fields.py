"""Fields of a checkpoint's JSON with checks of types and ranges, because a checkpoint is untrusted."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError

MAX_PATTERNS = 4096  # in a list of modules: each is tried on each linear
MAX_PATTERN_CHARS = 512
MAX_REPEATS = 4  # in a pattern: with more of them, or with repeated groups, a search can take hours
REPEAT = re.compile(r"[*+{]")
REPEATED_GROUP = re.compile(r"\)[*+{]")


class Fields:
    """Values of a JSON object, read by name. Errors name file and key. `where`: path of an object inside the file."""

    def __init__(self, values: dict[str, Any], path: Path, key_path: str = "") -> None:
        self.values, self.path, self.key_path = values, path, key_path

    def _key(self, name: str) -> str:
        return f"{self.key_path}.{name}" if self.key_path else name

    def refuse(self, name: str, expected: str) -> ModelError:
        return ModelError(f"{self.path}: {self._key(name)} = {self.values.get(name)!r:.200}: expected {expected}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
            raise self.refuse(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def one_of(self, name: str, supported: Collection[object], default: object = None) -> Any:
        """Return a value that equals one of `supported` and has its type: true is not 1."""
        value = self.values.get(name)
        value = default if value is None else value
        if not any(type(value) is type(each) and value == each for each in supported):
            raise self.refuse(name, f"one of {', '.join(map(str, supported))}")
        return value

    def group_size(self, name: str = "group_size") -> int | None:
        """Return a multiple of 8 inputs; None for -1, which is one group of all inputs."""
        value = self.values.get(name)
        if type(value) is not int or not (value == -1 or (0 < value <= 1 << 17 and value % 8 == 0)):
            raise self.refuse(name, "a multiple of 8, or -1 for one group of all inputs")
        return None if value == -1 else value

    def section(self, name: str) -> "Fields":
        """Return an object inside this one; empty if it is null or absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value or {}, self.path, self._key(name))

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of module names; empty if it is null or absent."""
        value = self.values.get(name) or []
        if (
            not isinstance(value, list)
            or len(value) > MAX_PATTERNS
            or not all(isinstance(each, str) and len(each) <= MAX_PATTERN_CHARS for each in value)
        ):
            raise self.refuse(name, "a list of names")
        return tuple(value)

    def pattern(self, name: str, text: str) -> re.Pattern[str]:
        """Compile a regular expression found under `name`. Raises ModelError if it is invalid or may be slow."""
        if len(REPEAT.findall(text)) > MAX_REPEATS or REPEATED_GROUP.search(text):
            raise ModelError(
                f"{self.path}: {self._key(name)}: {text!r:.200}: expected a pattern with at most {MAX_REPEATS} "
                "repetitions and no repeated group"
            )
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{self.path}: {self._key(name)}: {text!r:.200}: invalid pattern ({error})") from None
