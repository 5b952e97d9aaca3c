"""Quantized linears with random values, packed value by value apart from the product's own unpacking, each with its
exact float32 weight; and whole checkpoints of them with their dense twins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model_folders import Family, Named, small_config, write_checkpoint, write_tokenizer

Packed = tuple[dict[str, torch.Tensor], np.ndarray]
Pack = Callable[[np.random.Generator, tuple[int, int]], Packed]
"""Map a shape (N, K) to tensors by the last part of their name, and the weight (N, K) in float32."""

CONFIG = small_config(128, 192, 2, 4, 2, initializer_range=0.2, rms_norm_eps=1e-5)


def words(values: np.ndarray, bits: int) -> torch.Tensor:
    """Pack (R, C) into (R, C * bits / 32) int32, the first value in the lowest bits; pad the last word with zeros."""
    rows, columns = values.shape
    parts = 32 // bits
    packed = np.zeros((rows, -(-columns // parts)), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            packed[row, column // parts] |= np.uint32(int(values[row, column]) << bits * (column % parts))
    return torch.from_numpy(packed.view(np.int32).copy())


def drawn(
    rng: np.random.Generator, shape: tuple[int, int], groups: int, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw integers (N, K), zeros and float16 scales (N, G). Zeros cover their whole range."""
    n, k = shape
    q = rng.integers(0, 1 << bits, (n, k))
    zeros = np.full((n, groups), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (n, groups))
    scales = (rng.uniform(0.02, 0.06, (n, groups)) * 16 / (1 << bits)).astype(np.float16)
    return q, zeros, scales


def value(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    return (q - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)


def gptq(bits: int, group_size: int, symmetric: bool, desc_act: bool, version: int) -> Pack:
    """AutoGPTQ's layout; `desc_act` gives each group inputs from everywhere, the same for all linears of K inputs."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        k = shape[1]
        size = k if group_size == -1 else group_size
        q, zeros, scales = drawn(rng, shape, k // size, bits, symmetric)
        group = np.arange(k) // size
        if desc_act:
            group = np.random.default_rng(k).permutation(group)
        parts = 32 // bits
        stored = words(zeros.T, bits).numpy().view(np.uint32)
        if version == 1:
            stored = stored - np.uint32(sum(1 << bits * part for part in range(parts)))
        tensors = {
            "qweight": words(q, bits).t().contiguous(),
            "qzeros": torch.from_numpy(stored.view(np.int32).copy()),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return tensors, value(q, zeros, scales, group)

    return pack


def awq_gemm(group_size: int, zero_point: bool) -> Pack:
    """AutoAWQ's own layout: nibble i of a word is column ORDER[i] of its eight outputs."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(values_RN: np.ndarray) -> torch.Tensor:
        rows, columns = values_RN.shape
        return words(values_RN.reshape(rows, columns // 8, 8)[:, :, order].reshape(rows, columns), 4)

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        k = shape[1]
        q, zeros, scales = drawn(rng, shape, k // group_size, 4, symmetric=not zero_point)
        tensors = {"qweight": interleaved(q.T), "scales": torch.from_numpy(scales.T.copy())}
        if zero_point:
            tensors["qzeros"] = interleaved(zeros.T)
        return tensors, value(q, zeros, scales, np.arange(k) // group_size)

    return pack


def awq_gemv(group_size: int) -> Pack:
    """Pad zeros and scales to the number of group words that AutoAWQ's CUDA kernel reads at a time."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        k = shape[1]
        q, zeros, scales = drawn(rng, shape, k // group_size, 4, symmetric=False)
        width = {128: 8, 64: 16, 32: 32}[group_size]
        padding = -(k // group_size) % width
        tensors = {
            "qweight": words(q, 4),
            "qzeros": words(np.pad(zeros, ((0, 0), (0, padding))), 4),
            "scales": torch.from_numpy(np.pad(scales, ((0, 0), (0, padding)))),
        }
        return tensors, value(q, zeros, scales, np.arange(k) // group_size)

    return pack


def pack_quantized(bits: int, group_size: int | None, symmetric: bool, ordered: bool = False) -> Pack:
    """compressed-tensors' `pack-quantized`; `ordered`: with the g_idx of activation ordering by group."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        k = shape[1]
        size = group_size or k
        q, zeros, scales = drawn(rng, shape, k // size, bits, symmetric)
        group = np.arange(k) // size
        tensors = {
            "weight_packed": words(q, bits),
            "weight_shape": torch.tensor(shape),
            "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).t().contiguous()
        if ordered:
            group = np.random.default_rng(k).permutation(group)
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return tensors, value(q, zeros, tensors["weight_scale"].float().numpy(), group)

    return pack


def int_quantized(symmetric: bool) -> Pack:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        q, zeros, scales = drawn(rng, shape, 1, 8, symmetric)
        tensors = {"weight": torch.from_numpy((q - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return tensors, value(q, zeros, scales, np.zeros(shape[1], dtype=int))

    return pack


def fp8(block: tuple[int, int] | None, scale_name: str, per_output: bool = False) -> Pack:
    """Any e4m3 values but NaN. The scales' block of None is the whole weight, or each output."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        n, k = shape
        codes = rng.integers(0, 127, shape).astype(np.uint8) | (rng.integers(0, 2, shape) << 7).astype(np.uint8)
        weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        rows, columns = block or ((1, k) if per_output else (n, k))
        scales = rng.uniform(1e-4, 4e-4, (-(-n // rows), -(-k // columns))).astype(np.float32)
        stored = scales if block or per_output else scales.reshape(1)
        dense = np.empty(shape, dtype=np.float32)
        for i in range(n):
            for j in range(k):
                dense[i, j] = np.float32(_e4m3(int(codes[i, j]))) * scales[i // rows, j // columns]
        tensors = {"weight": weight, scale_name: torch.from_numpy(stored.copy())}
        if block is None:  # of activations, as a static scheme has it
            tensors["input_scale"] = torch.tensor(0.01)
        return tensors, dense

    return pack


def mxfp4() -> Pack:
    """compressed-tensors' `mxfp4-pack-quantized`: exponents of 2^-7 to 2^-3."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, exponents = rng.integers(0, 16, shape), rng.integers(120, 125, (shape[0], shape[1] // 32))
        tensors = {"weight_packed": nibbles(codes), "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
        return tensors, _fp4_value(codes, 2.0 ** (exponents.astype(np.float32) - 127), 32)

    return pack


def nvfp4(codes_name: str, whole_name: str, divides: bool) -> Pack:
    """Codes with any positive finite e4m3 scale. divides: compressed-tensors, which divides by the whole weight's."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, stored = rng.integers(0, 16, shape), rng.integers(0, 127, (shape[0], shape[1] // 16)).astype(np.uint8)
        scales = np.array([_e4m3(int(code)) for code in stored.flat], dtype=np.float32).reshape(stored.shape)
        whole = np.float32(rng.uniform(2000, 9000)) if divides else np.float32(rng.uniform(1e-4, 5e-4))
        tensors = {
            codes_name: nibbles(codes),
            "weight_scale": torch.from_numpy(stored).view(torch.float8_e4m3fn),
            whole_name: torch.tensor([whole]) if divides else torch.tensor(whole),
            "input_global_scale" if divides else "input_scale": torch.tensor([3.0]),
        }
        return tensors, _fp4_value(codes, scales / whole if divides else scales * whole, 16)

    return pack


def nibbles(values: np.ndarray) -> torch.Tensor:
    """Pack pairs of the last dimension into bytes, the first value in the low bits."""
    return torch.from_numpy((values[..., ::2] | values[..., 1::2] << 4).astype(np.uint8))


def _fp4_value(codes: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """Decode e2m1 as the OCP Microscaling specification defines it: bias 1, no infinities or NaN."""
    sign, exponent, fraction = 1 - 2 * (codes >> 3), codes >> 1 & 3, codes & 1
    values = sign * np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    return values.astype(np.float32) * scales.repeat(group_size, -1)


def _e4m3(code: int) -> float:
    """Decode e4m3 as the OCP 8-bit floating point specification defines it: bias 7, no infinities."""
    sign, exponent, fraction = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def named(prefix: str, packed: dict[str, torch.Tensor]) -> Named:
    return Named({f"{prefix}.{name}": tensor for name, tensor in packed.items()})


def write_pair(
    root: Path, quantization: dict[str, Any], pack: Callable[[str], Pack | None], options: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write a quantized checkpoint and its dense float32 twin. `pack` returns the packer of a linear or None."""
    plain = write_checkpoint(root / "plain", Family("llama", "llama"), CONFIG | (options or {}), seed=4)
    return pack_pair(plain, root / "quantized", quantization, pack, seed=len(json.dumps(quantization)))


LINEARS = ("_proj.weight", "c_fc.weight", ".w1.weight", ".w2.weight", ".w3.weight", "in_proj_qkv.weight",
           "in_proj_z.weight", "in_proj_qkvz.weight")  # fmt: skip


def pack_pair(
    plain: Path, folder: Path, quantization: dict[str, Any], pack: Callable[[str], Pack | None], seed: int
) -> tuple[Path, Path]:
    """Write `folder` and `folder`-dense: the linears of `plain` with random values, as `pack` packs them."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(shard)
    packed, dense = {}, {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        packer = pack(stem) if name.endswith(LINEARS) else None
        if packer is None:
            packed[name] = dense[name] = tensor
            continue
        found, weight = packer(rng, tuple(tensor.shape))
        packed |= named(stem, found)
        dense[name] = torch.from_numpy(weight)
    config = json.loads((plain / "config.json").read_text())
    folders = folder, folder.with_name(f"{folder.name}-dense")
    for path, content, extra in zip(folders, (packed, dense), ({"quantization_config": quantization}, {})):
        write_folder(path, content, config | extra)
    return folders


def mxfp4_experts(plain: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write `folder` with the packed experts of the gpt-oss checkpoint `plain` as random MXFP4 blocks, and its dense
    twin `folder`-dense."""
    rng = np.random.default_rng(seed)
    packed: dict[str, torch.Tensor] = {}
    for shard in sorted(plain.glob("*.safetensors")):
        packed |= load_file(shard)
    dense = dict(packed)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(123, 126, blocks.shape[:3], dtype=np.uint8)
        packed |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        stored = packed[f"{name}_blocks"], packed[f"{name}_scales"]
        dense[name] = convert_moe_packed_tensors(*stored, dtype=torch.float32)
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    folders = folder, folder.with_name(f"{folder.name}-dense")
    for path, content, extra in zip(folders, (packed, dense), (quantization, {})):
        write_folder(path, content, json.loads((plain / "config.json").read_text()) | extra)
    return folders


def pack_experts(pair: tuple[Path, Path], pack: Pack, in_one: bool, seed: int) -> tuple[Path, Path]:
    """Replace the experts of a quantized Gemma 4 checkpoint and its dense twin by random ones, as `pack` packs them.
    in_one: each tensor has those of all experts, with gate and up in one linear; else each linear is on its own."""
    rng = np.random.default_rng(seed)
    packed, dense = (load_file(folder / "model.safetensors") for folder in pair)
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        (num_experts, rows, inputs), (prefix, _, linear) = packed.pop(name).shape, name.rpartition(".")
        parts = [linear] if in_one or linear == "down_proj" else ["gate_proj", "up_proj"]
        stored, weights = dict[str, list[torch.Tensor]](), list[np.ndarray]()
        for expert in range(num_experts):
            for part in parts:
                tensors, weight = pack(rng, (rows // len(parts), inputs))
                weights.append(weight)
                if not in_one:
                    packed |= named(f"{prefix}.{expert}.{part}", tensors)
                for suffix in ("packed", "scale") if in_one else ():
                    stored.setdefault(f"{name}_{suffix}", []).append(tensors[f"weight_{suffix}"])
        packed |= {key: torch.stack(tensors) for key, tensors in stored.items()}
        dense[name] = torch.from_numpy(np.concatenate(weights)).view(num_experts, rows, inputs)
    for folder, tensors in zip(pair, (packed, dense)):
        save_file(tensors, folder / "model.safetensors")
    return pair


def write_folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    path.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": None}


def quantize_randomly(plain: Path, folder: Path, group_size: int, zero_point: bool, seed: int) -> Path:
    """Write `folder` with AWQ int4 linears of random values, and its dense twin `folder`-dense."""
    quantization = AWQ | {"group_size": group_size, "zero_point": zero_point}
    return pack_pair(plain, folder, quantization, lambda stem: awq_gemm(group_size, zero_point), seed)[0]
