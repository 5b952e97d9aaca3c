"""Checkpoints of named shapes with random weights, for benchmarks without a real model.

A shape's speed does not depend on the values of its weights, so random weights suffice; completions are meaningless.
A checkpoint is written once into a cache folder from fixed seeds, with up to one shard in memory, and renamed when it
is complete. A vocabulary of 32,000 tokens is smaller than the real model's; larger ones have the real size. The
tokenizer is the demonstration model's, padded with numbered words.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.locate import locate_model
from pipeline.checkpoints.quantizer_files import QUANTIZER_FILES
from pipeline.demo import demo_model
from pipeline.errors import ConfigError, OutputError
from pipeline.machine.caches import cache_root
from pipeline.model.config import read_config
from pipeline.model.load import Checkpoint
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize, ExpertSize, Weights
from pipeline.weights.awq import SUFFIXES, AwqFormat
from pipeline.weights.tensor_reader import StoredLinear

SHARD_BYTES = 512 << 20
GROUP = 128
SEED = 20_261_121
VERSION = 3  # part of the cache key: increment it when the written files change


@dataclass(frozen=True)
class Shape:
    """Sizes and model type of a decoder."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    rope_theta: float
    norm_eps: float
    max_position: int
    vocab: int = 32_000
    experts: int = 0
    top_k: int = 0

    def config(self, awq: bool) -> dict[str, Any]:
        """Return config.json as transformers 5 writes it."""
        name = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[self.model_type]
        config: dict[str, Any] = {
            "architectures": [f"{name}ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_position,
            "model_type": self.model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": 0,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }
        if self.experts:
            config |= {"num_experts": self.experts, "num_experts_per_tok": self.top_k, "norm_topk_prob": True,
                       "moe_intermediate_size": self.intermediate}  # fmt: skip
        if awq:
            config["quantization_config"] = {
                "bits": 4,
                "group_size": GROUP,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            }
        return config

    def linears(self) -> list[tuple[str, int, int]]:
        """Return the name in the layer, inputs and outputs of each linear of a layer, except the router."""
        q, kv, h, f = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        return [
            ("self_attn.q_proj", h, q),
            ("self_attn.k_proj", h, kv),
            ("self_attn.v_proj", h, kv),
            ("self_attn.o_proj", q, h),
            *(
                (f"{prefix}.{name}", inputs, outputs)
                for prefix in ([f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"])
                for name, inputs, outputs in (("gate_proj", h, f), ("up_proj", h, f), ("down_proj", f, h))
            ),
        ]

    @property
    def size(self) -> DecoderSize:
        """Sizes for the cost model (`pipeline.roofline`)."""
        experts = ExpertSize(self.layers, self.experts, self.top_k, self.intermediate) if self.experts else None
        sizes = self.hidden, self.intermediate, self.layers, self.heads, self.kv_heads, self.head_dim, self.vocab
        return DecoderSize(*sizes, experts=experts)


SHAPES = {
    "tiny": Shape("llama", 256, 512, 2, 4, 2, 64, False, 10_000.0, 1e-5, 2_048, vocab=2_048),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, True, 1_000_000.0, 1e-6, 40_960),
    "llama-8b": Shape("llama", 4096, 14_336, 32, 32, 8, 128, False, 500_000.0, 1e-5, 131_072),
    "qwen3-8x0.1b": Shape("qwen3_moe", 1024, 2048, 16, 16, 8, 64, True, 1_000_000.0, 1e-6, 40_960, experts=8, top_k=2),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 2048, 768, 48, 32, 4, 128, False, 1_000_000.0, 1e-6, 40_960, vocab=151_936, experts=128, top_k=8
    ),
    "llama3-8b": Shape("llama", 4096, 14_336, 32, 32, 8, 128, False, 500_000.0, 1e-5, 131_072, vocab=128_256),
    "llama-70b": Shape("llama", 8192, 28_672, 80, 64, 8, 128, False, 500_000.0, 1e-5, 131_072, vocab=128_256),
}
NAMES = (*SHAPES, *(f"{name}-awq" for name in SHAPES))


def model_size(name: str) -> tuple[DecoderSize, Weights]:
    """Return the sizes and weights of a shape, without writing it, or of a checkpoint."""
    if name in NAMES:
        weights = replace(AWQ, group_size=GROUP) if name.endswith("-awq") else DENSE
        return SHAPES[name.removesuffix("-awq")].size, weights
    config = read_config(locate_model(name))
    return config.size, config.weights_on_card()


@dataclass(frozen=True)
class BenchModel:
    """Checkpoint folder to measure, and its description."""

    folder: Path
    description: str


def bench_model(name: str, folder: str | None = None, log: Callable[[str], None] = lambda text: None) -> BenchModel:
    """Return the checkpoint `name`: a shape of NAMES, `demo`, `demo:target-awq`, a path or a Hugging Face id.

    Writes a missing shape into `folder`, or into the cache by default. Raises OutputError when it cannot be written,
    ModelError for a missing checkpoint.
    """
    if name not in NAMES:
        return BenchModel(locate_model(name), f"model {name}")
    shape, awq = SHAPES[name.removesuffix("-awq")], name.endswith("-awq")
    kind = f"random weights{' (AWQ int4, groups of 128)' if awq else ''}"
    root = Path(os.path.expanduser(folder)) if folder is not None else cache_root() / "bench"
    target = root / f"{name}-{_digest(shape)}"
    if not target.is_dir():
        log(f"writing a random checkpoint of shape {name} to {target}")
        _write_atomically(target, lambda folder: write_shape(folder, shape, awq))
    return BenchModel(target, f"shape {name}, {kind}, vocabulary {shape.vocab:,}")


def shape_config(name: str) -> Path:
    """Return the folder of a shape without its weights, for engines that draw their own."""
    target = cache_root() / "bench" / f"{name}-{_digest(SHAPES[name])}-config"
    if not target.is_dir():
        _write_atomically(target, lambda folder: _write_config(folder, SHAPES[name], awq=False))
    return target


def write_shape(folder: Path, shape: Shape, awq: bool) -> None:
    """Write config, weights and tokenizer of a shape into an empty folder."""
    _write_config(folder, shape, awq)
    _write_shards(folder, _tensors(shape, awq))


def _write_config(folder: Path, shape: Shape, awq: bool) -> None:
    folder.joinpath("config.json").write_text(json.dumps(shape.config(awq), indent=2))
    folder.joinpath("generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    _write_tokenizer(folder, shape.vocab)


def dequantized(folder: Path, dtype: torch.dtype, log: Callable[[str], None] = lambda text: None) -> Path:
    """Return the cache folder with an AWQ checkpoint's weights as plain tensors of `dtype`, written once.

    Engines without AWQ kernels compute the same model from it.
    """
    awq, name = read_config(folder).quantization, str(dtype).removeprefix("torch.")
    if not isinstance(awq, AwqFormat) or awq.version != "gemm":
        raise ConfigError(f"{folder}: not an AWQ checkpoint with the gemm layout")
    target = derived(folder, name)
    if target.is_dir():
        return target

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        checkpoint = Checkpoint(folder)
        for tensor in sorted(checkpoint.home):
            prefix, _, suffix = tensor.rpartition(".")
            if suffix == "qweight":
                packed = checkpoint.read(tensor)
                stored = StoredLinear(prefix, (packed.shape[1] * 8, packed.shape[0]), checkpoint)
                yield f"{prefix}.weight", awq.read_linear(stored).dequantize(dtype)
            elif suffix not in SUFFIXES:
                yield tensor, checkpoint.read(tensor).to(dtype)

    def write(destination: Path) -> None:
        config = read_json(folder / "config.json")
        config.pop("quantization_config", None)
        destination.joinpath("config.json").write_text(json.dumps(config | {"dtype": name}))
        replaced = ("config.json", *QUANTIZER_FILES)
        for file in folder.iterdir():
            if file.is_file() and file.name not in replaced and ".safetensors" not in file.name:
                shutil.copy(file, destination)
        _write_shards(destination, tensors())

    log(f"writing the weights of {folder.name} as {name} to {target}")
    _write_atomically(target, write)
    return target


def derived(folder: Path, kind: str) -> Path:
    """Return the path in the cache of a conversion of a checkpoint, which may not exist yet."""
    tag = hashlib.sha256(f"{folder.resolve()} {VERSION}".encode()).hexdigest()[:8]
    return cache_root() / "bench" / f"{folder.name}-{tag}-{kind}"


def _tensors(shape: Shape, awq: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint in the order of the layers.

    Norms are about 1 and each linear preserves the magnitude of its inputs, so that layers outweigh the embedding.
    Completions then vary instead of repeating one token, which makes comparing them meaningful.
    """
    random, bits = torch.Generator().manual_seed(SEED), np.random.default_rng(SEED)

    def normal(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn((outputs, inputs), generator=random) * inputs**-0.5).to(torch.bfloat16)

    def norm(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=random) + 0.5).to(torch.bfloat16)

    def words(rows: int, columns: int) -> torch.Tensor:
        """Return int32 words of eight uniform values of 0 to 15. Uniform bits need no packing order."""
        return torch.from_numpy(np.frombuffer(bytearray(bits.bytes(rows * columns // 2)), dtype=np.int32)).view(
            rows, columns // 8
        )

    def linear(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, torch.Tensor]]:
        if not awq:
            yield f"{name}.weight", normal(outputs, inputs)
            return
        groups = inputs // GROUP
        # uniform values of 0..15 have a standard deviation of 4.6
        scales_GN = (0.5 + torch.rand((groups, outputs), generator=random)) * (inputs**-0.5 / 4.6)
        yield f"{name}.qweight", words(inputs, outputs)
        yield f"{name}.qzeros", (words(groups, outputs) & 0x33333333) + 0x66666666  # 6 to 9
        yield f"{name}.scales", scales_GN.to(torch.float16)

    yield "model.embed_tokens.weight", normal(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(shape.hidden)
        yield f"{prefix}.post_attention_layernorm.weight", norm(shape.hidden)
        if shape.experts:
            yield f"{prefix}.mlp.gate.weight", normal(shape.experts, shape.hidden)
        if shape.model_type.startswith("qwen3"):
            yield f"{prefix}.self_attn.q_norm.weight", norm(shape.head_dim)
            yield f"{prefix}.self_attn.k_norm.weight", norm(shape.head_dim)
        for name, inputs, outputs in shape.linears():
            yield from linear(f"{prefix}.{name}", inputs, outputs)
    yield "model.norm.weight", norm(shape.hidden)
    if not shape.tied:
        yield "lm_head.weight", normal(shape.vocab, shape.hidden)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= SHARD_BYTES:
            flush()
            held = 0
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_tokenizer(folder: Path, vocab: int) -> None:
    source = demo_model("target")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    words |= {f"Ġ{number:05d}": number for number in range(max(words.values()) + 1, vocab)}
    folder.joinpath("tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "tokenizer_config.json", folder)


def _digest(shape: Shape) -> str:
    text = json.dumps([VERSION, SEED, asdict(shape)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Fill a temporary folder and rename it to `target`. Another process may create `target` first."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise OutputError(f"{target}: cannot write the checkpoint ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
