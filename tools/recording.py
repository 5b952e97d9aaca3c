"""Record a terminal in which a job is killed and resumed, as an animated picture for the README: `make recording`.

    python -m tools.recording [--out docs/pictures/recording.svg]

A shell runs the commands of SCRIPT in a pseudo terminal. The driver is killed with SIGKILL once half of the rows are
done. Waits are cut to MAX_PAUSE_S, which is the only change to what the terminal showed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "pictures" / "recording.svg"
COLUMNS, ROWS = 100, 24
MAX_PAUSE_S, LAST_S = 0.6, 5.0
FRAME_S = 0.15
CHAR_PX, LINE_PX, MARGIN_PX = 7.83, 18, 12
LIMIT_S = 150
FOREGROUND, BACKGROUND = "#d6dbe1", "#151b23"
COLORS = {"red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff", "magenta": "#d2a8ff",
          "cyan": "#76e3ea"}  # fmt: skip
RUN = "pipeline run demo/summarize.yaml"
STYLE = "text { font: 13px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre } "
SCRIPT = ("pipeline demo", RUN, RUN, "pipeline verify out/summarize --deep")
PRINTED_BY = ("pipeline/cli/progress.py", "pipeline/cli/commands/demo.py", "pipeline/job/telemetry/status.py")
Line = tuple[tuple[str, str], ...]  # (color, text) of its runs


@dataclass
class Terminal:
    """A shell in a pseudo terminal, and the frames that it showed: (seconds, lines)."""

    folder: str
    frames: list[tuple[float, tuple[Line, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(self.folder)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            os.execvpe("bash", ["bash", "--norc"], os.environ | {"PS1": "$ ", "PATH": path, "TERM": "xterm-256color"})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._wait_for(self._is_idle)

    def type(self, text: str) -> None:
        """Type a line, a few letters per frame."""
        for start in range(0, len(text), 4):
            os.write(self._fd, text[start : start + 4].encode())
            self._read(FRAME_S / 2)
        os.write(self._fd, b"\n")
        self._read(FRAME_S)

    def run(self, command: str, until: Callable[[], bool] = lambda: False) -> None:
        """Run a command to its end, or until a condition holds."""
        self.type(command)
        self._wait_for(lambda: until() or self._is_idle())

    def close(self) -> None:
        os.write(self._fd, b"exit\n")
        os.waitpid(self.pid, 0)

    def _is_idle(self) -> bool:
        return self._screen.display[self._screen.cursor.y].rstrip() == "$"

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end, "\n".join(self._screen.display)
            self._read(FRAME_S)

    def _read(self, wait_s: float) -> None:
        """Show the output of the next `wait_s`, and keep the screen as a frame if it has changed."""
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                self._stream.feed(os.read(self._fd, 1 << 16))
        lines = tuple(self._line(row) for row in range(ROWS))
        if not self.frames or lines != self.frames[-1][1]:
            self.frames.append((time.monotonic(), lines))

    def _line(self, row: int) -> Line:
        cells = [self._screen.buffer[row][column] for column in range(COLUMNS)]
        cells = cells[: len(self._screen.display[row].rstrip())]
        return tuple((color, "".join(cell.data for cell in part)) for color, part in groupby(cells, key=_color))


def _color(cell: pyte.screens.Char) -> str:
    return COLORS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else FOREGROUND)  # 256 colors are six hex digits


def digest() -> str:
    """Return a digest of the code that prints what the recording shows. A test compares it with the recording's."""
    return hashlib.sha256(b"".join(Path(ROOT, name).read_bytes() for name in PRINTED_BY)).hexdigest()[:16]


def half_done(folder: Path) -> bool:
    with suppress(OSError, ValueError, KeyError):
        status = json.loads((folder / "out/summarize/_pipeline/status.json").read_text())
        return status["rows_written"] > 0 and status["rows_done"] >= status["rows_total"] // 2
    return False


def kill_driver(shell: int) -> None:
    """Kill the driver that the shell runs, as an administrator or a lost machine would."""
    command = ["pgrep", "-f", "pipeline run demo/", "--parent", str(shell)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    os.kill(int(found.stdout), signal.SIGKILL)


def record() -> list[tuple[float, tuple[Line, ...]]]:
    folder = Path(tempfile.gettempdir(), "recording")
    folder.mkdir()  # a short name: the recording shows it
    try:
        terminal = Terminal(str(folder))
        demo, first, again, verify = SCRIPT
        terminal.run(demo)
        terminal.run(first, until=lambda: half_done(folder))
        kill_driver(terminal.pid)
        terminal._wait_for(terminal._is_idle)
        terminal.type("# kill -9 from elsewhere; the same command resumes")
        terminal.run(again)
        terminal.run(verify)
        terminal.close()
        return terminal.frames
    finally:
        shutil.rmtree(folder)


def svg(frames: list[tuple[float, tuple[Line, ...]]]) -> str:
    """Draw the frames one after the other, in a loop. A line of several frames is drawn once."""
    lengths = [min(after - before, MAX_PAUSE_S) for (before, _), (after, _) in pairwise(frames)] + [LAST_S]
    stops = list(accumulate(lengths))
    names: dict[Line, str] = {}
    for line in chain.from_iterable(lines for _, lines in frames):
        names.setdefault(line, f"l{len(names)}")
    width, height = round(COLUMNS * CHAR_PX + 2 * MARGIN_PX), ROWS * LINE_PX + 2 * MARGIN_PX
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>A job is killed and resumed; every row is in the output once</title><desc>{digest()}</desc>",
        f"<style>{STYLE}g {{ visibility: hidden; animation: {stops[-1]:.2f}s step-end infinite }}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/><defs>',
    ]
    for line, name in names.items():
        runs = "".join(f'<tspan fill="{color}">{escape(text)}</tspan>' for color, text in line)
        parts.append(f'<text id="{name}" xml:space="preserve">{runs}</text>')
    parts.append("</defs>")
    for i, (_, lines) in enumerate(frames):
        start, stop = (100 * (stops[at] if at >= 0 else 0.0) / stops[-1] for at in (i - 1, i))
        keys = (
            f"0% {{ visibility: hidden }} {start:.3f}% {{ visibility: visible }} {stop:.3f}% {{ visibility: hidden }}"
        )
        parts.append(f'<style>@keyframes f{i} {{ {keys} }}</style><g style="animation-name: f{i}">')
        rows = [(names[line], MARGIN_PX + (at + 0.8) * LINE_PX) for at, line in enumerate(lines) if line]
        parts += [f'<use href="#{name}" x="{MARGIN_PX}" y="{y:.1f}"/>' for name, y in rows]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the terminal of a killed and resumed job.")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.parse_args().out.write_text(svg(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
