"""The paged KV cache of all layers of a model, the pages that they share (`roofline/kv_pages.py`), and the states of
layers that keep those instead (`kernels/delta_net.py`)."""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, prod
from typing import NamedTuple

import numpy as np
import torch

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.delta_net import StateCache
from pipeline.kernels.memory import zeros
from pipeline.model.config import ModelConfig
from pipeline.roofline.kv_pages import KVPages

MIN_SAVING = 0.1
"""Share of the longest sequence's bytes that shared pages must save: a second block table takes time in each step."""
TYPICAL_WINDOWS = 4
"""Length, in windows, of the sequences for which shared pages waste least. Of the two kinds of layers, those that keep
all tokens fill most pages of longer sequences, the others those of shorter ones."""


def single_kv_pages(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVPages:
    """Return pages of one block of each layer: all layers keep all tokens."""
    return KVPages(block_size, block_size * config.kv_bytes_per_token(dtype))


def shared_kv_pages(config: ModelConfig, block_size: int, dtype: torch.dtype, max_model_len: int) -> KVPages:
    """Return pages that layers with and without a window share, or, if these save less than `MIN_SAVING`, those of
    `single_kv_pages`."""
    alone = single_kv_pages(config, block_size, dtype)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    of_kind = [
        {prod(config.heads(index)) for index, layer in enumerate(config.layers) if (layer.window is None) == keeps_all}
        for keeps_all in (True, False)
    ]
    if any(len(values) != 1 for values in of_kind):  # there is one kind, or one with several shapes
        return alone
    (values,), (window_values,) = of_kind
    unit, num_layers = min(values, window_values), config.num_layers - len(windows)
    if values % unit or window_values % unit or max(windows) == 1:
        return alone
    block, window_block = values // unit, window_values // unit  # units of a layer's block
    ratio = Fraction(len(windows) * window_block, num_layers * block)
    found = []
    for blocks_per_page in {max(1, floor(ratio)), ceil(ratio)}:
        used = max(blocks_per_page * num_layers * block, len(windows) * window_block)
        units = -(-used // max(block, window_block)) * max(block, window_block)
        pages = KVPages(
            block_size=block_size,
            page_bytes=0,
            window=max(windows),
            blocks_per_page=blocks_per_page,
            num_layers=num_layers,
            stride=units // block,
            window_stride=units // window_block,
        )
        found.append(replace(pages, page_bytes=_page_bytes(config, pages, dtype)))
    typical = TYPICAL_WINDOWS * max(windows)
    best = min(found, key=lambda pages: pages.num_pages(typical) * pages.page_bytes)
    bytes_alone = alone.num_pages(max_model_len) * alone.page_bytes
    saves = best.num_pages(max_model_len) * best.page_bytes <= (1 - MIN_SAVING) * bytes_alone
    return best if saves else alone


class _CachePart(NamedTuple):
    """One tensor of a layer's cache. shape: of a block. page_bytes: of all layers that share its buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    page_bytes: int

    @property
    def key(self) -> tuple[str, int]:
        """The buffer that holds it. Both kinds of layers share one if their blocks fill its pages alike, which is not
        true of the scales of layers with different head sizes."""
        return self.name, self.page_bytes


def _cache_parts(config: ModelConfig, index: int, pages: KVPages, dtype: torch.dtype) -> list[_CachePart]:
    """Return the tensors of a layer's cache, in the order of `LayerCache`."""
    num_kv_heads, head_dim = config.heads(index)
    stride = pages.stride if config.layers[index].window is None else pages.window_stride
    shape, scales = (pages.block_size, num_kv_heads, head_dim), (num_kv_heads, pages.block_size)
    tensors = [("k", shape, dtype), ("v", shape, dtype)]
    if dtype == FP8:
        tensors += [("k_scale", scales, torch.float32), ("v_scale", scales, torch.float32)]
    return [_CachePart(name, shape, kind, stride * prod(shape) * kind.itemsize) for name, shape, kind in tensors]


def _page_bytes(config: ModelConfig, pages: KVPages, dtype: torch.dtype) -> int:
    parts = (part for index in range(config.num_layers) for part in _cache_parts(config, index, pages, dtype))
    return sum(num_bytes for _, num_bytes in {part.key for part in parts})


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, in pages.

    is_windowed: of each layer, whether it keeps only the last tokens, and so has the blocks of the window's table.
    states: of each layer, None: it keeps keys and values. has_spare_page: the last page belongs to no sequence.
    """

    layers: list[LayerCache]
    pages: KVPages
    num_pages: int
    is_windowed: tuple[bool, ...]
    states: tuple[StateCache | None, ...]
    has_spare_page: bool = False

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_pages: int,
        pages: KVPages,
        dtype: torch.dtype,
        device: torch.device,
        with_spare_page: bool = False,
        num_states: int = 1,
        state_inputs: torch.dtype = torch.float32,
    ) -> "KVCache":
        """Allocate a cache in the model's type or FP8. with_spare_page: add a page, to which the tokens that pad a step
        are written, and a state. num_states: sequences that have states at once. state_inputs: the model's type."""
        total, num_slots = num_pages + with_spare_page, num_states + with_spare_page
        states = tuple(
            None if layer.mixer is None else StateCache.allocate(num_slots, layer.mixer, state_inputs, device)
            for layer in config.layers
        )
        if pages.window is None:
            heads = [config.heads(index) for index in range(config.num_layers)]
            layers = [LayerCache.allocate(total, pages.block_size, *each, dtype, device) for each in heads]
            return cls(layers, pages, total, (False,) * config.num_layers, states, with_spare_page)
        is_windowed = tuple(layer.window is not None for layer in config.layers)
        buffers: dict[tuple[str, int], torch.Tensor] = {}
        layers, num_before = [], [0, 0]
        for index, windowed in enumerate(is_windowed):
            tensors = []
            for part in _cache_parts(config, index, pages, dtype):
                if part.key not in buffers:
                    buffers[part.key] = zeros((total * part.page_bytes,), torch.uint8, device)
                tensors.append(buffers[part.key].view(part.dtype).view(-1, *part.shape)[num_before[windowed] :])
            layers.append(LayerCache(*tensors))
            num_before[windowed] += 1
        return cls(layers, pages, total, is_windowed, states, with_spare_page)

    @property
    def spare_state(self) -> int | None:
        """Slot of the state that belongs to no sequence; None: no layer keeps a state."""
        return next((len(state.state_LVKD) - 1 for state in self.states if state is not None), None)

    @property
    def block_size(self) -> int:
        return self.pages.block_size

    def fill(self, page_ids: list[int], value: float) -> None:
        """Overwrite whole pages in every layer (after non-finite values, and in tests)."""
        for layer, windowed in zip(self.layers, self.is_windowed):
            layer.fill(self.pages.block_ids(np.array(page_ids), windowed).tolist(), value)
