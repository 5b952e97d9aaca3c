"""`pipeline bench gpu`: a session on a card."""

import sys
from typing import Any

import click

from pipeline.cli.commands.bench.options import print_told, shared_options, typed
from pipeline.cli.console import answers, json_flag, say
from pipeline.cli.options import Renamed
from pipeline.errors import PipelineError


@click.command("gpu")
@click.option("--budget", default="10m", show_default=True, metavar="TIME",
              help="The session ends within this time, such as 9m40s.")  # fmt: skip
@click.option("--output", cls=Renamed, old="--out", default="gpu-session", show_default=True, metavar="DIR",
              help="Where archives of results, traces and compiled kernels go, at most 8 files of 16 MiB.")  # fmt: skip
@click.option("models", "--model", multiple=True, metavar="SHAPE|PATH",
              help="As of bench engine: the first is measured as a whole. May be repeated; else "
              "llama3-8b-awq and qwen3-0.6b.")  # fmt: skip
@click.option("--device", default="cuda", show_default=True, metavar="cuda[:N]|cpu")
@shared_options(dtype="auto")
@click.option("--sections", default="", metavar="NAME,NAME",
              callback=lambda context, option, text: tuple(filter(None, text.split(","))),
              help="These sections or tasks alone, such as steps,linears-llama3-8b-awq.")  # fmt: skip
@click.option("is_follow_up", "--follow-up", is_flag=True,
              help="The second session: compute-sanitizer, ncu, tiles; on the same machine.")  # fmt: skip
@click.option("caches", "--cache", multiple=True, metavar="FILE",
              help="triton-cache.tar.gz of an earlier session. May be repeated.")  # fmt: skip
@shared_options(peers=(), folder=None)
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

    request = SessionRequest(budget_s=parse_budget(budget), command=typed(), **options)
    told = request.run(say)
    print_told(told, as_json)
    if told.failed:
        sys.exit(PipelineError.exit_code)
