"""Takes models through the rows of a dataset: first their logits on the texts, beside a reference's, then outputs.

At most two models are in memory, the reference and one other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.checkpoints.locate import resolve_model
from pipeline.config import JobConfig
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, EngineConfig, Request, SamplingParams
from pipeline.engine.quality.divergence import Divergence, Likelihood, logits_in_pieces
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

MAX_NUM_SEQS = 32  # outputs that are generated at once, unless the job says how many
LOGIT_BYTES = 128 << 20  # of the logits of one piece, of one model
GROUP_TOKENS = 16384  # of the texts whose hidden states are kept at once, or one text

Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelVariant:
    """A model to measure; `path` and `quantization` (on load) as a job's `model` takes them, `activation_dtype` and
    `kv_cache_dtype` as its `engine` does, None being the job's own."""

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
class _Found:
    """A variant's checkpoint on this machine, and how an engine for it is built."""

    variant: ModelVariant
    folder: Path
    model: ModelConfig
    engine: EngineConfig


@dataclass(frozen=True)
class _Outputs:
    """What a model answered to each row, and how fast."""

    completions: list[Completion]
    prompt_tokens_per_s: float
    decode_tokens_per_s: float

    def share_equal(self, other: "_Outputs") -> float:
        """Of rows with the same tokens in both."""
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
    say: Say,
) -> Evaluation:
    """Measure `variants`, and `reference` beside them, on the prompts that `config` names.

    params: how outputs are generated; greedy, so that they can be compared. expected: a column with the right answers.
    Raises ModelError when a model cannot be loaded or its tokens are not the first one's, InputError for the dataset.
    """
    every = [*([] if reference is None else [reference]), *variants]
    found, samples = _prepare(config, every, params, expected, say)
    rows = _Rows(samples, params, expected is not None, say)
    measured: list[Measured] = []
    device = ""
    with nullcontext() if reference is None else _opened(found[0], say) as kept:
        outputs = None
        if kept is not None:
            device = str(kept.resolved["device"])
            first, outputs = rows.measure(found.pop(0), kept, None, None)
            measured.append(first)
        for each in found:
            with _opened(each, say) as engine:
                device = str(engine.resolved["device"])
                measured.append(rows.measure(each, engine, kept, outputs)[0])
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
    config: JobConfig, every: Sequence[ModelVariant], params: SamplingParams, expected: str | None, say: Say
) -> tuple[list[_Found], Samples]:
    """The checkpoints, each fit to be compared with the first, and the texts."""
    folders = [resolve_model(s.path, config.storage, say) for s in every]
    models = [quantized_on_load(read_config(folder), s.quantization) for folder, s in zip(folders, every)]
    say(f"reading {shown_url(config.input.path)}")
    prompts = resolve_prompts(config, folders[0])
    tokenizer = Tokenizer.from_folder(str(folders[0]), prompts.chat_template)
    try:
        for variant, folder, model in zip(every[1:], folders[1:], models[1:]):
            _check_comparable(every[0], tokenizer, models[0], variant, folder, model)
        longest = min([model.max_position for model in models])
        if config.engine.max_model_len is not None:
            longest = min(longest, config.engine.max_model_len)
        if longest <= params.max_tokens:
            raise ConfigError(f"--max-tokens {params.max_tokens}: no room beside them in a context of {longest} tokens")
        samples = read_samples(prompts, tokenizer, longest - params.max_tokens, expected=expected)
    finally:
        tokenizer.close()
    length = max(map(len, samples.token_ids)) + params.max_tokens
    engine = replace(config.engine_config("", None), max_model_len=length, speculation="off")
    return [
        _Found(variant, folder, model, _sized(_engine_of(variant, folder, engine), model))
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
        differs = f"it has {other_model.vocab_size:,} of them, not {model.vocab_size:,}"
    if differs is not None:
        raise ModelError(
            f"{other.name}: its tokens are not those of {first.name} ({differs}), so no likelihood of one means the "
            "same in the other; compare models with one tokenizer"
        )


def _sized(given: EngineConfig, model: ModelConfig) -> EngineConfig:
    """With a KV cache for a few rows at once, because two engines share a device."""
    at_once = given.max_num_seqs or MAX_NUM_SEQS
    engine = replace(given, max_num_seqs=at_once)
    resolved = resolve(engine, model)
    if given.kv_cache_memory_bytes is None and resolved.device.type != "cpu":  # there the default is what is needed
        blocks = at_once * -(-resolved.max_model_len // resolved.block_size)
        block_bytes = resolved.block_size * model.kv_bytes_per_token(resolved.kv_dtype)
        engine = replace(engine, kv_cache_memory_bytes=blocks * block_bytes)
    return engine


def _opened(found: _Found, say: Say) -> Engine:
    say(f"loading {found.variant.name}")
    engine = Engine(found.engine, say)
    engine.warm_up()
    return engine


class _Rows:
    """The texts, and what is asked of each model about them."""

    def __init__(self, samples: Samples, params: SamplingParams, has_expected: bool, say: Say) -> None:
        self._samples, self._params, self._has_expected, self._say = samples, params, has_expected, say

    def measure(
        self, found: _Found, engine: Engine, reference: Engine | None, answers: _Outputs | None
    ) -> tuple[Measured, _Outputs]:
        """Of one model, against the reference and what that answered."""
        name, resolved = found.variant.name, resolve(found.engine, found.model)
        with engine.device_context:  # the reference is in the same one
            likelihood, apart = self._score(name, engine, reference)
        outputs = self._generate(name, engine)
        measured = Measured(
            name=name,
            weights=str(engine.resolved["weights"]),
            dtype=str(engine.resolved["dtype"]),
            perplexity=likelihood.perplexity,
            kl_mean=None if apart is None else apart.mean,
            kl_p99=None if apart is None else apart.p99,
            top1=None if apart is None else apart.top1,
            same_outputs=None if answers is None else outputs.share_equal(answers),
            expected=outputs.share_right(self._samples.expected) if self._has_expected else None,
            prompt_tokens_per_s=outputs.prompt_tokens_per_s,
            decode_tokens_per_s=outputs.decode_tokens_per_s,
            checkpoint_bytes=sum(file.stat().st_size for file in checkpoint_files(found.folder)),
            weight_bytes=weight_bytes(
                found.model, resolved.device, resolved.dtype, activation_dtype=resolved.activation_dtype
            ),
            kv_bytes_per_token=found.model.kv_bytes_per_token(resolved.kv_dtype),
        )
        return measured, outputs

    def _score(self, name: str, engine: Engine, reference: Engine | None) -> tuple[Likelihood, Divergence | None]:
        max_rows = max(1, LOGIT_BYTES // (4 * engine.runner.vocab_size))
        told = Remaining(self._say, f"{name}: tokens of the texts", self._samples.num_tokens)
        likelihood, apart, done = Likelihood(), None if reference is None else Divergence(), 0
        for rows in _groups(self._samples.token_ids):
            ours = _states(name, engine, rows)
            theirs = {} if reference is None else _states("the reference", reference, rows)
            for row, token_ids in rows.items():
                pieces = None if reference is None else logits_in_pieces(reference.runner, theirs[row], max_rows)
                for first, logits_RV in logits_in_pieces(engine.runner, ours[row], max_rows):
                    if not bool(logits_RV.isfinite().all()):
                        raise ModelError(f"{name}: logits that are no finite numbers, in row {row} of those read")
                    likelihood.add(logits_RV, token_ids[first + 1 : first + 1 + len(logits_RV)])
                    if pieces is not None and apart is not None:
                        apart.add(logits_RV, next(pieces)[1])
                done += len(token_ids)
                told(done)
        engine.forget()  # so that rates of prompts are those of computed ones
        return likelihood, apart

    def _generate(self, name: str, engine: Engine) -> _Outputs:
        rows, before = self._samples.token_ids, replace(engine.stats)
        told = Remaining(self._say, f"{name}: outputs", len(rows))
        done: dict[int, Completion] = {}
        for completion in engine.stream(Request(i, ids, self._params) for i, ids in enumerate(rows)):
            if completion.error is not None:
                raise ModelError(f"{name}: row {completion.row_id} of those read: {completion.error_message}")
            done[completion.row_id] = completion  # type: ignore[index]
            told(len(done))
        spent = engine.stats.since(before)
        return _Outputs(
            [done[i] for i in range(len(rows))],
            1e6 * (spent.prompt_tokens - spent.cached_tokens) / max(1, spent.prefill_us),
            1e6 * spent.generated_tokens / max(1, spent.decode_us + spent.drafts_us),
        )


def _groups(rows: Sequence[list[int]]) -> Iterator[dict[int, list[int]]]:
    """The texts by their number, about GROUP_TOKENS tokens at a time."""
    group: dict[int, list[int]] = {}
    for row, token_ids in enumerate(rows):
        group[row] = token_ids
        if sum(map(len, group.values())) >= GROUP_TOKENS:
            yield group
            group = {}
    if group:
        yield group


def _states(name: str, engine: Engine, rows: Mapping[int, list[int]]) -> dict[int, np.ndarray]:
    """The last hidden states of each text, by its number."""
    states: dict[int, np.ndarray] = {}
    params, task = SamplingParams(), HiddenStates()
    for completion in engine.stream(Request(row, token_ids, params, task=task) for row, token_ids in rows.items()):
        if not isinstance(completion.result, StatesResult):
            raise ModelError(f"{name}: row {completion.row_id} of those read: {completion.error_message}")
        states[completion.row_id] = completion.result.states_NH  # type: ignore[index]
    return states
