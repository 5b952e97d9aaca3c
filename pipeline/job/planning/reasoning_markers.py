"""The markers of a job's reasoning (`sampling.reasoning`), which its checkpoint's tokenizer has."""

from pathlib import Path

from pipeline.config import JobConfig


def with_reasoning_markers(config: JobConfig, folder: Path) -> JobConfig:
    """`config` with the markers' texts in the place of `auto`, so that they are a part of what the job is. Raises
    ConfigError where the tokenizer lacks them, ModelError where there is none."""
    wanted = config.sampling.reasoning
    if wanted is None:
        return config
    from pipeline.engine.reasoning.marker_tokens import find_markers
    from pipeline.tokenization.tokenizer import Tokenizer

    found = find_markers(wanted, Tokenizer.from_folder(str(folder)))
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"reasoning": found})})
