"""llama.cpp through its server. Written from its documentation; this file was not yet run against llama.cpp.

`--peer llama.cpp=/path/to/folder` with `llama-server` and one model `*.gguf` of the checkpoint that is measured. Made
beforehand by llama.cpp's own tools, since the conversion knows only published tokenizers; its weights (Q4_0, Q8_0, F16)
are llama.cpp's and stand in the file's name. Requests go to the server's slots as slots get free.
"""

import atexit
import glob
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

START_S = 300


def load(task):
    folder = task["place"]
    models = sorted(glob.glob(os.path.join(folder, "*.gguf")))
    if len(models) != 1:
        raise SystemExit(f"{folder}: expected one *.gguf of the measured checkpoint, found {len(models)}")
    slots = min(task["max_num_seqs"], max(len(requests) for requests in task["sets"].values()))
    threads = str(task["threads"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.path.join(folder, "llama-server"), "--model", models[0], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(slots), "--cont-batching"]
    command += ["--ctx-size", str(slots * task["max_model_len"]), "--batch-size", "2048"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    _wait(server, f"{url}/health")

    def complete(request):
        body = {
            "prompt": request["prompt_token_ids"],
            "n_predict": request["max_tokens"],
            "temperature": 0.0,
            "ignore_eos": request["ignore_eos"],
            "cache_prompt": task["shared_prefixes"],
            "return_tokens": True,
        }
        asked = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)["tokens"]

    pool = ThreadPoolExecutor(slots)

    def run(requests):
        return list(pool.map(complete, requests))

    atexit.register(server.terminate)
    return run, {"llama.cpp": os.path.basename(models[0]), "slots": str(slots)}


def _wait(server, url):
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"llama-server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    server.terminate()
    raise SystemExit(f"llama-server did not answer in {START_S} s")
