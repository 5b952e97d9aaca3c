"""Driver of a fake peer: it computes nothing, prints noise on standard output, and fails if the model is named so."""

import os
import sys


def load(task):
    print("a library's banner")
    if task["model"] == "broken":
        sys.exit("no such instruction set")
    num_requests = []

    def run(requests):
        print("progress: 100%")
        num_requests.append(len(requests))
        if task["model"] == "mortal" and len(num_requests) > 1:
            os._exit(7)
        return [[request["prompt_token_ids"][0]] * request["max_tokens"] for request in requests]

    settings = {"threads": os.environ["OMP_NUM_THREADS"], "dtype": task["dtype"], "sets": str(len(task["sets"]))}
    return run, settings
