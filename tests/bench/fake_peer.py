"""A peer's driver for tests. It computes nothing, chatters on standard output, and fails where its name says so."""

import os
import sys


def load(task):
    print("a library's banner")
    if task["place"].endswith("broken"):
        sys.exit("no such instruction set")
    asked = []

    def run(requests):
        print("progress: 100%")
        asked.append(len(requests))
        if task["place"].endswith("mortal") and len(asked) > 1:
            os._exit(7)
        return [[request["prompt_token_ids"][0]] * request["max_tokens"] for request in requests]

    about = {"threads": os.environ["OMP_NUM_THREADS"], "dtype": task["dtype"], "sets": str(len(task["sets"]))}
    return run, about
