"""llama.cpp through the server in xllamacpp's wheel. Run with xllamacpp 2026.10.11549 and gguf 0.19 on AVX2.

Use `--peer llama.cpp=/path/to/environment/bin/python`, an environment with the packages xllamacpp and gguf. A GGUF
model is read as it is; of another the driver writes GGUF once, into the task's work folder. It converts the dequantized
weights of an AWQ checkpoint to Q4_0 (4 bits in groups of 32): about the same size, but not the same values. The
embedding and head stay in 16 bit, as in AWQ. Other checkpoints become bfloat16. llama.cpp rounds activations to 8 bits
for Q4_0 and keeps keys and values in float16. llama.cpp's own converter supports published tokenizers only. Here
prompts and outputs are token ids, so the file's token names are placeholders. Requests wait for a free slot of the
server.
"""

import glob
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

MAX_SLOTS = 64  # each slot reserves its own context, and needs a thread here that waits for it

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def load(task):
    import xllamacpp  # pyright: ignore[reportMissingImports]

    weights = "q4_0" if task["quantized"] else "bf16"
    path = os.path.join(task["work_folder"], f"{weights}.gguf")
    files = sorted(glob.glob(os.path.join(task["model"], "*.gguf")))
    if files:
        path, weights = files[0], os.path.basename(files[0])
    elif not os.path.exists(path):
        os.makedirs(task["work_folder"], exist_ok=True)
        write_gguf(task["dense_model"], path + ".part", quantized=task["quantized"])
        os.rename(path + ".part", path)
    slots = min(MAX_SLOTS, task["max_num_seqs"], max(len(requests) for requests in task["sets"].values()))
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = slots
    params.n_ctx = slots * task["max_model_len"]
    params.n_batch = 2048
    params.cont_batching = True
    params.cache_ram_mib = 0  # do not keep the prompts of finished requests
    params.n_threads_http = slots + 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task["threads"]
    params.port = 0
    server = xllamacpp.Server(params)
    url = f"{server.listening_address}/completion"

    def complete(request):
        body = {
            "prompt": request["prompt_token_ids"],
            "n_predict": request["max_tokens"],
            "temperature": 0.0,
            "ignore_eos": request["ignore_eos"],
            "cache_prompt": task["shared_prefixes"],
            "return_tokens": True,
        }
        call = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(call) as answer:
            return json.load(answer)["tokens"]

    pool = ThreadPoolExecutor(slots)

    def run(requests, server=server):  # the reference keeps the server alive
        return list(pool.map(complete, requests))

    settings = {"xllamacpp": xllamacpp.__version__, "weights": weights, "slots": str(slots)}
    return run, settings | {"system": xllamacpp.get_system_info()}


def write_gguf(folder, path, quantized):
    """Write a Llama or Qwen3 checkpoint of unquantized tensors as GGUF. Raises SystemExit for other families."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy

    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    family = config["model_type"]
    if family not in ("llama", "qwen3"):
        raise SystemExit(f"{folder}: model_type {family}; only llama and qwen3 checkpoints can be written as GGUF")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{folder}: scaled rope ({rope['rope_type']}) is not supported in GGUF here")
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{number}" for number in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    heads_of = {"attn_q": heads, "attn_k": config["num_key_value_heads"]}
    for name, array in _tensors(folder):
        kind, number = _name(name)
        if family == "llama" and kind in heads_of:  # GGUF's rope pairs neighbours, a checkpoint's the halves
            halves = array.reshape(heads_of[kind], 2, head_dim // 2, array.shape[1])
            array = numpy.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        name = f"{kind}.weight" if number is None else f"blk.{number}.{kind}.weight"
        if array.ndim == 1:
            writer.add_tensor(name, array)
            continue
        qtype = gguf.GGMLQuantizationType.BF16
        if quantized:
            qtype = gguf.GGMLQuantizationType.F16 if number is None else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name):
    """Split `model.layers.3.mlp.up_proj.weight` into (ffn_up, 3), and `lm_head.weight` into (output, None)."""
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return OUTSIDE[module], None
    number, _, rest = module.removeprefix("model.layers.").partition(".")
    if rest not in LAYER:
        raise SystemExit(f"{name}: no GGUF name for this tensor")
    return LAYER[rest], int(number)


def _tensors(folder):
    """Yield (name, float32 array) of every tensor in the folder's *.safetensors. Needs numpy only."""
    import numpy

    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = numpy.memmap(path, numpy.uint8, "r", offset=8 + length)
        for name, stored in header.items():
            if name == "__metadata__":
                continue
            start, end = stored["data_offsets"]
            raw = data[start:end]
            if stored["dtype"] == "BF16":
                array = (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            else:
                array = raw.view({"F32": numpy.float32, "F16": numpy.float16}[stored["dtype"]]).astype(numpy.float32)
            yield name, array.reshape(stored["shape"])
