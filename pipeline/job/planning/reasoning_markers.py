"""The markers of a job's reasoning (`sampling.reasoning`), which its checkpoint's tokenizer has."""

from pathlib import Path

from pipeline.config import JobConfig
from pipeline.errors import ConfigError


def with_reasoning_markers(config: JobConfig, folder: Path) -> JobConfig:
    """`config` with the markers' texts in the place of `auto`, so that they are a part of what the job is. Raises
    ConfigError where the tokenizer lacks them, or where other options need them to be one token each, ModelError where
    there is no tokenizer."""
    wanted = config.sampling.reasoning
    if wanted is None:
        return config
    from pipeline.engine.reasoning.markers import find_markers, marker_tokens
    from pipeline.engine.reasoning.tracking import why_not_by_text
    from pipeline.tokenization.tokenizer import Tokenizer

    tokenizer, sampling = Tokenizer.from_folder(str(folder)), config.sampling
    found = find_markers(wanted, tokenizer)
    has_budget, has_grammar = sampling.thinking_token_budget is not None, sampling.structured_outputs is not None
    if marker_tokens(found, tokenizer) == found and (why := why_not_by_text(found, has_budget, has_grammar)):
        raise ConfigError(why)
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"reasoning": found})})
