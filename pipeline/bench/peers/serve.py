"""Serve a peer in its environment, line by line: `python serve.py DRIVER TASK.json`.

The task is a JSON object with the fields of `peer.PeerTask` and `place`, what the user gave for the peer. Its `sets`
are name -> a list of {"prompt_token_ids": [...], "max_tokens": n, "ignore_eos": true}. Greedy. The driver module has

    load(task) -> (run, about)    run(requests) -> their generated token ids;  about: versions and settings

After loading and the set "warm-up", one line of JSON {"ready": about}; then for each name of a set on standard input
one line {"set": name, "wall_s": seconds, "token_ids": [[...], ...]}. Ends with its standard input.
"""

import importlib
import json
import os
import sys
import time


def main(driver, path):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get among the answers
    with open(path) as file:
        task = json.load(file)
    run, about = importlib.import_module(driver).load(task)
    run(task["sets"]["warm-up"])
    print(json.dumps({"ready": about}), file=answers)
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        token_ids = run(task["sets"][name])
        wall_s = time.perf_counter() - start
        print(json.dumps({"set": name, "wall_s": wall_s, "token_ids": token_ids}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
