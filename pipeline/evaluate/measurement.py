"""Run models over the rows of a dataset: first compare logits with a reference's, then generate outputs.

Up to two models are in memory, the reference and one other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.checkpoints.locate import resolve_model
from pipeline.config import JobConfig
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.quality.divergence import Divergence, Likelihood, logits_in_pieces
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.startup.memory import weight_bytes
from pipeline.engine.startup.resolve import quantized_on_load, resolve
from pipeline.engine.tasks import HiddenStates, StatesResult
from pipeline.errors import ConfigError, ModelError
from pipeline.evaluate.table import Evaluation, Measured
from pipeline.formatting import Remaining
from pipeline.job.planning.resolution import resolve_prompts
from pipeline.job.preview.dataset_tokens import Samples, read_samples
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.load import checkpoint_files
from pipeline.stores.redaction import shown_url
from pipeline.tokenization.tokenizer import Tokenizer

MAX_NUM_SEQS = 32  # outputs generated at once, unless the job sets max_num_seqs
LOGIT_BYTES = 128 << 20  # logits of one piece, of one model
GROUP_TOKENS = 16384  # of texts whose hidden states are in memory at once; one text may be longer

Log = Callable[[str], None]


@dataclass(frozen=True)
class ModelVariant:
    """Model to measure.

    path and quantization (on load) are settings of a job's `model` section, activation_dtype and kv_cache_dtype of its
    `engine` section. kv_cache_dtype None uses the job's.
    """

    path: str
    quantization: str = "none"
    activation_dtype: str = "auto"
    kv_cache_dtype: str | None = None

    @property
    def name(self) -> str:
        shown = shown_url(self.path)
        if self.quantization != "none":
            shown += f", {self.quantization} on load"
        if self.activation_dtype != "auto":
            shown += f", activations in {self.activation_dtype}"
        return shown if self.kv_cache_dtype is None else f"{shown}, {self.kv_cache_dtype} KV cache"


@dataclass(frozen=True)
class _Model:
    """Local checkpoint of a variant, and the config of its engine."""

    variant: ModelVariant
    folder: Path
    model: ModelConfig
    engine: EngineConfig


@dataclass(frozen=True)
class _Outputs:
    """Completions of all rows by one model, and its speed."""

    completions: list[Completion]
    prompt_tokens_per_s: float
    decode_tokens_per_s: float

    def share_equal(self, other: "_Outputs") -> float:
        """Return the share of rows with equal tokens in both."""
        same = sum(a.token_ids == b.token_ids for a, b in zip(self.completions, other.completions))
        return same / len(self.completions)

    def share_right(self, expected: Sequence[str | None]) -> float:
        right = sum(text is not None and text.strip() == c.text.strip() for c, text in zip(self.completions, expected))
        return right / len(self.completions)


def evaluate(
    config: JobConfig,
    variants: Sequence[ModelVariant],
    reference: ModelVariant | None,
    params: SamplingParams,
    expected: str | None,
    log: Log,
) -> Evaluation:
    """Measure `variants` and `reference` on the prompts of `config`.

    params: must be greedy, so that outputs can be compared. expected: column with the correct answers. Raises
    ModelError when a model cannot be loaded or its tokenizer differs from the first one's, InputError for the dataset.
    """
    every = [*([] if reference is None else [reference]), *variants]
    found, samples = _prepare(config, every, params, expected, log)
    evaluator = _Evaluator(samples, params, expected is not None, log)
    measured: list[Measured] = []
    device = ""
    with nullcontext() if reference is None else _opened(found[0], log) as kept:
        outputs = None
        if kept is not None:
            device = str(kept.resolved["device"])
            first, outputs = evaluator.measure(found.pop(0), kept, None, None)
            measured.append(first)
        for each in found:
            with _opened(each, log) as engine:
                device = str(engine.resolved["device"])
                measured.append(evaluator.measure(each, engine, kept, outputs)[0])
    return Evaluation(
        data=shown_url(config.input.path),
        num_rows=len(samples.token_ids),
        num_tokens=samples.num_tokens,
        left_out=samples.left_out,
        max_tokens=params.max_tokens,
        device=device,
        has_reference=reference is not None,
        models=tuple(measured),
    )


def _prepare(
    config: JobConfig, every: Sequence[ModelVariant], params: SamplingParams, expected: str | None, log: Log
) -> tuple[list[_Model], Samples]:
    """Return the models, after checking that their tokenizers match the first one's, and the texts."""
    folders = [resolve_model(s.path, config.storage_options, log) for s in every]
    models = [quantized_on_load(read_config(folder), s.quantization) for folder, s in zip(folders, every)]
    log(f"reading {shown_url(config.input.path)}")
    prompts = resolve_prompts(config, folders[0])
    tokenizer = Tokenizer.from_folder(str(folders[0]), prompts.chat_template)
    try:
        for variant, folder, model in zip(every[1:], folders[1:], models[1:]):
            _check_comparable(every[0], tokenizer, models[0], variant, folder, model)
        longest = min([model.max_position for model in models])
        if config.engine.max_model_len is not None:
            longest = min(longest, config.engine.max_model_len)
        if longest <= params.max_tokens:
            raise ConfigError(
                f"--max-tokens {params.max_tokens}: leaves no room for prompts in a context of {longest} tokens"
            )
        samples = read_samples(prompts, tokenizer, longest - params.max_tokens, expected=expected)
    finally:
        tokenizer.close()
    length = max(map(len, samples.token_ids)) + params.max_tokens
    engine = replace(config.engine_config("", None), max_model_len=length, speculation="off")
    return [
        _Model(variant, folder, model, _sized(_engine_of(variant, folder, engine), model))
        for variant, folder, model in zip(every, folders, models)
    ], samples


def _engine_of(variant: ModelVariant, folder: Path, given: EngineConfig) -> EngineConfig:
    own = {"kv_cache_dtype": variant.kv_cache_dtype} if variant.kv_cache_dtype is not None else {}
    own |= {"quantization": variant.quantization, "activation_dtype": variant.activation_dtype}
    return replace(given, model=str(folder), **own)


def _check_comparable(
    first: ModelVariant,
    tokenizer: Tokenizer,
    model: ModelConfig,
    other: ModelVariant,
    folder: Path,
    other_model: ModelConfig,
) -> None:
    differs = Tokenizer.from_folder(str(folder)).differs_from(tokenizer)
    if differs is None and model.vocab_size != other_model.vocab_size:
        differs = f"a vocabulary of {other_model.vocab_size:,}, not {model.vocab_size:,}"
    if differs is not None:
        raise ModelError(
            f"{other.name}: its tokens differ from those of {first.name} ({differs}), so likelihoods cannot be "
            "compared; choose models with the same tokenizer"
        )


def _sized(given: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config with a KV cache for few sequences, since two engines share a device."""
    max_num_seqs = given.max_num_seqs or MAX_NUM_SEQS
    engine = replace(given, max_num_seqs=max_num_seqs)
    resolved = resolve(engine, model)
    # On a CPU the default is no larger than needed.
    if given.kv_cache_memory_bytes is None and resolved.device.type != "cpu":
        pages = resolved.kv_pages
        num_pages = max_num_seqs * pages.num_pages(resolved.max_model_len)
        engine = replace(engine, kv_cache_memory_bytes=num_pages * pages.page_bytes)
    return engine


def _opened(found: _Model, log: Log) -> Engine:
    log(f"loading {found.variant.name}")
    engine = Engine(found.engine, log)
    engine.warm_up()
    return engine


class _Evaluator:
    """Texts of the dataset, and the measurements of a model on them."""

    def __init__(self, samples: Samples, params: SamplingParams, has_expected: bool, log: Log) -> None:
        self._samples, self._params, self._has_expected, self._log = samples, params, has_expected, log

    def measure(
        self, found: _Model, engine: Engine, reference: Engine | None, answers: _Outputs | None
    ) -> tuple[Measured, _Outputs]:
        """Measure one model against the reference and its outputs (`answers`)."""
        name, resolved = found.variant.name, resolve(found.engine, found.model)
        with engine.device_context:  # the reference uses the same device
            likelihood, divergence = self._score(name, engine, reference)
        outputs = self._generate(name, engine)
        measured = Measured(
            name=name,
            weights=str(engine.resolved["weights"]),
            dtype=str(engine.resolved["dtype"]),
            perplexity=likelihood.perplexity,
            kl_mean=None if divergence is None else divergence.mean,
            kl_p99=None if divergence is None else divergence.p99,
            top1=None if divergence is None else divergence.top1,
            same_outputs=None if answers is None else outputs.share_equal(answers),
            expected=outputs.share_right(self._samples.expected) if self._has_expected else None,
            prompt_tokens_per_s=outputs.prompt_tokens_per_s,
            decode_tokens_per_s=outputs.decode_tokens_per_s,
            checkpoint_bytes=sum(file.stat().st_size for file in checkpoint_files(found.folder)),
            weight_bytes=weight_bytes(found.model, resolved.device, resolved.dtype, activations=resolved.activations),
            kv_bytes_per_token=found.model.kv_bytes_per_token(resolved.kv_dtype),
        )
        return measured, outputs

    def _score(self, name: str, engine: Engine, reference: Engine | None) -> tuple[Likelihood, Divergence | None]:
        max_rows = max(1, LOGIT_BYTES // (4 * engine.runner.vocab_size))
        progress = Remaining(self._log, f"{name}: tokens of the texts", self._samples.num_tokens)
        likelihood, divergence, done = Likelihood(), None if reference is None else Divergence(), 0
        for rows in _groups(self._samples.token_ids):
            ours = _states(name, engine, rows)
            theirs = {} if reference is None else _states("the reference", reference, rows)
            for row, token_ids in rows.items():
                pieces = None if reference is None else logits_in_pieces(reference.runner, theirs[row], max_rows)
                for first, logits_RV in logits_in_pieces(engine.runner, ours[row], max_rows):
                    if not bool(logits_RV.isfinite().all()):
                        raise ModelError(f"{name}: logits of sampled row {row} are not finite")
                    likelihood.add(logits_RV, token_ids[first + 1 : first + 1 + len(logits_RV)])
                    if pieces is not None and divergence is not None:
                        divergence.add(logits_RV, next(pieces)[1])
                done += len(token_ids)
                progress(done)
        engine.forget()  # the prefix cache would inflate the prompt rate
        return likelihood, divergence

    def _generate(self, name: str, engine: Engine) -> _Outputs:
        rows, before = self._samples.token_ids, replace(engine.stats)
        progress = Remaining(self._log, f"{name}: outputs", len(rows))
        done: dict[int, Completion] = {}
        for completion in engine.stream(Request(i, ids, self._params) for i, ids in enumerate(rows)):
            if completion.error is not None:
                raise ModelError(f"{name}: row {completion.row_id} of those read: {completion.error_message}")
            done[completion.row_id] = completion  # type: ignore[index]
            progress(len(done))
        spent = engine.stats.since(before)
        return _Outputs(
            [done[i] for i in range(len(rows))],
            1e6 * (spent.prompt_tokens - spent.cached_tokens) / max(1, spent.prefill_us),
            1e6 * spent.generated_tokens / max(1, spent.decode_us + spent.drafts_us),
        )


def _groups(rows: Sequence[list[int]]) -> Iterator[dict[int, list[int]]]:
    """Yield texts by index, in groups of about GROUP_TOKENS tokens."""
    group: dict[int, list[int]] = {}
    for row, token_ids in enumerate(rows):
        group[row] = token_ids
        if sum(map(len, group.values())) >= GROUP_TOKENS:
            yield group
            group = {}
    if group:
        yield group


def _states(name: str, engine: Engine, rows: Mapping[int, list[int]]) -> dict[int, np.ndarray]:
    """Return the last hidden states of each text, by its index."""
    states: dict[int, np.ndarray] = {}
    params, task = SamplingParams(), HiddenStates()
    for completion in engine.stream(Request(row, token_ids, params, task=task) for row, token_ids in rows.items()):
        if not isinstance(completion.result, StatesResult):
            raise ModelError(f"{name}: row {completion.row_id} of those read: {completion.error_message}")
        states[completion.row_id] = completion.result.states_NH  # type: ignore[index]
    return states
