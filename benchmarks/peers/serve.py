"""Serve a peer in its environment, line by line: `python serve.py DRIVER TASK.json`.

The task is a JSON object with the fields of `contenders.PeerTask`. `sets` maps a name to a list of
{"prompt_token_ids": [...], "max_tokens": n, "ignore_eos": true}. Decoding is greedy. The driver module defines

    load(task) -> (run, settings)    run(requests) -> their generated token ids;  settings: versions and settings

After loading and running the set "warm-up", it prints one line of JSON {"ready": settings}. It then reads names of sets
from standard input and prints one line {"set": name, "wall_s": seconds, "token_ids": [[...], ...]} for each. It exits
when standard input closes.
"""

import importlib
import json
import os
import sys
import time


def main(driver, path):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep libraries' prints out of the answers
    with open(path) as file:
        task = json.load(file)
    run, settings = importlib.import_module(driver).load(task)
    run(task["sets"]["warm-up"])
    print(json.dumps({"ready": settings}), file=answers)
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        token_ids = run(task["sets"][name])
        wall_s = time.perf_counter() - start
        print(json.dumps({"set": name, "wall_s": wall_s, "token_ids": token_ids}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
