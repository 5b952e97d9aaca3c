"""The command line: parse, call, print, exit code. Everything else is imported by the command that needs it.

Standard output holds results, standard error everything on the way. With `--json` standard output is one JSON
object and nothing else, also for errors (`generate`: one for each prompt). Exit codes are those of `errors.py`.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO

import click

from pipeline import __version__
from pipeline.errors import (
    ConfigError,
    EnvironmentFailed,
    Interrupted,
    PipelineError,
    TooManyRowErrors,
)

if TYPE_CHECKING:
    from pipeline.config import JobConfig

EPILOG = """\b
Start here:
  pipeline validate jobs/summarize.yaml      what the job is; nothing is run
  pipeline run jobs/summarize.yaml           run it, or go on where it stopped
  pipeline report out/summarize              what it cost
  pipeline generate --input prompts.txt      a handful of prompts, without a job
  pipeline doctor jobs/summarize.yaml        whether this machine can run it

\b
Exit codes:
  0   finished; error rows within run.max_error_rate
  1   stopped by run.max_error_rate; can be resumed
  2   the job file, the input or the output has to be changed
  3   the environment failed (disk, store, actors); can be resumed
  70  a defect of this program
  75  interrupted; the same command goes on
"""


def _overlays(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that change a job file on the way in."""
    for option in reversed(
        [
            click.option("sets", "--set", metavar="KEY=VALUE", multiple=True,
                         help="Change one key of the job file: sampling.max_tokens=32. May be repeated."),
            click.option("overlays", "--config", metavar="FILE", multiple=True,
                         help="Lay a file of the same form over the job file: configs/h100.yaml."),
            click.option("--limit", type=click.IntRange(min=1), metavar="N",
                         help="Only the first N rows. Another N is another job, with an output of its own."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


_json_flag = click.option("as_json", "--json", is_flag=True, help="Print one JSON object, and nothing else.")


def _answers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps standard output for the results, and turns a command's errors into a message and an exit code, and
    with --json into the answer."""

    @wraps(command)
    def answer(*args: Any, as_json: bool, **options: Any) -> None:
        click.get_current_context().obj = _claim_stdout()
        _answer(lambda: command(*args, as_json=as_json, **options), as_json)

    return answer


def _answer(command: Callable[[], None], as_json: bool) -> None:
    try:
        command()
    except PipelineError as error:
        if as_json:
            _print_json({"error": _error_json(error)})
        _print_error(error)
        sys.exit(error.exit_code)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="pipeline")
def cli() -> None:
    """Prompts in Parquet to completions in Parquet, and what they cost.

    A job is one YAML file. A run that was stopped goes on when the same command is given again: every input
    row is in the output exactly once, as a completion or as an error row.
    """


@cli.command()
@click.argument("job", metavar="JOB.yaml")
@_overlays
@click.option("--accept-numerics", is_flag=True,
              help="Go on although dtype or device differ from the output's first run.")  # fmt: skip
@click.option("--retry-failed", is_flag=True,
              help="Compute the error rows of what is written again; each part is replaced whole.")  # fmt: skip
@_json_flag
@_answers
def run(
    job: str,
    sets: tuple[str, ...],
    overlays: tuple[str, ...],
    limit: int | None,
    accept_numerics: bool,
    retry_failed: bool,
    as_json: bool,
) -> None:
    """Run a job, or go on with it where it stopped.

    \b
    Examples:
      pipeline run jobs/summarize.yaml
      pipeline run jobs/summarize.yaml --limit 20 --set output.path=out/try
      pipeline run my.yaml --config configs/h100.yaml --set run.actors=8
      pipeline run my.yaml --json > report.json
      pipeline run my.yaml --retry-failed        only the rows that became errors, once more

    Parts appear in output.path as they are finished, _SUCCESS when all are there, and the report in
    output.path/_pipeline/report.md. Ctrl-C once lets finished work be written; then the same command goes on.
    """
    from pipeline.config import load_job

    _run(load_job(job, sets, overlays, limit), as_json, accept_numerics, retry_failed)


def _run(config: "JobConfig", as_json: bool, accept_numerics: bool = False, retry_failed: bool = False) -> None:
    def run_here() -> None:
        _answer(lambda: _run_here(config, as_json, accept_numerics, retry_failed), as_json)

    if click.get_current_context().obj is None:  # no real standard output: what a fork prints would be lost
        return run_here()
    from pipeline.guard import guarded

    guarded(lambda: _with_exit_codes(run_here))


def _run_here(config: "JobConfig", as_json: bool, accept_numerics: bool, retry_failed: bool) -> None:
    from pipeline.config import without_password
    from pipeline.job.run import run_job
    from pipeline.progress import progress_for

    with progress_for() as progress:
        report = run_job(config, accept_numerics=accept_numerics, retry_failed=retry_failed, progress=progress)
    if as_json:
        _print_json(report.to_json())
        return
    output = without_password(config.output.path).rstrip("/")
    _print(f"{report.to_text()}\n\n  Results     {output}\n  Report      {output}/_pipeline/report.md")


@cli.command()
@click.argument("job", metavar="JOB.yaml")
@_overlays
@_json_flag
@_answers
def validate(job: str, sets: tuple[str, ...], overlays: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Say what a job is, with its first prompt, or everything that is wrong with it.

    \b
    Examples:
      pipeline validate jobs/summarize.yaml
      pipeline validate my.yaml --config configs/l4.yaml --set input.path=other.parquet

    Looks at the job file, the input's footers and the output folder. Loads no model and writes nothing.
    """
    from pipeline.config import JobFileError, load_job
    from pipeline.examine import describe, examine

    config = load_job(job, sets, overlays, limit)
    found = examine(config)
    if found.mistakes:
        raise JobFileError(found.mistakes)
    if found.failures:
        raise EnvironmentFailed("\n".join(found.failures))
    if as_json:
        _print_json(found.to_json())
    else:
        _print(describe(found, config))


# flag, key of a job file, type, help
_GENERATE_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--max-tokens", "sampling.max_tokens", int, "Most tokens of a completion; 256 when left out."),
    ("--temperature", "sampling.temperature", float, "0, the default, takes the likeliest token each time."),
    ("--top-p", "sampling.top_p", float, "Only the likeliest tokens that together have this probability."),
    ("--top-k", "sampling.top_k", int, "Only the K likeliest tokens; 0 is off."),
    ("--min-p", "sampling.min_p", float, "Only tokens at least this likely, relative to the likeliest."),
    ("--repetition-penalty", "sampling.repetition_penalty", float, "Above 1: what was said becomes less likely."),
    ("--seed", "sampling.seed", int, "Of the random numbers; the same seed draws the same ones."),
    ("--device", "engine.device", str, "auto, cpu, cuda or cuda:N."),
    ("--dtype", "engine.dtype", str, "auto, bfloat16, float16 or float32."),
)


def _generate_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for flag, _, kind, text in reversed(_GENERATE_FLAGS):
        command = click.option(flag, type=kind, help=text)(command)
    return command


@cli.command()
@click.option(
    "--model", default="demo:target-awq", show_default=True, help="A folder, a Hugging Face id, or demo:target-awq."
)
@click.option(
    "--input",
    "place",
    metavar="PATH",
    help="A text file (a prompt a line), a .jsonl file, - for standard input; or Parquet.",
)
@click.option("--prompt", help='The prompt, or a template over the input: "Summarize: {text}".')
@click.option("--chat", is_flag=True, help="Send prompts through the model's chat template.")
@click.option("--system", help="A system message; implies --chat.")
@click.option("--output", metavar="PATH", help="A new .jsonl or .parquet file; of Parquet input, a folder.")
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it is there.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End a completion before this text. May be repeated.")
@_generate_flags
@click.option(
    "sets",
    "--set",
    metavar="KEY=VALUE",
    multiple=True,
    help="Any other key of a job file: engine.max_num_seqs=8. May be repeated.",
)
@click.option("as_json", "--json", is_flag=True, help="Print one JSON object a line, one for each prompt.")
@_answers
def generate(
    model: str,
    place: str | None,
    prompt: str | None,
    chat: bool,
    system: str | None,
    output: str | None,
    overwrite: bool,
    limit: int | None,
    stop: tuple[str, ...],
    sets: tuple[str, ...],
    as_json: bool,
    **sampling: Any,
) -> None:
    """Complete a handful of prompts, without a job file.

    \b
    Examples:
      pipeline generate --input prompts.txt
      pipeline generate --prompt "Why is the sky blue?" --model Qwen/Qwen3-4B --chat
      pipeline generate --input rows.jsonl --prompt "Summarize: {text}" --output out.jsonl
      cat prompts.txt | pipeline generate --json --max-tokens 32
      pipeline generate --input 'data/*.parquet' --prompt "Summarize: {text}" --output out/new

    Of a .jsonl file without --prompt the key prompt, text or messages (a chat) is sent. Results come in the
    order of the input, to standard output or, whole at the end, to --output. A prompt that fails does not stop
    the others: its error is its result, and the exit code is 1.

    Parquet input is a job as with `pipeline run`: --output is its folder, the same command goes on after an
    interruption, and with --json the report is printed.
    """
    from pipeline.config import job_from_flags
    from pipeline.generate import Saved, complete, is_dataset, prompt_of_dataset, read_prompts

    flags = {"model.path": (model, "--model"), **_sampling_flags(sampling, stop)}
    if chat or system is not None:
        flags["prompt.chat"] = ({} if system is None else {"system": system}, "--chat")
    if place is not None and is_dataset(place):
        if output is None:
            raise ConfigError("--output: Parquet input is a job, whose results need a folder: --output out/my-job")
        if overwrite:
            raise ConfigError("--overwrite: a job's output is never overwritten; choose a new folder for --output")
        flags |= {"input.path": (place, "--input"), "output.path": (output, "--output")}
        flags |= {"name": (Path(output).name, "--output"), **prompt_of_dataset(place, prompt)}
        if limit is not None:
            flags["input.limit"] = (limit, "--limit")
        _run(job_from_flags(flags, sets), as_json)
        return
    saved = None if output is None else Saved(output, overwrite)
    prompts = read_prompts(place, prompt, limit)
    flags |= {"input.path": (place or "-", "--input"), "output.path": (output or "-", "--output"), **prompts.key}
    done = complete(
        job_from_flags(flags, sets),
        prompts,
        saved,
        show=lambda answer: _print(answer.to_json() if as_json else answer.to_text()),
        say=_say,
    )
    if as_json and saved is not None:
        _print_json({**vars(done), "output": output})
    if done.failed:
        sys.exit(TooManyRowErrors.exit_code)


def _sampling_flags(given: dict[str, Any], stop: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Keys of a job file, each with its value and flag."""
    flags: dict[str, tuple[Any, str]] = {"sampling.max_tokens": (256, "--max-tokens")}
    for flag, key, _, _ in _GENERATE_FLAGS:
        value = given[flag.removeprefix("--").replace("-", "_")]
        if value is not None:
            flags[key] = (value, flag)
    return flags | {"sampling.stop": (list(stop), "--stop")} if stop else flags


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@_json_flag
@_answers
def status(place: str, as_json: bool) -> None:
    """Say how far a job is, from its output folder.

    \b
    Examples:
      pipeline status out/summarize
      pipeline status jobs/summarize.yaml
    """
    from pipeline.output import doubt_of, open_output, status_of
    from pipeline.progress import status_line

    store = open_output(place)
    now = status_of(store)
    doubt = doubt_of(store, now)
    if as_json:
        _print_json({**now.to_json(), "output": store.path, "stale": doubt})
        return
    _print(f"{place}: {'stale' if doubt else now.outcome}")
    _print(f"  {status_line(now)}")
    _print(f"  run {now.run_id}, {now.units:,} units written, {now.actors} actors")
    if doubt:
        _print(f"  {doubt}")


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@_json_flag
@_answers
def report(place: str, as_json: bool) -> None:
    """Print what a job did and cost, over all its runs, killed ones included.

    \b
    Examples:
      pipeline report out/summarize
      pipeline report jobs/summarize.yaml --json
    """
    from pipeline.output import open_output, report_of

    told = report_of(open_output(place))
    if as_json:
        _print_json(told.to_json())
    else:
        _print(told.to_text())


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@click.option("--to", required=True, metavar="DIR", help="A new folder, or an fsspec url.")
@click.option(
    "--order",
    type=click.Choice(["parts", "input"]),
    default="parts",
    show_default=True,
    help="input: rows in the order of (source_file, source_row).",
)
@click.option("--target-size", default="256MB", show_default=True, metavar="SIZE", help="About how large a file is.")
@_json_flag
@_answers
def compact(place: str, to: str, order: Literal["parts", "input"], target_size: str, as_json: bool) -> None:
    """Merge the parts of a finished job into a few large files in a new folder.

    \b
    Examples:
      pipeline compact out/summarize --to out/summaries
      pipeline compact my.yaml --to s3://bucket/labels --order input --target-size 1GB

    The job's output is read and left as it is; nothing is replaced anywhere. Rows are counted against the job's
    _SUCCESS, and the new folder gets its own when all are there. After an interruption the same command goes on.
    An s3:// folder takes its options from the job file, or from the environment.
    """
    from pipeline.compact import MAX_FILE_BYTES
    from pipeline.compact import compact as merge
    from pipeline.config import parse_bytes
    from pipeline.data.parts import PartStore
    from pipeline.output import open_output, output_of

    size = parse_bytes(target_size)
    if size is None or not 0 < size <= MAX_FILE_BYTES:
        raise ConfigError(f"--target-size {target_size}: expected a size of at most 4 GiB, such as 256MB")
    storage = output_of(place)[1] if "://" in to else {}
    done = merge(open_output(place), PartStore(to, storage), order, size, _say)
    if as_json:
        _print_json(done.to_json())
    else:
        _print(done.to_text())


@cli.command()
@click.argument("job", metavar="[JOB.yaml]", required=False)
@click.option("--model", metavar="PATH", help="A checkpoint's folder, an fsspec url or a Hugging Face id.")
@click.option("--input", "source", metavar="PATH", help="Parquet to read.")
@click.option("--output", metavar="PATH", help="Where results are to go; files are created there and removed.")
@_json_flag
@_answers
def doctor(job: str | None, model: str | None, source: str | None, output: str | None, as_json: bool) -> None:
    """Say whether this machine can run a job, and what to do where it cannot.

    \b
    Examples:
      pipeline doctor jobs/summarize.yaml
      pipeline doctor                            this machine alone
      pipeline doctor --model models/Qwen3-4B --output s3://bucket/results

    Looks at versions, devices, memory, disks and kernels; at a model's files; at whether a store is reached and
    creates files only where none stands. Loads no weights and downloads nothing. --model, --input and --output
    replace those of the job file. Leaves with 3 when something failed, with 2 when only what was given is wrong.
    """
    from pipeline.config import load_job
    from pipeline.doctor import Subject, diagnose, exit_code

    subject = Subject.of_job(load_job(job)) if job is not None else Subject()
    subject = subject.replacing(model, source, output)
    checks, group = [], ""
    for check in diagnose(subject):
        checks.append(check)
        if not as_json:
            _print((f"\n{check.group}\n" if check.group != group else "") + check.to_text())
            group = check.group
    count = {state: sum(check.state == state for check in checks) for state in ("ok", "warning", "failed")}
    if as_json:
        _print_json({**count, "checks": [check.to_json() for check in checks]})
    else:
        _print(f"\n{count['failed']} failed, {count['warning']} warnings")
    sys.exit(exit_code(checks))


@cli.group()
def bench() -> None:
    """Measure this program on this machine."""


@bench.command("plan")
@click.option(
    "--scale",
    "scales",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 10, 100),
    show_default=True,
    metavar="N",
    help="How many times --files. May be repeated.",
)
@click.option("--files", type=click.IntRange(min=1), default=100, show_default=True, help="Files at scale 1.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Fresh processes each.")
@click.option("--folder", metavar="DIR", help="Where the files are made and removed; else the temporary folder.")
@_json_flag
@_answers
def plan_of_a_large_job(scales: tuple[int, ...], files: int, repeats: int, folder: str | None, as_json: bool) -> None:
    """Time and memory to plan a large job, and to find out what is left of it.

    \b
    Examples:
      pipeline bench plan
      pipeline bench plan --scale 1 --repeats 1 --json

    Makes Parquet files whose footers claim as many rows as large files have, up to 10,000 files of 10^9 rows, and
    removes them again. Takes some minutes, and about 1 GB of disk.
    """
    from pipeline.bench.plan import bench_plan

    _print_bench(bench_plan(scales=scales, files=files, repeats=repeats, folder=folder, say=_say), as_json)


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
    """A table for people and JSON as the last line; with --json that line alone."""
    if not as_json:
        _print(told.to_text() + "\n")
    _print_json(told.to_json())


@bench.command("engine")
@_bench_options(model="qwen3-0.6b", requests=48, rounds=3)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=120, show_default=True,
              help="Median length of the prompts; the longest have some times as many.")  # fmt: skip
@_bench_options(output_tokens="16-128")
@click.option("--batch-sizes", metavar="N,N", default="4,8,16", show_default=True, callback=_parse_sizes,
              help="Static batches to try with transformers.generate; none leaves it out.")  # fmt: skip
@click.option("--reports", is_flag=True, help="The demonstration job's rows instead of random prompts (--model demo).")
@_bench_options(threads=None, dtype="auto", peers=(), folder=None)
@_json_flag
@_answers
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

    --peer takes vllm and openvino with the Python of their environment, and llama.cpp with a folder of its server
    and a *.gguf of the same checkpoint. These drivers were written from documentation and not yet run.
    """
    from pipeline.bench.engine import bench_engine
    from pipeline.bench.peer import parse_peer

    _print_bench(bench_engine(peers=[parse_peer(peer) for peer in peers], say=_say, **options), as_json)


@bench.command("scheduler")
@click.option("sequences", "--sequences", multiple=True, type=click.IntRange(min=1), metavar="N", show_default=True,
              default=(64, 256, 1024, 4096), help="Sequences that run at once. May be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Steps of a round.")
@_bench_options(rounds=3)
@click.option("--rows", type=click.IntRange(min=1), default=10_000, show_default=True, help="Rows of the long run.")
@_json_flag
@_answers
def host_time_of_a_step(as_json: bool, **options: Any) -> None:
    """Time of a step outside of the model: planning, building its input, sampling, handling what came out.

    \b
    Examples:
      pipeline bench scheduler
      pipeline bench scheduler --sequences 1024 --rounds 1
    """
    from pipeline.bench.scheduler import bench_scheduler

    _print_bench(bench_scheduler(say=_say, **options), as_json)


@bench.command("job")
@_bench_options(
    model="demo:target-awq", rows=512, rounds=3, dtype="auto", output_tokens="16-128", peers=(), folder=None
)
@_json_flag
@_answers
def job_against_the_engine(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """A whole job, Parquet to Parquet, against the engine alone on the same rows.

    \b
    Examples:
      pipeline bench job
      pipeline bench job --model qwen3-0.6b --rows 64 --rounds 1

    --peer takes ray-llm with the Python of its environment; that driver was written from documentation.
    """
    from pipeline.bench.job import bench_job

    if unnamed := [peer for peer in peers if "=" not in peer]:
        raise ConfigError(f"--peer {unnamed[0]}: expected NAME=PATH")
    named = dict(peer.split("=", 1) for peer in peers)
    _print_bench(bench_job(peers=named, say=_say, **options), as_json)


@bench.command("ladder")
@_bench_options(model="demo", requests=48)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests of a static batch.")
@_bench_options(rounds=3, output_tokens="16-128", dtype="auto", threads=None, folder=None)
@_json_flag
@_answers
def ladder_of_batching(as_json: bool, **options: Any) -> None:
    """What each idea of the engine is worth: one request at a time, static, dynamic and continuous batching, prefixes.

    \b
    Examples:
      pipeline bench ladder
      pipeline bench ladder --model qwen3-0.6b --requests 16 --rounds 1
    """
    from pipeline.bench.ladder import bench_ladder

    _print_bench(bench_ladder(say=_say, **options), as_json)


def main() -> None:
    """The console script: no traceback for what a person can change, and always a meaningful exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a narrow locale must not end a run
    _with_exit_codes(lambda: cli.main(standalone_mode=False))


def _with_exit_codes(call: Callable[[], None]) -> None:
    try:
        call()
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ConfigError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        _leave_unread(sys.stdout)
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo("\nThis is a defect of this program, please report it with the lines above.", err=True)
        sys.exit(PipelineError.exit_code)


def _claim_stdout() -> TextIO | None:
    """A stream to standard output for results alone. From here on, until the process ends, whatever libraries,
    their C code and child processes print there goes to standard error.

    None where standard output is not a real file: a test's.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
    except OSError:
        return None
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return open(kept, "w", encoding=sys.stdout.encoding, errors="replace")


def _print(text: str) -> None:
    """Print a result."""
    results: TextIO | None = click.get_current_context().obj
    try:
        click.echo(text, file=results)
    except BrokenPipeError:
        _leave_unread(results or sys.stdout)


def _leave_unread(stream: TextIO) -> NoReturn:
    """Whoever reads has enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains at exit
    sys.exit(1)


def _say(text: str) -> None:
    """Say something on the way."""
    click.echo(text, err=True)


def _print_json(value: dict[str, Any]) -> None:
    _print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _error_json(error: PipelineError) -> dict[str, Any]:
    mistakes = [vars(mistake) for mistake in getattr(error, "mistakes", ())]
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code,
        "mistakes": mistakes,
    }


def _print_error(error: PipelineError) -> None:
    count = len(getattr(error, "mistakes", ()))
    click.echo(f"{count} mistakes:\n\n{error}" if count > 1 else f"Error: {error}", err=True)
    if isinstance(error, TooManyRowErrors | EnvironmentFailed | Interrupted):
        click.echo("Nothing that was written is lost: the same command goes on from there.", err=True)


if __name__ == "__main__":
    main()
