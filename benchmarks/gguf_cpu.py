"""Compare this engine with llama.cpp on one GGUF file and the same cores: one request alone, and a batch.

    python -m benchmarks.gguf_cpu model.gguf --peer /envs/llama/bin/python --rounds 3

--peer: the Python of an environment with llama-cpp-python, built for this processor. Each round runs, in alternating
order, this engine in float32, the same with int8 activations, and llama.cpp, which rounds activations to 8 bits for
quantized weights. Each is timed for the prompts with one token, then for other prompts with all tokens; the difference
is decoding. Drafts are off. llama.cpp keeps keys and values in float16, and decodes a batch as one step of all
sequences, without a server and without sampling, which this engine's times include.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.script import json_flag, progress, report, script, shared_options
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.sampling_params import SamplingParams
from pipeline.machine.host import available_cores

Run = Callable[[list[list[int]], int], float]
"""Seconds to read prompts and generate a number of tokens for each."""
DRIVER = Path(__file__).with_name("peers") / "llama_cpp_batch.py"
LLAMA_CPP = "llama.cpp"


def _ours(engine: Engine) -> Run:
    def run(prompts: list[list[int]], num_tokens: int) -> float:
        began = time.monotonic()
        engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return time.monotonic() - began

    return run


def _llama_cpp(stack: ExitStack, python: str, model: str, threads: int, size: int) -> Run:
    command = [python, str(DRIVER), model, str(threads), str(size)]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(process.terminate)

    def run(prompts: list[list[int]], num_tokens: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([prompts, num_tokens]) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return run


@script(__doc__)
@click.argument("model")
@click.option("--peer", required=True, metavar="PYTHON", help="Python of an environment with llama-cpp-python.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--batch", type=click.IntRange(1, 64), default=32, show_default=True, help="Requests of the batch.")
@shared_options(rounds=3, threads=None)
@json_flag
def main(
    model: str, peer: str, prompt_tokens: int, output_tokens: int, batch: int, rounds: int, threads: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    use_threads(threads)
    length = prompt_tokens + output_tokens
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": length,
        "speculation": "off",
        "num_threads": threads,
    }
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name, activations in (("float32", "none"), ("int8 activations", "int8")):
            engine = stack.enter_context(Engine(EngineConfig(model, activation_dtype=activations, **options), progress))
            engine.warm_up()
            runs[name] = _ours(engine)
        runs[LLAMA_CPP] = _llama_cpp(stack, peer, model, threads or available_cores(), 64 * length)
        seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for number, order in enumerate(alternating(list(runs), rounds + 1)):
            for name in order:
                for size in (1, batch):
                    progress(f"{'warm-up' if number == 0 else f'round {number}'}: {name}, {size} requests")
                    first = [[100 + number] + [200 + i] * (prompt_tokens - 1) for i in range(size)]
                    other = [[900 + number] + [400 + i] * (prompt_tokens - 1) for i in range(size)]
                    prompt_s = runs[name](first, 1)
                    decode_s = runs[name](other, output_tokens) - prompt_s
                    if number:
                        seconds.setdefault((name, size), []).append((prompt_s, decode_s))
        machine = machine_facts()
    rows, figures = [], {}
    for size in (1, batch):
        theirs = seconds[LLAMA_CPP, size]
        for name in runs:
            found = seconds[name, size]
            prompts = Spread.from_values([size * prompt_tokens / prompt_s for prompt_s, _ in found])
            decoding = Spread.from_values([size * (output_tokens - 1) / decode_s for _, decode_s in found])
            faster = [
                None if name == LLAMA_CPP else ratio([pair[i] for pair in theirs], [pair[i] for pair in found])
                for i in (0, 1)
            ]
            figures[f"{name}, {size}"] = {"prompt_tokens_per_s": prompts.median, "tokens_per_s": decoding.median}
            shown = (f"{each.to_text()} x" if each is not None else None for each in faster)
            rows.append((size, name, prompts.to_text(0), *[next(shown)], decoding.to_text(1), *[next(shown)]))
    columns = "requests >8 | engine <17 | prompt tok/s >16 | of llama.cpp >18 | decode tok/s >20 | of llama.cpp >18"
    lines = [
        f"{Path(model).name}: prompts of {prompt_tokens} tokens, {output_tokens} generated; {rounds} rounds, medians.",
        facts_to_text(machine),
        "",
        *table(columns, rows),
    ]
    report("gguf_cpu", figures, lines, as_json)


if __name__ == "__main__":
    sys.exit(main())
