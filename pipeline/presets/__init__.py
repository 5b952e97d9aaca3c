"""Presets: job files for kinds of machine, laid over a job by name (`--preset h100`)."""

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
