"""Configuration of the reference model of a quality watch. No torch."""

from dataclasses import dataclass, replace

from pipeline.engine.config import EngineConfig
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.sampling_options import is_greedy

MAX_ROW_TOKENS = 8192  # of a prompt and its completion
MAX_NUM_SEQS = 8  # that the reference generates at once
STEP_TOKENS = 256  # of a reference step; the job's steps run in between


@dataclass(frozen=True)
class ReferenceConfig:
    """generates: whether the reference also writes completions, besides reading the served ones."""

    engine: EngineConfig
    generates: bool = False


def reference_config(served: EngineConfig, model: str, generates: bool) -> ReferenceConfig:
    """Return the configuration for the model in the folder `model`: the served engine's, without options that affect
    quality. Its weights are as stored, or widened to the compute dtype."""
    plain = replace(
        served,
        model=model,
        quantization="none",
        kv_cache_dtype="none",
        state_dtype="float32",
        activation_dtype="none",
        speculation="off",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
    )
    return ReferenceConfig(plain, generates)


def is_unconstrained_greedy(params: SamplingParams) -> bool:
    """Return whether each token of a row is the most likely one by the model's raw logits, so that reading a row shows
    what the reference would have written. False if they are sampled, changed, or constrained by a grammar or budget."""
    is_free = params.structured_outputs is None and params.thinking_token_budget is None
    return is_free and bool(is_greedy(vars(params)))


def approximates(served: EngineConfig) -> bool:
    """Return whether the engine computes a checkpoint differently from `reference_config` of the same folder."""
    changes = served.quantization, served.kv_cache_dtype, served.state_dtype, served.activation_dtype
    return any(change not in ("auto", "none", "float32") for change in changes)
