"""The whole engine on this device against the oracle's model: are its greedy tokens the model's best?

The engine completes ragged prompts in small steps, so that chunks, decoding, shared prefixes and whatever it keeps
ready for decoding take part. Then the oracle, in float32 on the same device, computes the logits along each completion:
every token that was chosen must be the best, or behind it by no more than rounding explains. What a wrong step leads to
is several deviations behind.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipeline.bench.gpu.kernels.correctness import Check, outcome
from pipeline.bench.workload import FIRST_TOKEN
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, EngineConfig, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.step.runner import ModelRunner
from pipeline.errors import PipelineError
from pipeline.kernels.activations.rounded_linears import with_rounded_activations
from pipeline.kernels.reference import reference_kernels
from pipeline.model.config import DTYPES, read_config
from pipeline.model.decoder import Decoder

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}  # in deviations of the logits
PROMPTS, SHARED, LONGEST, BLOCK_SIZE = 24, 70, 320, 64
BATCHED_TOKENS = 128
FP8_TOLERANCE = 1.0
"""With activations in fp8, of 3 bits of fraction: where the last bit of a value decides how it is rounded, it moves by
up to an eighth, in every linear, so two right engines with other orders of sums are apart about as fp8 is from 16 bit.
That the rounding itself is right, the checks of the linears show."""


def check_engine(
    folder: Path,
    device: torch.device,
    dtype: str,
    output_tokens: int,
    say: Callable[[str], None],
    activation_dtype: str = "auto",
) -> Check:
    """Complete prompts with the model in `folder`. The error is the most that a chosen token's logit is behind the
    best, in deviations of the logits."""
    options = EngineConfig(
        str(folder),
        device=str(device),
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=16,
        max_num_batched_tokens=BATCHED_TOKENS,
        activation_dtype=activation_dtype,
    )

    def error() -> float:
        prompts = _prompts(read_config(folder).vocab_size, output_tokens)
        with Engine(options, say) as engine:
            completions = engine.generate(prompts, SamplingParams(max_tokens=output_tokens, ignore_eos=True))
        for completion in completions:
            if completion.error is not None:
                raise PipelineError(f"prompt {completion.row_id} failed: {completion.error_message}")
        return _most_behind(_oracle(folder, device, activation_dtype), prompts, completions)

    if activation_dtype == "fp8":
        check = Check("engine, fp8", folder.name, dtype, "the engine as a whole", None, FP8_TOLERANCE)
    else:
        check = Check("engine", folder.name, dtype, "the engine as a whole", None, TOLERANCES[dtype])
    return outcome(check, error)


def _prompts(vocab_size: int, output_tokens: int) -> list[list[int]]:
    """Half of them begin alike, for more than a block."""
    rng = np.random.default_rng(11)
    shared = rng.integers(FIRST_TOKEN, vocab_size, SHARED).tolist()
    lengths = rng.integers(1, LONGEST - output_tokens - SHARED, PROMPTS)
    return [
        (shared if number % 2 else []) + rng.integers(FIRST_TOKEN, vocab_size, length).tolist()
        for number, length in enumerate(lengths)
    ]


def _oracle(folder: Path, device: torch.device, activation_dtype: str) -> ModelRunner:
    kernels, config = reference_kernels(torch.float32, device), read_config(folder)
    if activation_dtype != "auto":
        kernels = with_rounded_activations(kernels, activation_dtype, device)
    decoder = Decoder(folder, config, kernels, DTYPES["float32"], device)
    return LoadedModel(config, decoder, kernels, decoder.dtype).runner(-(-LONGEST // BLOCK_SIZE), BLOCK_SIZE, LONGEST)


def _most_behind(oracle: ModelRunner, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Of all chosen tokens."""
    most = 0.0
    for prompt, completion in zip(prompts, completions):
        tokens = np.array(prompt + completion.token_ids[:-1], dtype=np.int64)
        place_T = np.arange(len(tokens))
        step = StepInput(
            token_id_T=tokens,
            position_T=place_T,
            slot_mapping_T=place_T,
            query_start_S1=np.array([0, len(tokens)], dtype=np.int32),
            context_len_S=np.array([len(tokens)], dtype=np.int32),
            block_table_SM=np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)[None],
            logit_row_R=place_T[len(prompt) - 1 :],
        )
        logits_RV = oracle.execute(step)
        chosen_R = torch.tensor(completion.token_ids, device=logits_RV.device)
        behind_R = logits_RV.amax(1) - logits_RV.gather(1, chosen_R.unsqueeze(1)).squeeze(1)
        most = max(most, float((behind_R / logits_RV.std(1)).max()))
    return most
