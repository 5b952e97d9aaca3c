"""What a job asks of its checkpoint that the checkpoint's config.json rules out: told before an engine is started.

The engine checks the same of the model it has read; here torch is not imported.
"""

from collections.abc import Iterator
from pathlib import Path

from pipeline.checkpoints.model_values import model_values, quantization_options
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.stores.redaction import shown_url


def against_limits(config: JobConfig, model: Path) -> Iterator[tuple[str, ConfigError]]:
    """Each key that the checkpoint in the folder `model` cannot do, and what is wrong. Raises ModelError where its
    config.json cannot be read."""
    length, method = config.engine.max_model_len, config.model.quantization
    if length is None and method == "none":
        return
    values, shown = model_values(model), shown_url(config.model.path)
    most = values.get("max_position_embeddings")
    if length is not None and isinstance(most, int) and length > most:
        key = "engine.max_model_len"
        yield key, ConfigError(f"{key}: {length} is more than the {most:,} positions that {shown} was made for")
    if method != "none" and quantization_options(model, values) is not None:
        key = "model.quantization"
        why = f"{shown} is quantized already; leave the key out (`none`), or take the 16-bit checkpoint"
        yield key, ConfigError(f"{key}: {method}, but {why}")
