"""Model folders of GGUF files: what the rest of the program reads instead of a GGUF file's header.

A folder of the cache of models has config.json, the tokenizer, which transformers converts, gguf.json, which lists
the tensors for `weights/gguf.py`, and links to the files. Its name hashes the files' paths, sizes and times, so a file
that is replaced gets a new folder. Reading a header takes seconds, which a machine spends once per file.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from pipeline.checkpoints.cache import cache_folder, disk_errors, entry_lock
from pipeline.checkpoints.file_checks import GGUF_TABLE, checked_file, split_files
from pipeline.errors import ModelError
from pipeline.weights.gguf import BLOCK_TYPES, FLOAT_TYPES

EXTRA = "pip install 'parquet-batch-inference[gguf]'"
_VERSION = 2  # of the contents of these folders
_TYPES = (*FLOAT_TYPES, *BLOCK_TYPES)
_ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3", "starcoder2", "gemma2")},
    **{"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"},
}
"""Families by ggml's name of their architecture."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_NUM_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

_START, _SHORT, _SPACES = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TITLE, _CAPITALS = f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPLITS = {
    "llama-bpe": rf"{_SHORT}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_SPACES}",
    "qwen2": rf"{_SHORT}|{_START}\p{{L}}+|\p{{N}}|{_OTHER}[\r\n]*|{_SPACES}",
    "tekken": rf"{_TITLE}|{_CAPITALS}|\p{{N}}|{_OTHER}[\r\n/]*|{_SPACES}",
    "gpt-4o": rf"{_TITLE}{_SHORT}?|{_CAPITALS}{_SHORT}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACES}",
    "smollm": "digits",
    "gpt-2": "",
}
"""Regular expression that splits a text before byte pairs are merged, as in the publishers' tokenizer.json, by ggml's
name of the rule; empty: that of GPT-2, which tokenizers has built in; digits: the same, after splitting off each
digit."""
_SAME_SPLIT = {
    **dict.fromkeys(("llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), "qwen2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("mpt", "olmo", "jais", "phi-2", "trillion"), "gpt-2"),
}
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Rules of tokenizers that take a piece which is a token without merging its bytes."""

_Metadata = Callable[[str], Any]
"""Value of a key of a file's header without the architecture's prefix `<arch>.`; None if the file has no such key."""


def gguf_folder(file: Path, log: Callable[[str], None] | None = None) -> Path:
    """Return the model folder of a GGUF file, or of one of the files of a split one. Raises ModelError if the file is
    not a supported checkpoint, EnvironmentFailed if the disk fails."""
    log = log or (lambda text: None)
    files = [_existing(file.parent / name) for name in split_files(file.name)]
    identity = [f"{_VERSION} {version('transformers')}"]
    for each in files:
        found = each.stat()
        identity.append(f"{each.resolve()} {found.st_size} {found.st_mtime_ns}")
    cache = cache_folder(log=log)
    entry = cache / f"gguf-{hashlib.sha256(chr(10).join(identity).encode()).hexdigest()[:32]}"
    if entry.is_dir():
        return entry
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with entry_lock(cache / f".{entry.name}.lock"):
            if not entry.is_dir():
                log(f"reading {file.name}: its header is converted once per machine")
                _make(entry, files)
    return entry


def _existing(path: Path) -> Path:
    try:
        return checked_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None


def _make(entry: Path, files: Sequence[Path]) -> None:
    temporary = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        _write(temporary, files)
        for file in files:
            os.symlink(file.resolve(), temporary / file.name)
        os.rename(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, files: Sequence[Path]) -> None:
    """Write the model's files into `folder`. Raises ModelError."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(f"{files[0]}: GGUF files need the package gguf; install it with {EXTRA}") from None
    try:
        readers = [GGUFReader(file) for file in files]
    except Exception as error:  # the library raises many kinds for a malformed file
        raise ModelError(f"{files[0].parent}: not a valid GGUF file, or cut off ({error})") from None
    try:
        values = _metadata(readers[0], files[0])
        table = _table(readers, files, values)
        config = _config(values, table, readers)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{files[0]}: a field of the header is missing or malformed ({error})") from None
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(files[0].parent), gguf_file=files[0].name)
        tokenizer.save_pretrained(str(folder))
        split = _byte_pair_split(files[0], values)
        if split is not None:
            saved = folder / "tokenizer.json"
            saved.write_text(json.dumps(_with_split(json.loads(saved.read_text(encoding="utf-8")), split)))
    except ModelError:
        raise
    except Exception as error:  # transformers passes on whatever its converters raise
        raise ModelError(f"{files[0]}: transformers cannot convert its tokenizer ({error})") from None
    if any(tensor["type"] in BLOCK_TYPES for tensor in table["tensors"]):
        config["quantization_config"] = {"quant_method": "gguf"} | _types(table["tensors"])
    ends = _ends(tokenizer, values)
    for name, content in (
        ("config.json", config),
        (GGUF_TABLE, table),
        ("generation_config.json", {"eos_token_id": ends}),
    ):
        (folder / name).write_text(json.dumps(content))


def _metadata(reader: Any, file: Path) -> _Metadata:
    """Return a function that reads the header. Raises ModelError for an unsupported architecture."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture not in _ARCHITECTURES or (value(f"{architecture}.expert_count") and "moe" not in architecture):
        kind = f"{architecture} with experts" if architecture in _ARCHITECTURES else repr(architecture)
        raise ModelError(
            f"{file}: general.architecture = {kind}: expected one of {', '.join(_ARCHITECTURES)}; use the model's "
            "safetensors checkpoint, which may be supported"
        )
    return lambda key: value(key) if key.startswith(("general.", "tokenizer.")) else value(f"{architecture}.{key}")


def _table(readers: Sequence[Any], files: Sequence[Path], values: _Metadata) -> dict[str, Any]:
    """Return the contents of gguf.json. Shapes are (outputs, inputs), for experts (experts, outputs, inputs)."""
    tensors, ends = [], {}
    for reader, file in zip(readers, files, strict=True):
        for tensor in reader.tensors:
            kind, start, num_bytes = tensor.tensor_type.name, int(tensor.data_offset), int(tensor.n_bytes)
            if tensor.name.startswith("rope_"):
                continue
            if kind not in _TYPES:
                raise ModelError(
                    f"{file}: tensor {tensor.name} is {kind}: expected one of {', '.join(_TYPES)}. Types of "
                    "IQ and TQ and MXFP4 have no kernels here; use another file of the same model, such as Q4_K_M"
                )
            shape = [int(size) for size in reversed(tensor.shape)]
            if tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1:
                shape = [1, *shape]
            tensors.append(
                {"name": tensor.name, "type": kind, "shape": shape, "start": start, "num_bytes": num_bytes}
                | {"file": len(ends)}
            )
            if start + num_bytes > file.stat().st_size:
                raise ModelError(f"{file}: tensor {tensor.name} ends after the end of the file: it is cut off")
        ends[file.name] = max((t["start"] + t["num_bytes"] for t in tensors if t["file"] == len(ends)), default=0)
    architecture = values("general.architecture")
    heads = [values("attention.head_count"), values("attention.head_count_kv") or values("attention.head_count")]
    return {
        "files": ends,
        "tensors": tensors,
        "heads": heads,
        "permuted_heads": dict(zip(("attn_q", "attn_k"), heads, strict=True)) if architecture == "llama" else {},
        "norms_have_offset": architecture in ("gemma2", "gemma3"),
    }


def _types(tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the types of the embedding and the head, and the number of weights of each type of all other matrices."""
    by_name, sizes = {tensor["name"]: tensor["type"] for tensor in tensors}, dict[str, int]()
    embedding = by_name.get("token_embd.weight")
    for tensor in tensors:
        if len(tensor["shape"]) > 1 and tensor["name"] not in ("token_embd.weight", "output.weight"):
            sizes[tensor["type"]] = sizes.get(tensor["type"], 0) + prod(tensor["shape"])
    return {"sizes": sizes, "embedding": embedding, "head": by_name.get("output.weight", embedding)}


def _config(values: _Metadata, table: dict[str, Any], readers: Sequence[Any]) -> dict[str, Any]:
    """Return the contents of config.json, after llama.cpp's converter, which writes the header."""
    for key in ("embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count"):
        if type(values(key)) is not int:
            raise ValueError(f"{key} = {values(key)!r:.80}, expected an integer")
    shapes = {tensor["name"]: tensor["shape"] for tensor in table["tensors"]}
    architecture, hidden, heads = values("general.architecture"), values("embedding_length"), table["heads"][0]
    head_dim = values("attention.key_length") or hidden // heads
    window, experts = values("attention.sliding_window"), values("expert_count")
    config = {
        "model_type": _ARCHITECTURES[architecture],
        "dtype": "bfloat16",
        "vocab_size": shapes.get("token_embd.weight", [0])[0],
        "hidden_size": hidden,
        "intermediate_size": values("feed_forward_length"),
        "num_hidden_layers": values("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": table["heads"][1],
        "head_dim": head_dim,
        "max_position_embeddings": values("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(values, readers),
    }
    epsilon = values("attention.layer_norm_rms_epsilon") or values("attention.layer_norm_epsilon")
    config["norm_epsilon" if architecture == "starcoder2" else "rms_norm_eps"] = epsilon
    rotated = values("rope.dimension_count") or head_dim
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if architecture == "phi3":
        config["original_max_position_embeddings"] = values("rope.scaling.original_context_length")
    if architecture == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    if architecture in ("gemma2", "gemma3"):
        config |= _gemma(config, values)
    elif window:
        config["sliding_window"] = window
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": values("expert_used_count")}
        config |= {"moe_intermediate_size": values("expert_feed_forward_length")}
        config |= {"norm_topk_prob": architecture == "qwen3moe"}
        if (shared := shapes.get("blk.0.ffn_up_shexp.weight")) is not None:
            config["shared_expert_intermediate_size"] = shared[0]
    return config


def _gemma(config: dict[str, Any], values: _Metadata) -> dict[str, Any]:
    """Return the options of Gemma 2 and 3, of which the header lacks some: llama.cpp recognizes the models of 27B, with
    their scale of attention scores, by their number of layers, and knows which layers have a window."""
    num_layers, is_gemma3 = config["num_hidden_layers"], values("general.architecture") == "gemma3"
    is_27b = num_layers == _NUM_LAYERS_OF_27B[values("general.architecture")]
    every = 6 if is_gemma3 else 2  # layers, of which the last has no window
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]
    options = {
        "sliding_window": values("attention.sliding_window"),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "attn_logit_softcapping": values("attn_logit_softcapping"),
        "final_logit_softcapping": values("final_logit_softcapping"),
        "layer_types": kinds,
    }
    if is_gemma3:
        local = {"rope_type": "default", "rope_theta": values("rope.freq_base_swa") or 10000.0}
        options["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return options


def _rope(values: _Metadata, readers: Sequence[Any]) -> dict[str, Any]:
    """Return the options of rotary positions: factors of frequencies are tensors (llama3, longrope), others are in the
    header."""
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": values("rope.freq_base") or 10000.0}
    factors = {t.name: t.data.tolist() for reader in readers for t in reader.tensors if t.name.startswith("rope_")}
    original = values("rope.scaling.original_context_length") or values("context_length")
    short = factors.get("rope_factors_short.weight", factors.get("rope_freqs.weight"))
    kind, factor = values("rope.scaling.type"), values("rope.scaling.factor")
    if short is not None:
        base |= {"rope_type": "longrope", "short_factor": short, "original_max_position_embeddings": original}
        base |= {"long_factor": factors.get("rope_factors_long.weight", short), "factor": 1.0}
        return base | {"attention_factor": values("rope.scaling.attn_factor") or 1.0}
    if kind in ("linear", "yarn") and factor:
        base |= {"rope_type": kind, "factor": factor}
        return base | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
    return base


def _byte_pair_split(file: Path, values: _Metadata) -> str | None:
    """Return the name of the rule that splits a text; None for a tokenizer of another kind. Transformers converts each
    with the rule of GPT-2, which gives other tokens for digits and spaces. Raises ModelError for an unknown one."""
    rule = values("tokenizer.ggml.pre")
    if values("tokenizer.ggml.model") != "gpt2" or rule in (None, "default"):
        return None
    if rule not in _SPLITS and rule not in _SAME_SPLIT:
        known = ", ".join(sorted((*_SPLITS, *_SAME_SPLIT)))
        raise ModelError(
            f"{file}: tokenizer.ggml.pre = {rule!r}: expected one of {known}; use the model's safetensors checkpoint"
        )
    return rule


def _with_split(tokenizer: dict[str, Any], rule: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the rule that splits a text."""
    split = _SPLITS[_SAME_SPLIT.get(rule, rule)]
    steps: list[dict[str, Any]] = []
    if split == "digits":
        steps.append({"type": "Digits", "individual_digits": True})
    elif split:
        steps.append({"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    is_own = split in ("", "digits")
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": is_own})
    model = tokenizer["model"] | {"ignore_merges": rule in _WHOLE_WORDS}
    return tokenizer | {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _ends(tokenizer: Any, values: _Metadata) -> list[int]:
    """Return the ids that end a sequence: those of the header, and the tokens with which the chat template ends a
    turn, which headers often lack."""
    ends = {values(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    vocabulary = tokenizer.get_added_vocab()
    ends |= {vocabulary[text] for text in _TURN_ENDS if text in template and text in vocabulary}
    return sorted(int(each) for each in ends)
