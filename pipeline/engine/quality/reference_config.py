"""What the reference model of a quality watch is, for those who do not load it. No torch."""

from dataclasses import dataclass, replace

from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.engine.schedule.sequence import is_greedy

MAX_ROW_TOKENS = 8192  # of a prompt and its completion
MAX_NUM_SEQS = 8  # that the reference generates at once
STEP_TOKENS = 256  # of its steps, between which those of the job go on


@dataclass(frozen=True)
class ReferenceConfig:
    """generates: whether the reference writes completions of its own, beside reading those that were served."""

    engine: EngineConfig
    generates: bool = False


def reference_config(served: EngineConfig, model: str, generates: bool) -> ReferenceConfig:
    """For the model in the folder `model`: like the served one, without anything that stands for quality. Its weights
    are as they are stored, or widened to what is computed in."""
    plain = replace(
        served,
        model=model,
        quantization="none",
        kv_cache_dtype="auto",
        activation_dtype="auto",
        speculation="off",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
    )
    return ReferenceConfig(plain, generates)


def takes_likeliest(params: SamplingParams) -> bool:
    """Whether each token of a row is the likeliest of its model's raw logits: then reading a row tells what the
    reference would have written. Not where they are sampled from, changed, or held to a grammar or a budget."""
    is_free = params.structured_outputs is None and params.thinking_token_budget is None
    return is_free and bool(is_greedy(vars(params)))


def approximates(served: EngineConfig) -> bool:
    """Whether the engine computes a checkpoint in another way than `reference_config` of the same folder does."""
    changes = served.kv_cache_dtype, served.activation_dtype
    return served.quantization != "none" or any(change != "auto" for change in changes)
