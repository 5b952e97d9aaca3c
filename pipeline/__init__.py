"""Offline batch inference for language models: prompts in Parquet or JSON Lines to completions in Parquet.

This is the public API. Names are imported on first use, so that `import pipeline` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "Classify",
    "Completion",
    "Embed",
    "Engine",
    "EngineConfig",
    "Request",
    "SamplingParams",
    "Score",
    "load_job",
    "run_job",
]

if TYPE_CHECKING:
    from pipeline.config import load_job
    from pipeline.engine.engine import Engine
    from pipeline.engine.params import Completion, EngineConfig, Request, SamplingParams
    from pipeline.engine.tasks import Choice, Classify, Embed, Score
    from pipeline.job.running.run import run_job

_HOME = (
    {
        "Engine": "pipeline.engine.engine",
        "load_job": "pipeline.config",
        "run_job": "pipeline.job.running.run",
    }
    | dict.fromkeys(("Completion", "EngineConfig", "Request", "SamplingParams"), "pipeline.engine.params")
    | dict.fromkeys(("Choice", "Classify", "Embed", "Score"), "pipeline.engine.tasks")
)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
