"""The model that the rows of `quality.sample` are compared with, and checks that the comparison is meaningful."""

from pathlib import Path

from pipeline.config import JobConfig
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import (
    ReferenceConfig,
    approximates,
    is_unconstrained_greedy,
    reference_config,
)
from pipeline.errors import ConfigError, ModelError
from pipeline.job.actor.resolved_job import ResolvedJob
from pipeline.stores.redaction import shown_url

KEY = "quality.model"
_NAME_ONE = f"name the 16-bit model in {KEY}, or leave quality.sample out"
_TOKEN_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty",
                  "frequency_penalty", "structured_outputs", "thinking_token_budget")  # fmt: skip


def check_own(config: JobConfig, model: Path) -> None:
    """Raise ConfigError if the job's own checkpoint cannot serve as the reference."""
    from pipeline.model.config import read_config

    stored, shown = read_config(model).quantization, shown_url(config.model.path)
    if stored is not None:
        raise ConfigError(
            f"{KEY}: missing: {shown} is quantized ({stored}) and does not contain its original weights; {_NAME_ONE}"
        )
    if not approximates(config.engine_config("", None)):
        raise ConfigError(
            f"{KEY}: missing: {shown} is served unmodified (no model.quantization, engine.kv_cache_dtype, "
            f"state_dtype or activation_dtype), so there is nothing to compare it with; {_NAME_ONE}"
        )


def check_same_tokens(reference: Path, model: Path) -> None:
    """Raise ModelError if the two models differ in the text of a token or in the size of the vocabulary."""
    from pipeline.model.config import read_config
    from pipeline.tokenization.tokenizer import Tokenizer

    theirs, ours = (Tokenizer.from_folder(str(folder)) for folder in (reference, model))
    differs = theirs.differs_from(ours)
    num_theirs, num_ours = (read_config(folder).vocab_size for folder in (reference, model))
    if differs is None and num_theirs != num_ours:
        differs = f"it has {num_theirs:,} tokens, not {num_ours:,}"
    if differs is not None:
        raise ModelError(
            f"{KEY} {reference}: its tokens are not those of model.path ({differs}), so their predictions cannot "
            "be compared; name the 16-bit model that model.path was made from"
        )


def reference_of(job: ResolvedJob, engine: EngineConfig) -> ReferenceConfig | None:
    """Return the reference engine's options, or None if no rows are compared. engine: options of the served engine."""
    if job.reference is None:
        return None
    by_row = {name.partition(".")[0] for name in job.units.sampling_columns}
    likeliest = is_unconstrained_greedy(job.params) and by_row.isdisjoint(_TOKEN_OPTIONS)
    generates = job.config.quality.column is not None or not likeliest
    return reference_config(engine, str(job.reference), generates)
