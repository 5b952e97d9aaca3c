"""The command line: parse, call, print. Everything else is imported by the command that needs it.

Output, errors and exit codes are `console.py`'s; the benchmarks' commands are `cli/bench.py`'s.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeline import __version__
from pipeline.cli.bench import bench
from pipeline.cli.checkpoints import eval_command, quantize_command
from pipeline.cli.console import answer_of, answers, json_flag, print_json, print_result, say, with_exit_codes
from pipeline.cli.verify import verify_command
from pipeline.errors import ConfigError, EnvironmentFailed, TooManyRowErrors

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
@json_flag
@answers
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
        answer_of(lambda: _run_here(config, as_json, accept_numerics, retry_failed), as_json)

    if click.get_current_context().obj is None:  # no real standard output: what a fork prints would be lost
        return run_here()
    from pipeline.cli.guard import guarded

    guarded(lambda: with_exit_codes(run_here))


def _run_here(config: "JobConfig", as_json: bool, accept_numerics: bool, retry_failed: bool) -> None:
    from pipeline.cli.progress import progress_for
    from pipeline.job.run import run_job
    from pipeline.report.render import text
    from pipeline.stores.redaction import shown_url

    with progress_for() as progress:
        report = run_job(config, accept_numerics=accept_numerics, retry_failed=retry_failed, progress=progress)
    if as_json:
        print_json(report.to_json())
        return
    output = shown_url(config.output.path).rstrip("/")
    print_result(f"{text(report)}\n\n  Results     {output}\n  Report      {output}/_pipeline/report.md")


@cli.command()
@click.argument("job", metavar="JOB.yaml")
@_overlays
@json_flag
@answers
def validate(job: str, sets: tuple[str, ...], overlays: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Say what a job is, with its first prompt, or everything that is wrong with it.

    \b
    Examples:
      pipeline validate jobs/summarize.yaml
      pipeline validate my.yaml --config configs/l4.yaml --set input.path=other.parquet

    Looks at the job file, the input's footers and the output folder. Loads no model and writes nothing.
    """
    from pipeline.config import JobFileError, load_job
    from pipeline.job.validate import describe, examine

    config = load_job(job, sets, overlays, limit)
    found = examine(config)
    if found.mistakes:
        raise JobFileError(found.mistakes)
    if found.failures:
        raise EnvironmentFailed("\n".join(found.failures))
    if as_json:
        print_json(found.to_json())
    else:
        print_result(describe(found, config))


# flag, key of a job file, type, help
_GENERATE_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--max-tokens", "sampling.max_tokens", int, "Most tokens of a completion; 256 when left out."),
    ("--temperature", "sampling.temperature", float, "0, the default, takes the likeliest token each time."),
    ("--top-p", "sampling.top_p", float, "Only the likeliest tokens that together have this probability."),
    ("--top-k", "sampling.top_k", int, "Only the K likeliest tokens; 0 is off."),
    ("--min-p", "sampling.min_p", float, "Only tokens at least this likely, relative to the likeliest."),
    ("--repetition-penalty", "sampling.repetition_penalty", float, "Above 1: what was said becomes less likely."),
    ("--seed", "sampling.seed", int, "Of the random numbers; the same seed draws the same ones."),
    ("--quantization", "model.quantization", str, "int8, int4-rtn or nf4: quantize a 16-bit model on loading it."),
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
@answers
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
        show=lambda answer: print_json(answer.to_json()) if as_json else print_result(answer.to_text()),
        say=say,
    )
    if as_json and saved is not None:
        print_json({**vars(done), "output": output})
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
@json_flag
@answers
def status(place: str, as_json: bool) -> None:
    """Say how far a job is, from its output folder.

    \b
    Examples:
      pipeline status out/summarize
      pipeline status jobs/summarize.yaml
    """
    from pipeline.cli.progress import status_line
    from pipeline.job.read_output import doubt_of, open_output, status_of

    store = open_output(place)
    now = status_of(store)
    doubt = doubt_of(store, now)
    if as_json:
        print_json({**now.to_json(), "output": store.path, "stale": doubt})
        return
    believed = now.outcome if doubt is None else "stale" if now.outcome == "running" else "damaged"
    print_result(f"{place}: {believed}")
    print_result(f"  {status_line(now)}")
    print_result(f"  run {now.run_id}, {now.units:,} units written, {now.actors} actors")
    if doubt:
        print_result(f"  {doubt}")


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@json_flag
@answers
def report(place: str, as_json: bool) -> None:
    """Print what a job did and cost, over all its runs, killed ones included.

    \b
    Examples:
      pipeline report out/summarize
      pipeline report jobs/summarize.yaml --json
    """
    from pipeline.job.read_output import damage_of, open_output, report_of
    from pipeline.report.render import text

    store = open_output(place)
    told = report_of(store)
    doubt = damage_of(store) if told.outcome == "finished" else None
    if as_json:
        print_json({**told.to_json(), "stale": doubt})
        return
    print_result(text(told))
    if doubt:
        print_result(f"\n  {doubt}")


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
@json_flag
@answers
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
    from pipeline.config import parse_bytes
    from pipeline.data.output.compact import MAX_FILE_BYTES
    from pipeline.data.output.compact import compact as merge
    from pipeline.data.output.parts import PartStore
    from pipeline.job.read_output import open_output, output_of

    size = parse_bytes(target_size)
    if size is None or not 0 < size <= MAX_FILE_BYTES:
        raise ConfigError(f"--target-size {target_size}: expected a size of at most 4 GiB, such as 256MB")
    storage = output_of(place)[1] if "://" in to else {}
    done = merge(open_output(place), PartStore(to, storage), order, size, say)
    if as_json:
        print_json(done.to_json())
    else:
        print_result(done.to_text())


@cli.command()
@click.argument("job", metavar="[JOB.yaml]", required=False)
@click.option("--model", metavar="PATH", help="A checkpoint's folder, an fsspec url or a Hugging Face id.")
@click.option("--input", "source", metavar="PATH", help="Parquet to read.")
@click.option("--output", metavar="PATH", help="Where results are to go; files are created there and removed.")
@json_flag
@answers
def doctor(job: str | None, model: str | None, source: str | None, output: str | None, as_json: bool) -> None:
    """Say whether this machine can run a job, and what to do where it cannot.

    \b
    Examples:
      pipeline doctor jobs/summarize.yaml
      pipeline doctor                            this machine alone
      pipeline doctor --model models/Qwen3-4B --output s3://bucket/results

    Of a model it also says what it takes, how many sequences fit beside it and how fast it could be at the most, here
    and on the cards of configs/hardware.yaml, with what the job makes of it: model.quantization, engine.kv_cache_dtype
    and engine.activation_dtype, which not every card has.

    Looks at versions, devices, memory, disks and kernels; at a model's files; at whether a store is reached and
    creates files only where none stands. Loads no weights and downloads nothing. --model, --input and --output
    replace those of the job file. Leaves with 3 when something failed, with 2 when only what was given is wrong.
    """
    from pipeline.config import load_job
    from pipeline.doctor import Setup, diagnose, exit_code, memory_of

    subject = Setup.of_job(load_job(job)) if job is not None else Setup()
    subject = subject.replacing(model, source, output)
    checks, group = [], ""
    for check in diagnose(subject):
        checks.append(check)
        if not as_json:
            print_result((f"\n{check.group}\n" if check.group != group else "") + check.to_text())
            group = check.group
    count = {state: sum(check.state == state for check in checks) for state in ("ok", "warning", "failed")}
    memory = memory_of(subject)
    if as_json:
        told = {"checks": [check.to_json() for check in checks], "memory": None if memory is None else memory.to_json()}
        print_json({**count, **told})
    else:
        if memory is not None:
            print_result(f"\n{memory.to_text()}")
        print_result(f"\n{count['failed']} failed, {count['warning']} warnings")
    sys.exit(exit_code(checks))


cli.add_command(bench)
cli.add_command(eval_command)
cli.add_command(quantize_command)
cli.add_command(verify_command)


def main() -> None:
    """The console script: no traceback for what a person can change, and always a meaningful exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a narrow locale must not end a run
    with_exit_codes(lambda: cli.main(standalone_mode=False))
