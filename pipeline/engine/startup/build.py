"""Builds the parts of an engine from an `EngineConfig`: the loaded model and its KV cache."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoints.locate import locate_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.forward.graphs import CudaCapture
from pipeline.engine.forward.runner import DeviceContext, ModelRunner, Runner
from pipeline.engine.parallel.group import RankGroup
from pipeline.engine.parallel.runner import ParallelRunner
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.engine.startup.dummy_steps import CapturedShape
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.memory import (
    cache_before_dense,
    kv_budget_bytes,
    limit_states,
    return_freed_bytes,
    weight_bytes,
)
from pipeline.engine.startup.mixed_tokens import max_mixed_tokens
from pipeline.engine.startup.resolve import Resolved, quantized_on_load, resolve, with_state_dtype
from pipeline.errors import ConfigError
from pipeline.formatting import shown_bytes
from pipeline.kernels.ranks import ONE_RANK, OneRank, ProcessRanks
from pipeline.kernels.select import keep_cpu_kernels_in, keep_gpu_kernels_in
from pipeline.machine.caches import cpu_kernel_folder, gpu_kernel_folder
from pipeline.machine.host import available_cores
from pipeline.machine.numba import numba_unavailable_reason
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.kv_cache import single_kv_pages
from pipeline.model.load import as_stored
from pipeline.roofline.cards import card_of_device
from pipeline.roofline.kv_pages import KVPages
from pipeline.tokenization.tokenizer import Tokenizer

PASS_QUERIES = 2  # tokens of a sequence in a captured draft pass


@dataclass(frozen=True, kw_only=True)
class Built:
    """Parts of an engine. num_pages: of the KV cache; the draft model's has as many. settings: as resolved."""

    resolved: Resolved
    device_context: DeviceContext
    runner: Runner
    draft_runner: ModelRunner | None
    tokenizer: Tokenizer
    num_pages: int
    max_model_len: int
    settings: dict[str, str | int]


def build(config: EngineConfig, log: Callable[[str], None]) -> Built:
    """Load the model that `config` names. `log` receives messages about slow operations.

    Raises ModelError for a bad checkpoint, ConfigError for options that it cannot run with, EnvironmentFailed if
    compiled kernels cannot be stored.
    """
    keep_cpu_kernels_in(cpu_kernel_folder(log=log))  # also on a GPU: lookup is compiled for the CPU
    folder = locate_model(config.model)
    model = quantized_on_load(as_stored(read_config(folder), folder), config.quantization)
    model = with_state_dtype(model, config.state_dtype)
    resolved = resolve(config, model.local(config.tensor_parallel_size))
    num_threads = _num_threads(config.num_threads)
    if config.tensor_parallel_size > 1:
        num_threads = max(1, (num_threads or torch.get_num_threads()) // config.tensor_parallel_size)
    spec = LoadSpec(config, folder, model, resolved, num_threads)
    device_context = DeviceContext(num_threads, resolved.device)
    with device_context:
        tokenizer = Tokenizer.from_folder(str(folder))
        if config.tensor_parallel_size == 1:
            loaded = load_runner(spec, ONE_RANK, log, tokenizer)
            runner: Runner = loaded.runner
        else:
            loaded, runner = start_ranks(spec, log, tokenizer)
    resolved, pages, length = loaded.resolved, loaded.resolved.kv_pages, loaded.max_model_len
    num_rows, cache_bytes = loaded.num_pages // pages.num_pages(length), loaded.num_pages * pages.page_bytes
    settings: dict[str, str | int] = {
        "device": str(resolved.device),
        **({"device_name": torch.cuda.get_device_name(resolved.device)} if resolved.device.type == "cuda" else {}),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "activation_dtype": resolved.activations.dtype,
        "kv_cache_dtype": str(resolved.kv_dtype).removeprefix("torch."),
        **({"state_dtype": config.state_dtype} if resolved.state_bytes else {}),
        "max_model_len": loaded.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "block_size": resolved.block_size,
        "num_kv_blocks": loaded.num_pages,
        **({} if pages.window is None else _shared(pages)),
        "kv_cache": f"{shown_bytes(cache_bytes)}, {num_rows:,} rows of {length:,} tokens",
        "weights": loaded.target.weights,
        "parameters": model.parameters_text(),
        "deterministic": "on" if resolved.deterministic else "off",
        "num_threads": device_context.num_threads,
        "tensor_parallel_size": config.tensor_parallel_size,
        "speculation": _speculation_text(config.speculation_config, resolved),
    } | {f"kernel.{op}": origin for op, origin in loaded.target.kernels.backends.items()}
    return Built(
        resolved=resolved,
        device_context=device_context,
        runner=runner,
        draft_runner=loaded.draft_runner,
        tokenizer=tokenizer,
        num_pages=loaded.num_pages,
        max_model_len=loaded.max_model_len,
        settings=settings,
    )


def _num_threads(requested: int | None) -> int | None:
    """Return the number of threads: by default torch's, capped by a CPU quota. OMP_NUM_THREADS overrides the cap."""
    if requested is None and "OMP_NUM_THREADS" not in os.environ:
        return min(torch.get_num_threads(), available_cores())
    return requested


@dataclass(frozen=True)
class LoadSpec:
    """Options by which a rank loads its share. resolved: with the rank's device. num_threads: of each rank."""

    config: EngineConfig
    folder: Path
    model: ModelConfig
    resolved: Resolved
    num_threads: int | None


@dataclass(frozen=True)
class LoadedRunner:
    """A rank's runner with its KV cache. num_pages: of the KV cache."""

    target: LoadedModel
    resolved: Resolved
    runner: ModelRunner
    draft_runner: ModelRunner | None
    num_pages: int
    max_model_len: int


def load_runner(
    spec: LoadSpec, ranks: OneRank, log: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> LoadedRunner:
    """Load a rank's share. All ranks call this at the same time, the leader with a tokenizer; it alone has the draft
    model."""
    config, resolved = spec.config, spec.resolved
    if resolved.device.type == "cuda":
        keep_gpu_kernels_in(gpu_kernel_folder())
    log("reading weights")
    cached_tokens, reserved_bytes = cache_before_dense(resolved.max_num_seqs, resolved.max_model_len), 0
    if resolved.speculation.model is not None and tokenizer is not None:
        drafter = read_config(locate_model(resolved.speculation.model))
        reserved_bytes = weight_bytes(drafter, resolved.device, resolved.dtype, keeps_dense=False)
        reserved_bytes += cached_tokens * drafter.kv_bytes_per_token(resolved.kv_dtype)
    target = LoadedModel.load(spec.folder, spec.model, resolved, config.adapters, ranks, reserved_bytes=reserved_bytes)
    if target.decoder.lm_head is None:  # it does not generate
        resolved = replace(resolved, speculation=SpeculationConfig("off"))
    draft = None
    if resolved.speculation.model is not None and tokenizer is not None:
        log("reading the draft model's weights")
        reserved_bytes = cached_tokens * target.kv_bytes_per_token
        draft = LoadedModel.load_draft(resolved.speculation.model, tokenizer, resolved, reserved_bytes)
    return_freed_bytes()
    loaded = [target] if draft is None else [target, draft]
    step_bytes = 0  # on a CPU, where memory is not that tight
    shapes = captured_shapes(resolved, _max_mixed_tokens(target.config, resolved, ranks))
    pages = [resolved.kv_pages]
    if draft is not None:
        pages.append(single_kv_pages(draft.config, resolved.block_size, draft.kv_dtype))
    if resolved.device.type == "cuda":
        threads = spec.num_threads or torch.get_num_threads()
        for each, shape, own in zip(loaded, shapes, pages):
            each.compile_kernels(resolved, shape, own, threads, log)
        step_bytes = max(each.step_bytes(resolved) for each in loaded)
        step_bytes += sum(each.captured_bytes(resolved, shape.largest) for each, shape in zip(loaded, shapes))
    num_pages, max_num_seqs = _cache_size(config, resolved, sum(each.page_bytes for each in pages), step_bytes)
    num_pages, resolved = ranks.least(num_pages), replace(resolved, max_num_seqs=max_num_seqs)
    max_model_len = _fit_length(config, resolved, num_pages)
    runner = target.runner(num_pages, pages[0], max_model_len, max_num_seqs + resolved.num_snapshots)
    draft_runner = draft.runner(num_pages, pages[1], max_model_len) if draft is not None else None
    if resolved.device.type == "cuda":
        _capture_steps(runner, draft_runner, resolved, shapes, log)
    return LoadedRunner(target, resolved, runner, draft_runner, num_pages, max_model_len)


def start_ranks(
    spec: LoadSpec, log: Callable[[str], None], tokenizer: Tokenizer
) -> tuple[LoadedRunner, ParallelRunner]:
    """Start the other ranks (`engine/rank_process.py`) and load the leader's share. Returns it, and the runner of all
    ranks. Raises ConfigError if there are fewer GPUs."""
    size, resolved = spec.config.tensor_parallel_size, spec.resolved
    if resolved.device.type == "cuda":
        count = torch.cuda.device_count() - resolved.device.index
        if count < size:
            raise ConfigError(
                f"engine.tensor_parallel_size = {size}: torch sees only {count} GPUs from {resolved.device} on"
            )
    group = RankGroup(size, _plan_bytes(resolved), exits_when_lost=resolved.device.type == "cuda")
    try:
        group.start([(rank, size, group.store, rank_spec(spec, rank)) for rank in range(1, size)])
        ranks = ProcessRanks(0, size, group.store, resolved.device, group.lost)
        loaded = load_runner(spec, ranks, log, tokenizer)
        return loaded, ParallelRunner(loaded.runner, spec.model, ranks, group)
    except BaseException:
        group.close()
        raise


def rank_spec(spec: LoadSpec, rank: int) -> LoadSpec:
    """Return the specification for another rank, whose GPU is the one `rank` after the leader's."""
    device = spec.resolved.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index + rank)
    return replace(spec, resolved=replace(spec.resolved, device=device))


def _plan_bytes(resolved: Resolved) -> int:
    """Return an upper bound of the size of a step's arrays."""
    num_blocks = -(-resolved.max_model_len // resolved.block_size)
    numbers = 6 * resolved.max_num_batched_tokens + resolved.max_num_seqs * (8 + 2 * num_blocks)
    return 8 * numbers + (1 << 16)


def _speculation_text(requested: SpeculationConfig, resolved: Resolved) -> str:
    used = resolved.speculation
    if used.method == "off":
        lacks = numba_unavailable_reason() if requested.method in ("auto", "lookup") else None
        return "off" if lacks is None else f"off: lookup needs numba, which {lacks}"
    drafter = "lookup" if used.method == "lookup" else "draft model"
    when = "in every step" if used.forced else "where it pays"
    return f"{drafter}, up to {used.num_speculative_tokens} tokens, {when}"


def captured_shapes(resolved: Resolved, max_mixed_tokens: int) -> list[CapturedShape]:
    """Return the captured shapes of the target and of the draft model, whose first pass computes the tokens after
    accepted drafts and the last accepted draft itself.

    Steps with drafts are captured up to the same size as mixed steps: larger ones take longer to compute than to
    launch."""
    max_verified = resolved.max_verified_tokens
    max_tokens = max(resolved.max_num_seqs, min(max_verified, max_mixed_tokens or max_verified))
    max_pass_tokens = min(PASS_QUERIES * resolved.max_num_seqs, resolved.max_num_batched_tokens)
    target = CapturedShape(1 + resolved.max_drafts, max_tokens, max_mixed_tokens)
    return [target, CapturedShape(PASS_QUERIES, max_pass_tokens)]


def _max_mixed_tokens(model: ModelConfig, resolved: Resolved, ranks: OneRank = ONE_RANK) -> int:
    """Return the limit of captured steps with prompts, the same on all ranks. It is 0 if their GPUs differ: the tiles
    of such a step depend on the GPU, and with them whether a step fits, which all ranks must decide alike."""
    if resolved.device.type != "cuda":
        return 0
    max_tokens = max_mixed_tokens(model, resolved, card_of_device(torch.cuda.get_device_name(resolved.device)))
    if ranks.size > 1:
        size = torch.cuda.get_device_properties(resolved.device).multi_processor_count
        are_alike = ranks.least(size) == -ranks.least(-size)
        max_tokens = ranks.least(max_tokens if are_alike else 0)
    return max_tokens


def _capture_steps(
    runner: ModelRunner,
    draft: ModelRunner | None,
    resolved: Resolved,
    shapes: list[CapturedShape],
    log: Callable[[str], None],
) -> None:
    """Capture the target's plain decoding, draft verification and small mixed steps, and the draft model's passes."""
    for each, shape in zip((runner, draft), shapes):
        if each is None or each.decoder.kernels.graph_attention is None:
            continue
        each.capture_steps(
            CudaCapture(),
            max_num_seqs=resolved.max_num_seqs,
            **shape._asdict(),
            log=lambda done, total: log(f"capturing steps, {done} of {total}"),
        )


def _shared(pages: KVPages) -> dict[str, str | int]:
    """Return the settings of pages that layers with and without a window share."""
    return {"kv_page_tokens": pages.page_size, "kv_window": pages.window or 0}


def _cache_size(config: EngineConfig, resolved: Resolved, page_bytes: int, step_bytes: int) -> tuple[int, int]:
    """Return the number of pages, and of sequences, which may be fewer than `resolved` has if each has states."""
    pages, num_seqs = resolved.kv_pages, resolved.max_num_seqs
    need = num_seqs * pages.num_pages(resolved.max_model_len)
    if pages.window is not None:  # the windows of prompts that a step computes are longer
        need += resolved.max_num_batched_tokens // pages.block_size
    budget = kv_budget_bytes(
        resolved.device,
        config.kv_cache_memory_bytes,
        need * page_bytes + (num_seqs + resolved.num_snapshots) * resolved.state_bytes,
        config.gpu_memory_utilization,
        step_bytes,
    )
    if (of_one := resolved.state_bytes) > 0:
        length, own = resolved.max_model_len, replace(pages, page_bytes=page_bytes)
        fitting = limit_states(budget, of_one, own, length, num_seqs)
        if config.max_num_seqs is not None and (num_seqs + resolved.num_snapshots) * of_one + 2 * page_bytes > budget:
            raise ConfigError(
                f"engine.max_num_seqs = {num_seqs}: the states of a row take {shown_bytes(of_one)}, and KV cache and "
                f"states have {shown_bytes(budget)}; use at most {fitting}, or raise engine.kv_cache_memory_bytes"
            )
        resolved = replace(resolved, max_num_seqs=config.max_num_seqs or fitting)
        num_seqs = resolved.max_num_seqs
        budget -= (num_seqs + resolved.num_snapshots) * of_one
    num_pages = budget // page_bytes
    if num_pages < 2:
        raise ConfigError(
            f"a KV cache of {budget} bytes is smaller than two blocks of {page_bytes} bytes; raise "
            "engine.kv_cache_memory_bytes"
        )
    return num_pages, num_seqs


def _fit_length(config: EngineConfig, resolved: Resolved, num_pages: int) -> int:
    """Return max_model_len, lowered to the KV cache's capacity if the user set none. Raises ConfigError if it was set
    and does not fit."""
    capacity = resolved.kv_pages.max_tokens(num_pages)
    if resolved.max_model_len <= capacity:
        return resolved.max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"engine.max_model_len = {config.max_model_len} does not fit the KV cache of {capacity} tokens; lower "
            "it or raise engine.kv_cache_memory_bytes"
        )
    return capacity
