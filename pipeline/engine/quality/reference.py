"""The second model of an engine's process, which rows of a sample are compared with.

It is loaded before the engine, whose KV cache takes what is left. It reads a row at a time, so that its own cache is
small: `MAX_ROW_TOKENS` tokens for the row, and once or, where it also generates, twice as many for requests. Rows that
are longer are not compared.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.checkpoints.locate import locate_model
from pipeline.engine.engine import Engine
from pipeline.engine.quality.reference_config import MAX_ROW_TOKENS, ReferenceConfig
from pipeline.engine.startup.resolve import resolve
from pipeline.model.config import read_config


def open_reference(config: ReferenceConfig, factory: Callable[..., Any], say: Callable[[str], None]) -> Engine:
    """Load it, with a KV cache of the fixed size. Raises as `Engine` does."""
    given = config.engine
    model = read_config(locate_model(given.model))
    length = min(given.max_model_len or MAX_ROW_TOKENS, MAX_ROW_TOKENS, model.max_position)
    resolved = resolve(replace(given, max_model_len=length), model)
    blocks = -(-length // resolved.block_size)
    num_blocks = (3 if config.generates else 2) * blocks  # one of these for the text that is read
    sized = replace(
        given,
        max_model_len=length,
        scoring_tokens=length,
        kv_cache_memory_bytes=num_blocks * resolved.block_size * model.kv_bytes_per_token(resolved.kv_dtype),
    )
    say("reading the reference model's weights")
    engine = factory(sized, lambda what: say(f"the reference model: {what}"))
    engine.warm_up()
    return engine
