"""Run whole jobs: the fixed request sets with variants of the engine, and with vLLM on the same card.

All requests of a set are added at the beginning, as in a job. To compare another setting of the engine, add a line to
VARIANTS.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.contenders import Peer, PeerTask
from benchmarks.gpu.section import Found, Setting, launch_mixed_steps
from benchmarks.measure import facts_to_text, table
from benchmarks.request_sets import RequestSet, find_set, run_requests
from benchmarks.shape_costs import Moment, job_bytes, job_flops, tail_seconds
from benchmarks.shapes import NAMES, bench_model, shape_config
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.startup.memory import free_cpu_bytes
from pipeline.model.config import read_config
from pipeline.roofline.cost_model import Ceilings
from pipeline.roofline.job_simulation import Batching, simulate_job
from pipeline.roofline.kv_pages import KVPages

SETS = ("generation", "summaries", "classification", "shared", "single")
SMOKE_BY = 256, 16  # divisors of the sets' requests and tokens


@dataclass(frozen=True)
class Variant:
    """Variant of the engine. options: of `EngineConfig`. prepare: changes the engine before it runs."""

    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Engine], object] = lambda engine: None


AS_SERVED, FP8 = "as served", "fp8"
VARIANTS = {
    AS_SERVED: Variant(),
    "prompts by kernel": Variant(prepare=launch_mixed_steps),
    FP8: Variant({"activation_dtype": "fp8", "kv_cache_dtype": "fp8"}),
    "4,096 tokens": Variant({"max_num_batched_tokens": 4096}),
    "8,192 tokens": Variant({"max_num_batched_tokens": 8192}),
    "fp8 cache": Variant({"kv_cache_dtype": "fp8"}),
    "fp8 activations": Variant({"activation_dtype": "fp8"}),
    "512 rows, 8,192 tokens": Variant({"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
    "64 rows": Variant({"max_num_seqs": 64}),
    "64 rows, prompts by kernel": Variant({"max_num_seqs": 64}, launch_mixed_steps),
}


VLLM = {"vllm": {}, "vllm, throughput": {"performance_mode": "throughput"}}
# Options of vLLM's own fp8, which it makes of 16-bit weights; random ones need no files.
VLLM_FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8", "load_format": "dummy"}


@dataclass(frozen=True)
class Job:
    """Result of one request set.

    bound_s: lower bound by the cost model at the measured rates. mfu, mbu: FLOPs and bytes of the job over its time, as
    shares of the measured rates. sequences, kv_used: means over steps. tail_s: time at the end with less than half of
    the maximum number of running requests.
    """

    requests: str
    wall_s: float
    bound_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    mfu: float
    mbu: float
    tail_s: float
    num_steps: int
    sequences: float
    kv_used: float
    num_preemptions: int
    num_out_of_memory: int


def jobs(setting: Setting, names: Sequence[str], variant: str) -> Iterator[Found]:
    """Run each request set once, after a warm-up with a few of its requests."""
    found, ran, sets = Found(), list[Job](), _sets(setting, names)
    options: dict[str, Any] = {"max_model_len": max(each.longest for each in sets), **VARIANTS[variant].options}
    folder = bench_model(setting.model).folder
    with Engine(EngineConfig(str(folder), device=str(setting.device), **options), _log) as engine:
        engine.warm_up()
        VARIANTS[variant].prepare(engine)
        for each in sets:
            _run_set(engine, each.smaller(64, 1), "warm-up")
        settings = {key: value for key, value in engine.resolved.items() if not key.startswith("kernel.")}
        head = [f"{setting.model}, {variant}: " + ", ".join(f"{key} {value}" for key, value in settings.items())]
        for each in sets:
            with found.case(each.name):
                head.append(each.to_text())
                ran.append(_job(each, engine, setting))
                found.text = "\n".join([*head, *jobs_to_lines(ran)])
                found.figures = {"model": setting.model, "variant": variant, "engine": dict(engine.resolved)}
                found.figures["jobs"] = [asdict(job) for job in ran]
            yield found


def jobs_to_lines(ran: Sequence[Job]) -> list[str]:
    rows = []
    for job in ran:
        tokens = job.prompt_tokens - job.cached_tokens + job.output_tokens
        rates = job.output_tokens / job.wall_s, tokens / job.wall_s, job.mfu, job.mbu, job.tail_s
        counts = job.num_steps, job.sequences, job.kv_used, job.cached_tokens, job.num_preemptions
        rows.append((job.requests, job.wall_s, job.bound_s, *rates, *counts))
    columns = "requests <14 | seconds >8.2f | bound >7.2f | out/s >8,.0f | all/s >8,.0f | MFU >5.0% | MBU >5.0%"
    counts = "steps >6, | at once >7.0f | KV >4.0% | cached >9, | preempted >9,"
    return table(f"{columns} | tail s >6.2f | {counts}", rows)


def _run_set(engine: Engine, work: RequestSet, round_name: str) -> list[Moment]:
    moments: list[Moment] = []
    batch_sum, start = engine.stats.batch_sum, time.perf_counter()

    def note() -> None:
        nonlocal batch_sum
        batch_sum, sequences = engine.stats.batch_sum, engine.stats.batch_sum - batch_sum
        moments.append(Moment(time.perf_counter() - start, engine.num_unfinished, sequences))

    run_requests(engine, work.round(round_name, engine.runner.vocab_size), True, note)
    return moments


def _job(work: RequestSet, engine: Engine, setting: Setting) -> Job:
    before = replace(engine.stats)
    moments = _run_set(engine, work, "1")
    counted, wall_s = engine.stats.since(before), moments[-1].at_s
    lengths, size, rates = work.lengths(), setting.size, setting.rates
    num_bytes = job_bytes(lengths, size, setting.weights, counted.num_steps, shared_prefix=work.shared_prefix)
    return Job(
        requests=work.name,
        wall_s=wall_s,
        bound_s=_bound_s(work, engine, setting),
        prompt_tokens=sum(each.prompt for each in lengths),
        cached_tokens=counted.cached_tokens,
        output_tokens=sum(each.output for each in lengths),
        mfu=job_flops(lengths, size, counted.cached_tokens) / wall_s / rates.gemm_flops_per_s,
        mbu=num_bytes / wall_s / rates.copy_bytes_per_s,
        tail_s=tail_seconds(moments),
        num_steps=counted.num_steps,
        sequences=counted.batch_sum / counted.num_steps,
        kv_used=counted.kv_used_ppm_sum / counted.num_steps / 1e6,
        num_preemptions=counted.num_preemptions,
        num_out_of_memory=counted.num_out_of_memory,
    )


def _bound_s(work: RequestSet, engine: Engine, setting: Setting) -> float:
    resolved = {name: int(value) for name, value in engine.resolved.items() if isinstance(value, int)}
    block_size = resolved["block_size"]
    blocks_per_page = resolved.get("kv_page_tokens", block_size) // block_size
    pages = KVPages(block_size, 0, resolved.get("kv_window"), blocks_per_page)
    limits = resolved["max_num_seqs"], resolved["max_num_batched_tokens"]
    batching = Batching(*limits, resolved["num_kv_blocks"], pages)
    on_gpu, rates = setting.device.type == "cuda", setting.rates
    memory = torch.cuda.get_device_properties(setting.device).total_memory if on_gpu else free_cpu_bytes()
    ceilings = Ceilings("this device", rates.copy_bytes_per_s, rates.gemm_flops_per_s, memory)
    return simulate_job(work.lengths(), setting.size, setting.weights, ceilings, batching, work.shared_prefix).wall_s


def peer_jobs(setting: Setting, names: Sequence[str], python: str, ours_s: Mapping[str, float]) -> Iterator[Found]:
    """Run the sets with vLLM in each mode, and a shape's sets in its fp8 too.

    ours_s: request set -> seconds of this engine as served. python: of an environment in which `import vllm` works.
    """
    found, sets, config = Found(), _sets(setting, names), read_config(bench_model(setting.model).folder)
    folder = bench_model(setting.model).folder.resolve()
    requests = {"warm-up": [r for each in sets for r in each.smaller(64, 1).round("warm-up", config.vocab_size)]}
    requests |= {each.name: each.round("1", config.vocab_size) for each in sets}
    task = PeerTask(
        model=str(folder),
        dense_model=str(folder),
        quantized=config.quantization is not None,
        dtype=str(setting.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        max_model_len=max(each.longest for each in sets),
        work_folder=str(folder.parent),
        shared_prefixes=True,
        device=str(setting.device),
        sets=requests,
    )
    lines, walls_s = list[str](), dict[str, dict[str, float]]()
    tasks = {name: replace(task, options=options) for name, options in VLLM.items()}
    if setting.model in NAMES:
        dense = str(shape_config(setting.model.removesuffix("-awq")))
        tasks["vllm, fp8"] = replace(task, model=dense, dense_model=dense, quantized=False, options=VLLM_FP8)
    for name, each_task in tasks.items():
        with found.case(name), Peer("vllm", python, each_task) as peer:
            lines.append(f"{setting.model}, {name} ({facts_to_text(peer.settings)}), alone on the card:")
            for each in sets:
                wall_s = peer.run_set(each.name).wall_s
                walls_s.setdefault(name, {})[each.name] = wall_s
                faster = f"; this engine is {wall_s / ours_s[each.name]:.2f}x" if each.name in ours_s else ""
                lines.append(f"{each.name:<15} {wall_s:>8.2f} s{faster}")
                found.text, found.figures = "\n".join(lines), {"model": setting.model, "peers_s": walls_s}
                yield found
    yield found


def _sets(setting: Setting, names: Sequence[str]) -> list[RequestSet]:
    by = SMOKE_BY if setting.is_smoke else (1, 1)
    return [find_set(name).smaller(*by) for name in names]


def _log(text: str) -> None:
    print(text, flush=True)
