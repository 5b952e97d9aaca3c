"""`python -m pipeline.bench.gpu.session`: what `pipeline bench gpu` does, where click is not installed."""

import argparse
import shlex
import signal
import sys

from pipeline.bench.gpu.session.request import SessionRequest, parse_budget
from pipeline.errors import Interrupted, PipelineError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench.gpu.session", description=__doc__)
    parser.add_argument("--budget", required=True, metavar="TIME", help="such as 580 (seconds) or 9m40s")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the archives and report.txt go")
    parser.add_argument("--model", action="append", default=[], metavar="SHAPE|PATH", help="may be repeated")
    parser.add_argument("--device", default="cuda", metavar="cuda[:N]|cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--sections", default="", metavar="NAME,NAME", help="these alone, by section or task")
    parser.add_argument("--follow-up", action="store_true", help="the second session: compute-sanitizer, ncu, tiles")
    parser.add_argument("--cache", action="append", default=[], metavar="FILE", help="triton-cache.tar.gz of before")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="vllm in an environment")
    parser.add_argument("--folder", metavar="DIR", help="where checkpoints of shapes are written; else the cache")
    parser.add_argument("--work", metavar="DIR", help="where sections write; else in the temporary folder")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, with --device cpu")
    told = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Interrupted.exit_code))  # what is packed then stays
    try:
        request = SessionRequest(
            budget_s=parse_budget(told["budget"]),
            output=told["output"],
            models=tuple(told["model"]),
            device=told["device"],
            dtype=told["dtype"],
            sections=tuple(filter(None, told["sections"].split(","))),
            is_follow_up=told["follow_up"],
            caches=tuple(told["cache"]),
            peers=tuple(told["peer"]),
            folder=told["folder"],
            work=told["work"],
            is_smoke=told["smoke"],
            command=shlex.join(sys.orig_argv),
        )
        report = request.run(lambda text: print(text, flush=True))
    except PipelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(report.to_text())
    return PipelineError.exit_code if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
