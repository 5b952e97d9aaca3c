"""What a section found, in a file that is replaced whenever there is more: a process that is killed loses little."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bench.gpu.task import Setting, Task


class Result:
    """Of one task. figures: what others compute with; text: the same for people; failures: what ended before it was
    done, each with its reason."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.task, self.setting = task, setting
        self.figures: dict[str, Any] = {}
        self.text, self.failures = "", list[str]()
        self._path = setting.results / f"{task.name}.json"

    def keep(self, text: str | None = None, **figures: Any) -> None:
        """Add these figures, or put them in the place of earlier ones of their names; `text` replaces the text."""
        self.figures |= figures
        self.text = self.text if text is None else text
        self.write()

    def write(self) -> None:
        told = {"task": vars(self.task), "figures": self.figures, "text": self.text, "failures": self.failures}
        write_whole(self._path, json.dumps(told, allow_nan=False))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever is raised in it is told of in the result; what was found before stays."""
        try:
            yield
        except Exception as error:  # a kernel that does not run on this card must not cost what the others show
            self.failed(name, error)

    def failed(self, name: str, error: BaseException) -> None:
        why = f"{name}: {type(error).__name__}: {str(error).strip()[:2000]}"
        print(f"failed: {why}", flush=True)
        self.failures.append(why)
        self.write()


@dataclass(frozen=True)
class Found:
    """A result as it was read."""

    task: Task
    figures: dict[str, Any]
    text: str
    failures: tuple[str, ...]


def read_results(folder: Path) -> dict[str, Found]:
    """Task name -> what its file says, as far as there is one."""
    found: dict[str, Found] = {}
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        if "task" in told:
            task = Task(**told["task"])
            found[task.name] = Found(task, told["figures"], told["text"], tuple(told["failures"]))
    return found


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once."""
    there = path.with_name(f".{path.name}.part")
    there.write_text(text)
    os.replace(there, path)
