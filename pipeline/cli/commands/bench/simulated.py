"""Benchmarks that compute nothing: bounds and jobs by the cost model of cards, in simulated time."""

from typing import Any

import click

from pipeline.cli.commands.bench.options import parse_sizes, print_told, shared_options
from pipeline.cli.console import answers, json_flag, say
from pipeline.cli.options import FiniteRange


@click.command("admission")
@click.option("jobs", "--job", multiple=True, metavar="NAME", help="summaries, classification, generation, reasoning, "
              "either, mixed or shared; else all of them. May be repeated.")  # fmt: skip
@click.option("kv_shares", "--kv-share", multiple=True, type=FiniteRange(min=0, min_open=True), metavar="X",
              default=(0.25, 0.5, 1.0), show_default=True, help="The KV cache, as a share of what a full batch of mean "
              "rows holds in the end. May be repeated.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(min=1, max=8192), default=256, show_default=True)
@shared_options(rows=2000)
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

    print_told(bench_admission(say=say, **options), as_json)


@click.command("schedule")
@shared_options(model="llama-8b-awq")
@click.option("cards", "--card", multiple=True, metavar="NAME", help="As of bench roofline; H100, H200, A100, L4 and "
              "RTX 4090 when left out. May be repeated.")  # fmt: skip
@click.option("requests", "--requests", multiple=True, metavar="SET", help="As of bench roofline; else all of them.")
@click.option("--launch-us", type=FiniteRange(min=0), default=250.0, show_default=True,
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
      pipeline bench schedule --launch-us 500 --json

    Nothing is run, no card is needed: the engine's scheduler plans every step of the fixed request sets, the device
    takes what the cost model says, and the host launches the next step meanwhile. Takes some 15 s a card.
    """
    from pipeline.bench.schedule.host import HostTimes
    from pipeline.bench.schedule.simulation import bench_schedule

    print_told(bench_schedule(host=HostTimes(launch_s=launch_us / 1e6), say=say, **options), as_json)


@click.command("cluster")
@click.option("--actors", metavar="N,N", default="1,8,64,256", show_default=True, callback=parse_sizes,
              help="Machines of a pool, one engine each.")  # fmt: skip
@click.option("--rows-per-actor", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--model", default="llama-8b", show_default=True, metavar="SHAPE|PATH", help="As of bench roofline.")
@click.option("--card", default="h100", show_default=True, metavar="NAME", help="As of bench roofline.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="The median.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="The median.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="sampling.max_tokens.")
@click.option("--cold-start-s", type=FiniteRange(min=0), default=60.0, show_default=True,
              help="From a machine's coming to its first step.")  # fmt: skip
@click.option("--hourly-usd", type=FiniteRange(min=0), default=2.5, show_default=True, help="Of a machine.")
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

    print_told(bench_cluster(say=say, **options), as_json)


@click.command("roofline")
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
@click.option("--kernels", type=click.Choice(["measured", "bound"]), default="measured", show_default=True,
              help="At the shares of the data sheet that were measured on one H200, or at the data sheet.")  # fmt: skip
@json_flag
@answers
def bounds_of_cards(
    model: str, cards: tuple[str, ...], requests: tuple[str, ...], kernels: str, as_json: bool, **options: Any
) -> None:
    """What a card would do by the cost model, or at the most: seconds of steps, and of jobs over fixed request sets.

    \b
    Examples:
      pipeline bench roofline
      pipeline bench roofline --model llama-8b-awq --card h100 --requests summaries
      pipeline bench roofline --card h100 --activation-dtype fp8 --kv-cache-dtype fp8
      pipeline bench roofline --kernels bound --paths fastest    bounds, where int4 linears have two paths

    Nothing is run, no card is needed. The cards' figures are their makers' (pipeline/roofline/hardware.yaml). Kernels
    reach the shares of them that were measured on one H200, which other cards are assumed to reach too. With --kernels
    bound the figures are bounds that this engine cannot beat.
    """
    from pipeline.bench.roofline import Serving, bench_roofline
    from pipeline.roofline.shares import BOUND, MEASURED

    reached = BOUND if kernels == "bound" else MEASURED
    print_told(bench_roofline(model, cards, requests, Serving(**options), reached), as_json)
