"""A job with a row function, for `python -m tests.faults.steps --row-function`; as a module of its own its driver."""

import asyncio
import hashlib
import json
import sys
from collections import Counter
from typing import Any

from pipeline.config import load_job
from pipeline.engine.completion import Completion
from pipeline.errors import PipelineError
from pipeline.job.actor.tokenize import row_seed, step_seed
from pipeline.job.running.run import run_job
from tests.faults.steps import KINDS, Flow, text_of_row
from tests.job.conftest import FAKES
from tests.job.fake_engine import answer

COLUMNS = {"best": "string", "rounds": "int32"}


async def flow(row: dict[str, Any], generate: Any) -> dict[str, Any]:
    """Repair a draft until a check agrees, up to three times; then count the votes of three branches at once."""
    draft, rounds = (await generate()).text, 0
    while rounds < 3 and (await generate(f"{draft} ok? {row['text']}", max_tokens=2)).text != "0":
        rounds += 1
        draft = (await generate(f"{row['text']} {draft} again", temperature=0.5)).text
    votes = await asyncio.gather(*(vote(generate, draft, name) for name in "aab"))
    return {"best": " ".join(votes), "rounds": rounds}


async def vote(generate: Any, draft: str, name: str) -> str:
    reason = await generate(f"{draft} {name}", temperature=0.5)
    return (await generate(f"{draft} {name} {reason.text}", temperature=0.5)).text


def expected(row: int) -> dict[str, Any]:
    """Return the values of a row, whose requests are computed one after the other."""
    made: Counter[str] = Counter()

    async def generate(prompt: str | None = None, **sampling: Any) -> Completion:
        text = f"Say {text_of_row(row)}" if prompt is None else prompt
        digest = hashlib.blake2b(json.dumps([prompt, sampling]).encode(), digest_size=16).hexdigest()
        seed = step_seed(0, "f0.parquet", row, digest, made[digest]) if prompt else row_seed(0, "f0.parquet", row)
        made[digest] += 1
        tokens = answer(list(text.encode()), seed, sampling.get("max_tokens", 4))
        return Completion(row, [], str(tokens[0] % KINDS), "stop", 0)

    values = asyncio.run(flow({"text": text_of_row(row)}, generate))
    # two branches make equal requests, so either may have the first answer
    return {"best": sorted(values["best"].split()), "rounds": values["rounds"]}


FLOW = Flow(
    sections={},
    driver="tests.faults.row_function",
    max_requests=1 + 3 + 3 + 6,
    expected=expected,
    found=lambda row: {"best": sorted(row["best"].split()), "rounds": row["rounds"]},
)

if __name__ == "__main__":
    try:
        run_job(load_job(sys.argv[1]), backend=FAKES, row_fn=flow, version="1", columns=COLUMNS)
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
