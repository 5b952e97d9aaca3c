"""Run a job's rows through the same engine without Ray. `benchmarks.job` compares the job with this process.

    python -m benchmarks.engine_alone JOB.yaml

Reads, renders, orders and tokenizes rows with the job's own stages, adds all of them to the engine and steps it until
every row has finished. Prints one JSON object. Writes no files.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.job import answer_digest
from pipeline.config import load_job
from pipeline.data.units import window_units
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.job.actor.tokenize import Tokenize
from pipeline.job.planning.actor_specs import resolve_device
from pipeline.job.planning.plan import JobPlan, make_plan
from pipeline.machine.host import available_cores, wall_time


def _requests(plan: JobPlan, tokenize: Tokenize) -> Iterator[Request]:
    """Yield every row in the order of the job's units. A request's row_id is (source file, source row)."""
    for window in plan.windows:
        for unit in window_units(plan.source, window, plan.job.units):
            files, rows = unit.own("source_file").to_pylist(), unit.own("source_row").to_pylist()
            requests, failed = tokenize(unit)
            assert not failed, failed[0]
            for request in requests:
                index = request.row_id
                assert isinstance(index, int)
                yield dataclasses.replace(request, row_id=(files[index], rows[index]))


def main(job: str) -> None:
    config = load_job(job)
    plan = make_plan(config, resolve_device(config))
    timestamps = [time.perf_counter()]
    engine = Engine(plan.job.engine_config(available_cores()))
    engine.warm_up()
    timestamps.append(time.perf_counter())
    requests = list(_requests(plan, plan.job.tokenize(engine.tokenizer, wall_time())))
    timestamps.append(time.perf_counter())
    for request in requests:
        engine.add(request)
    done = []
    while engine.has_unfinished:
        done += engine.step()
    timestamps.append(time.perf_counter())
    load_s, tokenize_s, work_s = (after - before for before, after in pairwise(timestamps))
    steps_us = engine.stats.step_us
    answers = [[*c.row_id, answer_digest(c.text, len(c.token_ids), c.finish_reason)] for c in done]
    result = {
        "load_s": load_s,
        "tokenize_s": tokenize_s,
        "work_s": work_s,
        "idle_s": max(0.0, work_s - steps_us / 1e6),
        "prompt_tokens": engine.stats.prompt_tokens,
        "cached_tokens": engine.stats.cached_tokens,
        "generated_tokens": engine.stats.generated_tokens,
        "dtype": engine.resolved["dtype"],
        "answers": answers,
        "end_s": time.perf_counter() - timestamps[-1],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
