"""Offline batch inference for language models: prompts in Parquet, JSON Lines, CSV or Arrow to completions in Parquet.

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
    "RequestFailed",
    "SamplingParams",
    "Score",
    "load_job",
    "run_job",
]

if TYPE_CHECKING:
    from pipeline.config import load_job
    from pipeline.engine.completion import Completion
    from pipeline.engine.config import EngineConfig
    from pipeline.engine.engine import Engine
    from pipeline.engine.request import Request
    from pipeline.engine.sampling_params import SamplingParams
    from pipeline.engine.tasks import Choice, Classify, Embed, Score
    from pipeline.job.actor.row_function import RequestFailed
    from pipeline.job.running.run import run_job

_HOME = {
    "Choice": "pipeline.engine.tasks",
    "Classify": "pipeline.engine.tasks",
    "Completion": "pipeline.engine.completion",
    "Embed": "pipeline.engine.tasks",
    "Engine": "pipeline.engine.engine",
    "EngineConfig": "pipeline.engine.config",
    "Request": "pipeline.engine.request",
    "RequestFailed": "pipeline.job.actor.row_function",
    "SamplingParams": "pipeline.engine.sampling_params",
    "Score": "pipeline.engine.tasks",
    "load_job": "pipeline.config",
    "run_job": "pipeline.job.running.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
