"""The tiles that are tried: work for each table of the Triton kernels, and what could stand in it.

A tile that differs from the shipped one in one size comes before those that differ in several.

Suffixes as in `kernels/contract.py`; N and K of a linear are its outputs and inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from pipeline.bench.gpu.kernels.checks import TOLERANCES
from pipeline.bench.gpu.kernels.inputs import Heads, PagedStep, paged_step, random_int4
from pipeline.bench.gpu.kernels.kernel_times import DRAFTS
from pipeline.bench.gpu.kernels.tile_times import Tile, TileCase, TileSizes
from pipeline.kernels.activations.fp8 import fp8_block
from pipeline.kernels.triton.attention.decode import decode_launches
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata, most_queries
from pipeline.kernels.triton.attention.online_softmax import stages_for
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_launch, rows_of
from pipeline.kernels.triton.launch import Launch, Target, power_of_two
from pipeline.kernels.triton.linear import fp8, int4
from pipeline.kernels.triton.sampling.sample import sample_launches
from pipeline.roofline.cost_model import DecoderSize, Weights
from pipeline.weights.packed import GroupIntWeight

KERNELS = ("prefill", "decode", "int4", "fp8", "sample")
PROGRAMS = 2  # that the shipped kernels give each multiprocessor


def tile_cases(
    size: DecoderSize,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    sizes: TileSizes,
    kernels: Sequence[str] = KERNELS,
) -> list[Callable[[], TileCase]]:
    """Of a model of that size; each is made when called, and takes the card's memory until it is dropped."""
    return [case for case in _Cases(size, weights, dtype, device).cases(sizes) if case.func.__name__ in kernels]


def _others(shipped: Tile, **choices: tuple[int, ...]) -> tuple[Tile, ...]:
    """All combinations but the shipped one, those that differ in the fewest sizes first."""
    tiles = [dict(zip(choices, values)) for values in product(*choices.values())]
    different = [sum(tile[name] != shipped[name] for name in shipped) for tile in tiles]
    return tuple(tiles[i] for i in np.argsort(different, kind="stable") if different[i])


def _buffers(launch: Launch) -> int:
    return next(count for count in range(1, 99) if stages_for(count) == launch.constants["STAGES"])


class _Cases:
    """Makes the cases of one model on one device."""

    def __init__(self, size: DecoderSize, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.weights, self.dtype, self.device = size, weights, dtype, device
        self.heads, self.target = Heads(size.heads, size.kv_heads, size.head_dim), Target.of(device)
        self.tolerance, self.scale = TOLERANCES[dtype], size.head_dim**-0.5

    def cases(self, sizes: TileSizes) -> "Iterator[partial[TileCase]]":
        """Each by the method that makes it, which has the kernel's name."""
        most = most_queries(self.size.heads // self.size.kv_heads)
        for is_fp8 in (False, True):
            yield from (partial(self.prefill, *each, is_fp8) for each in sizes.prompts)
            for each, count in product(sizes.decoding, (1,) if is_fp8 else (1, 1 + DRAFTS)):
                if count <= most:
                    yield partial(self.decode, *each, count, is_fp8)
        if self.weights.int4:
            yield from (partial(self.int4, *each, n) for n, each in product(sizes.int4_tokens, self.size.linears()))
            if self.device.type == "cpu" or self.target.capability >= fp8.LEAST_CAPABILITY:
                yield from (partial(self.fp8, *each, n) for n, each in product(sizes.fp8_tokens, self.size.linears()))
        yield from (partial(self.sample, rows, top_p) for rows, top_p in product(sizes.rows, (1.0, 0.9)))

    def step(self, counts: list[int], contexts: list[int], is_fp8: bool) -> tuple[PagedStep, str]:
        """With the name of its group."""
        step = paged_step(counts, contexts, self.heads, self.dtype, self.device, with_fp8_cache=is_fp8)
        cache = "fp8 cache" if is_fp8 else f"{str(self.dtype).removeprefix('torch.')} cache"
        return step, f"heads of {self.heads.head_dim}, {cache}"

    def prefill(self, prompts: int, tokens: int, is_fp8: bool) -> TileCase:
        step, group = self.step([tokens] * prompts, [tokens] * prompts, is_fp8)
        out_TND = torch.empty_like(step.q_TND)
        queries = rows_of(self.heads.head_dim) // (self.heads.num_heads // self.heads.num_kv_heads)
        work = PrefillMetadata.of(step.where, np.arange(prompts), queries, None, self.device)
        launch = prefill_launch(step.q_TND, step.cache, out_TND, work, self.scale, self.target)
        shipped = {"keys": launch.constants["KEYS"], "buffers": _buffers(launch), "warps": launch.num_warps}

        def launches(tile: Tile) -> list[Launch]:
            stages = stages_for(tile["buffers"])
            constants = {**launch.constants, "KEYS": tile["keys"], "STAGES": stages}
            return [replace(launch, constants=constants, num_warps=tile["warps"], num_stages=stages)]

        others = _others(shipped, keys=(32, 64, 128), buffers=(1, 2, 3), warps=(4, 8))
        case = f"{prompts} prompts of {tokens:,}"
        return TileCase("prefill._tile", group, case, shipped, others, launches, out_TND, self.tolerance)

    def decode(self, sequences: int, context: int, queries: int, is_fp8: bool) -> TileCase:
        step, group = self.step([queries] * sequences, [context] * sequences, is_fp8)
        out_TND, heads, target = torch.empty_like(step.q_TND), self.heads, self.target
        max_seqs, max_blocks = step.where.block_table_SM.shape

        def made(programs: int) -> tuple[Launch, ...]:
            scaled = replace(target, num_multiprocessors=max(1, target.num_multiprocessors * programs // PROGRAMS))
            work = DecodeMetadata.allocate(
                *(max_seqs, max_blocks, step.where.block_size),
                *(heads.num_heads, heads.num_kv_heads, heads.head_dim, self.device, scaled),
                num_queries=min(power_of_two(queries), most_queries(heads.num_heads // heads.num_kv_heads)),
            )
            work.refill(step.where, np.arange(sequences))
            return decode_launches(step.q_TND, step.cache, out_TND, work, self.scale, target)

        def launches(tile: Tile) -> list[Launch]:
            sums, *others = made(tile["programs"])
            stages = stages_for(tile["buffers"])
            constants = {**sums.constants, "STAGES": stages}
            return [replace(sums, constants=constants, num_warps=tile["warps"], num_stages=stages), *others]

        sums = made(PROGRAMS)[0]
        shipped = {"buffers": _buffers(sums), "warps": sums.num_warps, "programs": PROGRAMS}
        others = _others(shipped, buffers=(1, 2, 3, 4), warps=(2, 4, 8), programs=(1, 2, 4))
        case = f"{sequences} at {context:,}, {queries} tokens each"
        return TileCase("decode._stages", group, case, shipped, others, launches, out_TND, self.tolerance)

    def linear(self, inputs: int, outputs: int, tokens: int) -> tuple[GroupIntWeight, torch.Tensor, torch.Tensor]:
        """A weight, inputs, and where the outputs go."""
        weight = random_int4(outputs, inputs, self.weights.group_size, torch.Generator().manual_seed(1))
        random = torch.Generator(self.device).manual_seed(tokens)
        x_MK = torch.randn(tokens, inputs, device=self.device, generator=random).to(self.dtype)
        return weight, x_MK, torch.empty(tokens, outputs, dtype=self.dtype, device=self.device)

    def int4(self, name: str, inputs: int, outputs: int, tokens: int) -> TileCase:
        packed, x_MK, out_MN = self.linear(inputs, outputs, tokens)
        weight, target = int4.TiledInt4.of(packed, self.device), self.target
        num_chunks = weight.num_chunks
        chosen = int4.tile_for(tokens, outputs, num_chunks, target)

        def launches(tile: Tile) -> list[Launch]:
            programs = tile["programs"] * target.num_multiprocessors
            parts = int4.parts_for(chosen.tokens, tile["outputs"], outputs, num_chunks, programs)
            wanted = int4.Int4Tile(tile["outputs"], chosen.tokens, tile["warps"], tile["stages"], parts)
            return int4.int4_launches(x_MK, weight, None, out_MN, target, wanted)

        shipped = {"outputs": chosen.outputs, "warps": chosen.num_warps, "stages": chosen.num_stages}
        shipped["programs"] = int4.PROGRAMS[chosen.tokens]
        others = _others(shipped, outputs=(64, 128), warps=(4, 8), stages=(2, 3, 4, 5), programs=(1, 2, 3, 4))
        group, case = f"tiles of {chosen.tokens} tokens", f"{name}, {tokens} tokens"
        return TileCase("int4.tile_for", group, case, shipped, others, launches, out_MN, self.tolerance)

    def fp8(self, name: str, inputs: int, outputs: int, tokens: int) -> TileCase:
        packed, x_MK, out_MN = self.linear(inputs, outputs, tokens)
        block, target = fp8_block(packed), self.target
        assert block is not None, "groups of 32, 64 or multiples of 128"
        weight = fp8.E4m3Weight.of(packed, block, self.device)
        parts = fp8.parts_of(outputs, weight.value_NK.shape[1] // block, block, target)
        chosen = fp8.tile_for(tokens, parts, block, target)

        def launches(tile: Tile) -> list[Launch]:
            wanted = fp8.Fp8Tile(tile["outputs"], tile["tokens"], tile["warps"], tile["stages"])
            return fp8.fp8_launches(x_MK, weight, None, out_MN, target, wanted)

        shipped = {"outputs": chosen.outputs, "tokens": chosen.tokens, "warps": chosen.num_warps}
        shipped["stages"] = chosen.num_stages
        few = tuple(count for count in (16, 32, 64, 128) if count <= power_of_two(tokens, 16))
        others = _others(shipped, outputs=(64, 128), tokens=few, warps=(4, 8), stages=(2, 3, 4))
        group = f"{tokens:,} tokens, {'one part' if parts == 1 else 'several parts'}"
        return TileCase("fp8.tile_for", group, name, shipped, others, launches, out_MN, self.tolerance)

    def sample(self, rows: int, top_p: float) -> TileCase:
        random = torch.Generator(self.device).manual_seed(rows)
        logits_RV = 3 * torch.randn(rows, self.size.vocab, device=self.device, generator=random)
        options = torch.tensor([1.0, self.size.vocab, top_p, 0.0], dtype=torch.float64, device=self.device)
        u_1R = torch.rand(1, rows, device=self.device, generator=random).double()
        how_5R = torch.cat([options.repeat(rows, 1).T, u_1R])
        token_R = torch.empty(rows, dtype=torch.int64, device=self.device)
        parts, of_row = sample_launches(logits_RV, how_5R, token_R, torch.empty_like(token_R, dtype=torch.bool))
        shipped = {"together": of_row.constants["TOGETHER"], "warps": of_row.num_warps}

        def launches(tile: Tile) -> list[Launch]:
            constants = {**of_row.constants, "TOGETHER": tile["together"]}
            return [parts, replace(of_row, constants=constants, num_warps=tile["warps"])]

        others = _others(shipped, together=(4, 8, 16), warps=(4, 8, 16, 32))
        group, case = f"vocabulary {self.size.vocab:,}", f"{rows} rows, top_p {top_p:g}"
        return TileCase("sample", group, case, shipped, others, launches, token_R, 0.0)
