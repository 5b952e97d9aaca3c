"""OpenVINO GenAI with continuous batching. Run with openvino-genai 2026.4.0, optimum-intel 2.2 and nncf 3.4.

Use `--peer openvino=/path/to/environment/bin/python`, an environment with openvino-genai, and with optimum-intel and
nncf for `optimum-cli`, which converts the checkpoint once, into the task's work folder. The dequantized weights of an
AWQ checkpoint are converted to OpenVINO's own int4 (groups of 128): the same size, but not the same values. The KV
cache and activations use the benchmark's dtype (OpenVINO's default KV cache on CPUs is 8 bit).
"""

import os
import subprocess
import sys


def load(task):
    import numpy
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai  # pyright: ignore[reportMissingImports]

    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[task["dtype"]]
    weights = "int4" if task["quantized"] else {"f32": "fp32"}.get(precision, "fp16")
    folder = os.path.join(task["work_folder"], f"openvino-{weights}")
    if not os.path.exists(os.path.join(folder, "openvino_model.xml")):
        os.makedirs(task["work_folder"], exist_ok=True)
        _export(task["dense_model"], weights, folder)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = task["max_num_seqs"]
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = task["shared_prefixes"]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": task["threads"],
    }
    pipe = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def run(requests):
        inputs, configs = [], []
        for request in requests:
            inputs.append(openvino.Tensor(numpy.array([request["prompt_token_ids"]], dtype=numpy.int64)))
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = request["ignore_eos"]
            if not request["ignore_eos"]:
                config.stop_token_ids = set(task["eos_token_ids"])
            config.do_sample = False
            configs.append(config)
        return [list(result.m_generation_ids[0]) for result in pipe.generate(inputs, configs)]

    settings = {"openvino_genai": openvino_genai.__version__, "weights": weights}
    return run, settings | {key: str(value) for key, value in properties.items()}


def _export(model, weights, folder):
    program = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
    command = [program, "export", "openvino", "--model", model, "--task", "text-generation-with-past"]
    command += ["--weight-format", weights]
    if weights == "int4":
        command += ["--group-size", "128", "--ratio", "1.0"]
    subprocess.run([*command, folder], check=True)
