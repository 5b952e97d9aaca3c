"""llama.cpp through the server that xllamacpp's wheel holds. Run with xllamacpp 2026.10.11549 and gguf 0.19 on AVX2.

`--peer llama.cpp=/path/to/environment/bin/python`, with the packages xllamacpp and gguf. The checkpoint is written as
GGUF into the task's work folder, once: an AWQ one as Q4_0, which are 4 bits in groups of 32 rounded from its
dequantized weights, so of about the same size and not of the same values, with embedding and head in 16 bit as AWQ has
them; others as bfloat16. llama.cpp rounds activations to 8 bits for Q4_0 and keeps keys and values in float16. Its own
conversion knows published tokenizers only; here tokens go in and out as numbers, so the names in the file mean nothing.
Requests go to the server's slots as slots get free.
"""

import glob
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

MAX_SLOTS = 64  # each has a context of its own set apart, and a thread here that waits for it

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
    if not os.path.exists(path):
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
    params.cache_ram_mib = 0  # prompts of ended requests are not kept
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

    def run(requests, server=server):  # the server ends when no reference to it is left
        return list(pool.map(complete, requests))

    about = {"xllamacpp": xllamacpp.__version__, "weights": weights, "slots": str(slots)}
    return run, about | {"system": xllamacpp.get_system_info()}


def write_gguf(folder, path, quantized):
    """A Llama or Qwen3 checkpoint of plain tensors as GGUF. Raises SystemExit for other families."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy

    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    family = config["model_type"]
    if family not in ("llama", "qwen3"):
        raise SystemExit(f"{folder}: llama and qwen3 checkpoints are written as GGUF, not {family}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{folder}: scaled rope ({rope['rope_type']}) is not written as GGUF")
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
        if family == "llama" and kind in heads_of:  # GGUF's rope pairs neighbours, a checkpoint's pairs the two halves
            halves = array.reshape(heads_of[kind], 2, head_dim // 2, array.shape[1])
            array = numpy.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        name = f"{kind}.weight" if number is None else f"blk.{number}.{kind}.weight"
        if array.ndim == 1:
            writer.add_tensor(name, array)
            continue
        form = gguf.GGMLQuantizationType.BF16
        if quantized:
            form = gguf.GGMLQuantizationType.F16 if number is None else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name):
    """`model.layers.3.mlp.up_proj.weight` -> ffn_up, 3;  `lm_head.weight` -> output, None."""
    place = name.removesuffix(".weight")
    if place in OUTSIDE:
        return OUTSIDE[place], None
    number, _, rest = place.removeprefix("model.layers.").partition(".")
    if rest not in LAYER:
        raise SystemExit(f"{name}: no place for it in GGUF")
    return LAYER[rest], int(number)


def _tensors(folder):
    """Every tensor of the *.safetensors of a folder by name, as float32; read by hand, so that numpy is enough."""
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
