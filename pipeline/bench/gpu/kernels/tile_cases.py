"""The tiles that are tried: work for each table of the Triton kernels, and what could stand in it.

A tile that differs from the shipped one in one size comes before those that differ in several.

Suffixes as in `kernels/contract.py`; N and K of a linear are its outputs and inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from pipeline.bench.gpu.kernels.correctness import TOLERANCES, random_int4
from pipeline.bench.gpu.kernels.kernel_times import DRAFTS
from pipeline.bench.gpu.kernels.paged import Heads, PagedStep, paged_step
from pipeline.bench.gpu.kernels.tile_times import Tile, TileCase, TileSizes
from pipeline.kernels.activations.fp8 import fp8_block
from pipeline.kernels.triton.attention.decode import decode_launches
from pipeline.kernels.triton.attention.decode_work import DecodeWork, most_queries
from pipeline.kernels.triton.attention.prefill import PrefillWork, prefill_launch, rows_of
from pipeline.kernels.triton.attention.tiles import stages_for
from pipeline.kernels.triton.launch import Launch, Target, power_of_two
from pipeline.kernels.triton.linear import fp8, int4
from pipeline.kernels.triton.sampling.sample import draw_launch
from pipeline.roofline.step import DecoderSize, Weights

PROGRAMS = 2  # that the shipped kernels give each multiprocessor


def tile_cases(
    size: DecoderSize, weights: Weights, dtype: torch.dtype, device: torch.device, sizes: TileSizes
) -> list[Callable[[], TileCase]]:
    """Of a model of that size; each is made when called, and takes the card's memory until it is dropped."""
    heads = Heads(size.heads, size.kv_heads, size.head_dim)
    target = Target.of(device)
    found: list[Callable[[], TileCase]] = []
    for is_fp8 in (False, True):
        found += [partial(_prefill, *each, heads, dtype, device, target, is_fp8) for each in sizes.prompts]
        queries = (1, 1 + DRAFTS) if not is_fp8 else (1,)
        found += [
            partial(_decode, *each, count, heads, dtype, device, target, is_fp8)
            for each, count in product(sizes.decoding, queries)
            if count <= most_queries(size.heads // size.kv_heads)
        ]
    if weights.int4:
        found += [
            partial(_int4, name, inputs, outputs, weights.group_size, tokens, dtype, device, target)
            for tokens, (name, inputs, outputs) in product(sizes.int4_tokens, size.linears())
        ]
    if weights.int4 and (device.type == "cpu" or target.capability >= fp8.LEAST_CAPABILITY):
        found += [
            partial(_fp8, name, inputs, outputs, weights.group_size, tokens, dtype, device, target)
            for tokens, (name, inputs, outputs) in product(sizes.fp8_tokens, size.linears())
        ]
    return found + [partial(_draw, rows, top_p, size.vocab, device) for rows in sizes.rows for top_p in (1.0, 0.9)]


def _others(shipped: Tile, **choices: tuple[int, ...]) -> tuple[Tile, ...]:
    """All combinations but the shipped one, those that differ in the fewest sizes first."""
    tiles = [dict(zip(choices, values)) for values in product(*choices.values())]
    different = [sum(tile[name] != shipped[name] for name in shipped) for tile in tiles]
    return tuple(tiles[i] for i in np.argsort(different, kind="stable") if different[i])


def _step(
    counts: list[int], contexts: list[int], heads: Heads, dtype: torch.dtype, device: torch.device, is_fp8: bool
) -> tuple[PagedStep, str, float]:
    """With the name of its group, and the scale of scores."""
    step = paged_step(counts, contexts, heads, dtype, device, with_fp8_cache=is_fp8)
    cache = "fp8 cache" if is_fp8 else f"{str(dtype).removeprefix('torch.')} cache"
    return step, f"heads of {heads.head_dim}, {cache}", heads.head_dim**-0.5


def _prefill(
    prompts: int,
    tokens: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
    is_fp8: bool,
) -> TileCase:
    step, group, scale = _step([tokens] * prompts, [tokens] * prompts, heads, dtype, device, is_fp8)
    out_TND = torch.empty_like(step.q_TND)
    queries = rows_of(heads.head_dim) // (heads.num_heads // heads.num_kv_heads)
    work = PrefillWork.of(step.where, np.arange(prompts), queries, None, device)
    launch = prefill_launch(step.q_TND, step.cache, out_TND, work, scale, target)
    shipped = {"keys": launch.constants["KEYS"], "buffers": _buffers(launch), "warps": launch.num_warps}

    def launches(tile: Tile) -> list[Launch]:
        constants = {**launch.constants, "KEYS": tile["keys"], "STAGES": stages_for(tile["buffers"])}
        return [replace(launch, constants=constants, num_warps=tile["warps"], num_stages=stages_for(tile["buffers"]))]

    others = _others(shipped, keys=(32, 64, 128), buffers=(1, 2, 3), warps=(4, 8))
    case = f"{prompts} prompts of {tokens:,}"
    return TileCase("prefill._tile", group, case, shipped, others, launches, out_TND, TOLERANCES[dtype])


def _decode(
    sequences: int,
    context: int,
    queries: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
    is_fp8: bool,
) -> TileCase:
    step, group, scale = _step([queries] * sequences, [context] * sequences, heads, dtype, device, is_fp8)
    out_TND = torch.empty_like(step.q_TND)
    max_seqs, max_blocks = step.where.block_table_SM.shape

    def made(programs: int) -> tuple[Launch, ...]:
        scaled = replace(target, num_multiprocessors=max(1, target.num_multiprocessors * programs // PROGRAMS))
        work = DecodeWork.allocate(
            *(max_seqs, max_blocks, step.where.block_size),
            *(heads.num_heads, heads.num_kv_heads, heads.head_dim, device, scaled),
            num_queries=min(power_of_two(queries), most_queries(heads.num_heads // heads.num_kv_heads)),
        )
        work.refill(step.where, np.arange(sequences))
        return decode_launches(step.q_TND, step.cache, out_TND, work, scale, target)

    def launches(tile: Tile) -> list[Launch]:
        sums, *others = made(tile["programs"])
        constants = {**sums.constants, "STAGES": stages_for(tile["buffers"])}
        stages = stages_for(tile["buffers"])
        return [replace(sums, constants=constants, num_warps=tile["warps"], num_stages=stages), *others]

    sums = made(PROGRAMS)[0]
    shipped = {"buffers": _buffers(sums), "warps": sums.num_warps, "programs": PROGRAMS}
    others = _others(shipped, buffers=(1, 2, 3, 4), warps=(2, 4, 8), programs=(1, 2, 4))
    case = f"{sequences} at {context:,}, {queries} tokens each"
    return TileCase("decode._stages", group, case, shipped, others, launches, out_TND, TOLERANCES[dtype])


def _buffers(launch: Launch) -> int:
    return next(count for count in range(1, 99) if stages_for(count) == launch.constants["STAGES"])


def _inputs(tokens: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, inputs, device=device, generator=torch.Generator(device).manual_seed(tokens)).to(dtype)


def _int4(
    name: str,
    inputs: int,
    outputs: int,
    group_size: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
) -> TileCase:
    weight = int4.TiledInt4.of(random_int4(outputs, inputs, group_size, torch.Generator().manual_seed(1)), device)
    x_MK, out_MN = _inputs(tokens, inputs, dtype, device), torch.empty(tokens, outputs, dtype=dtype, device=device)
    num_chunks = len(weight.word_CNW)
    chosen = int4.tile_for(tokens, outputs, num_chunks, target)

    def launches(tile: Tile) -> list[Launch]:
        programs = tile["programs"] * target.num_multiprocessors
        parts = int4.parts_for(chosen.tokens, tile["outputs"], outputs, num_chunks, programs)
        wanted = int4.Int4Tile(tile["outputs"], chosen.tokens, tile["warps"], tile["stages"], parts)
        return int4.int4_launches(x_MK, weight, None, out_MN, target, wanted)

    shipped = {
        "outputs": chosen.outputs,
        "warps": chosen.num_warps,
        "stages": chosen.num_stages,
        "programs": PROGRAMS,
    }
    others = _others(shipped, outputs=(64, 128), warps=(4, 8), stages=(2, 3, 4, 5), programs=(1, 2, 4))
    group, case = f"tiles of {chosen.tokens} tokens", f"{name}, {tokens} tokens"
    return TileCase("int4.tile_for", group, case, shipped, others, launches, out_MN, TOLERANCES[dtype])


def _fp8(
    name: str,
    inputs: int,
    outputs: int,
    group_size: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
) -> TileCase:
    quantized = random_int4(outputs, inputs, group_size, torch.Generator().manual_seed(1))
    block = fp8_block(quantized)
    assert block is not None, "groups of 32, 64 or multiples of 128"
    weight = fp8.E4m3Weight.of(quantized, block, device)
    x_MK, out_MN = _inputs(tokens, inputs, dtype, device), torch.empty(tokens, outputs, dtype=dtype, device=device)
    parts = fp8.parts_of(outputs, weight.value_NK.shape[1] // block, block, target)
    chosen = fp8.tile_for(tokens, parts, block, target)

    def launches(tile: Tile) -> list[Launch]:
        wanted = fp8.Fp8Tile(tile["outputs"], tile["tokens"], tile["warps"], tile["stages"])
        return fp8.fp8_launches(x_MK, weight, None, out_MN, target, wanted)

    shipped = {
        "outputs": chosen.outputs,
        "tokens": chosen.tokens,
        "warps": chosen.num_warps,
        "stages": chosen.num_stages,
    }
    most = power_of_two(tokens, 16)
    few = tuple(count for count in (16, 32, 64, 128) if count <= most)
    others = _others(shipped, outputs=(64, 128), tokens=few, warps=(4, 8), stages=(2, 3, 4))
    group = f"{tokens:,} tokens, {'one part' if parts == 1 else 'several parts'}"
    return TileCase("fp8.tile_for", group, name, shipped, others, launches, out_MN, TOLERANCES[dtype])


def _draw(rows: int, top_p: float, vocab: int, device: torch.device) -> TileCase:
    random = torch.Generator(device).manual_seed(rows)
    logits_RV = 3 * torch.randn(rows, vocab, device=device, generator=random)
    options = torch.tensor([1.0, vocab, top_p, 0.0], dtype=torch.float64, device=device)
    u_1R = torch.rand(1, rows, device=device, generator=random).double()
    how_5R = torch.cat([options.repeat(rows, 1).T, u_1R])
    token_R = torch.empty(rows, dtype=torch.int64, device=device)
    finite_R = torch.empty(rows, dtype=torch.bool, device=device)
    launch = draw_launch(logits_RV, how_5R, token_R, finite_R)
    shipped = {"width": launch.constants["WIDTH"], "warps": launch.num_warps}

    def launches(tile: Tile) -> list[Launch]:
        return [replace(launch, constants={**launch.constants, "WIDTH": tile["width"]}, num_warps=tile["warps"])]

    others = _others(shipped, width=(2048, 4096, 8192, 16384), warps=(4, 8, 16, 32))
    case = f"{rows} rows, top_p {top_p:g}"
    return TileCase("draw", f"vocabulary {vocab:,}", case, shipped, others, launches, token_R, 0.0)
