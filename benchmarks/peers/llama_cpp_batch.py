"""llama.cpp through llama-cpp-python, one step for all sequences. Run with llama-cpp-python 0.3.36.

Arguments: a GGUF file, threads, context size. Each line of the input is JSON, prompts (lists of token ids) and a number
of tokens to generate; the answer is seconds. Tokens are not sampled: each step is fed fixed ones.
"""

import ctypes
import json
import sys
import time


def main():
    import llama_cpp as lib  # pyright: ignore[reportMissingImports]

    path, threads, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = size, 4096, 512, 64
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(4096, 0, 1)

    def step(tokens):
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wants_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants_logits
            batch.seq_id[i][0] = sequence
        assert lib.llama_decode(context, batch) == 0

    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        began = time.monotonic()
        for sequence, ids in enumerate(prompts):
            step([(token, i, sequence, i == len(ids) - 1) for i, token in enumerate(ids)])
        for n in range(num_tokens - 1):
            step([(100 + n, len(ids) + n, sequence, True) for sequence, ids in enumerate(prompts)])
        print(time.monotonic() - began, flush=True)


main()
