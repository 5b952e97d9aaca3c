"""Weights of some layers in pinned host memory. Each step copies them to the device before their layer is computed.

The device has two staging buffers that these layers use in turn. A copy runs on its own stream while the layers before
are computed, and starts as soon as the previous layer with the same buffer is done. The tensors of a layer's linears
and experts become views of its staging buffer, so kernels launch as if the weights were resident. Each step starts with
copies of the first two layers and depends on nothing that an earlier step left in the buffers: a step may fail, be
captured as a graph, or be launched while the previous one runs.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from pipeline.errors import EnvironmentFailed
from pipeline.kernels.linears import Linear, Workspace
from pipeline.kernels.memory import advise_huge_pages
from pipeline.model.routed import RoutedExperts

STAGING_BUFFERS = 2
_ALIGNMENT = 512  # bytes, as torch's allocator aligns: cuBLAS chooses kernels by alignment

L = TypeVar("L")


def spread_layers(layer_bytes: Sequence[int], num_bytes: int) -> tuple[int, ...] | None:
    """Return the fewest layers that hold `num_bytes`, evenly spread and with the last one; None if all hold less.

    Between evenly spread layers, copies overlap with the most computation. With the last layer among them, the first
    copy has the most layers before it.
    """
    num_layers = len(layer_bytes)
    for count in range(num_layers + 1):
        chosen = tuple((each + 1) * num_layers // count - 1 for each in range(count))
        if sum(layer_bytes[index] for index in chosen) >= num_bytes:
            return chosen
    return None


class OffloadableLayer(Protocol):
    """The parts of `DecoderLayer` that have large weights."""

    index: int
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    routed: RoutedExperts | None


class Copies(Protocol):
    """Copies from host memory to the device that run next to the device's other work."""

    def pin(self, host: torch.Tensor) -> None:
        """Prepare host memory for copies. It must stay pinned until it is freed."""
        ...

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy after all work queued so far, and return a handle for `wait`."""
        ...

    def wait(self, copy: Any) -> None:
        """Let the work queued from now on wait for a copy. Does not wait itself."""
        ...


class CudaCopies:
    """Copies on a stream of their own. A captured step contains them as a branch of its graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pin(self, host: torch.Tensor) -> None:
        """Register memory with the driver: torch's own pinned memory is rounded up to a power of two."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        status = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if status != 0:
            raise EnvironmentFailed(
                f"engine.cpu_offload_gb: CUDA cannot pin {host.nbytes >> 20} MiB of host memory (error {status}); "
                "lower the key, or raise the limit of locked memory"
            )
        # Memory must not be freed while it is registered.
        weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copy: torch.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)


@dataclass(frozen=True)
class _Weight:
    """Tensor of an offloaded layer. offset: of its storage in the layer's host memory, in bytes."""

    tensor: torch.Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    first: int  # its first element in the storage

    def view(self, buffer: torch.UntypedStorage) -> None:
        """Make the tensor a view of a staging buffer."""
        self.tensor.set_(buffer, self.offset // self.tensor.element_size() + self.first, self.size, self.stride)


class LayerOffload:
    """Host memory of the offloaded layers of one decoder, and their staging buffers on its device."""

    def __init__(self, layers: Sequence[int], copies: Copies, device: torch.device) -> None:
        """layers: indices of the layers to offload, ascending."""
        self._copies, self._device = copies, device
        self._number = {index: number for number, index in enumerate(layers)}
        self._host: list[torch.Tensor] = []
        self._weights: list[list[_Weight]] = []
        self._staged: list[torch.Tensor] = []  # of each layer, in its staging buffer

    @property
    def num_layers(self) -> int:
        return len(self._number)

    @property
    def host_bytes(self) -> int:
        return sum(host.nbytes for host in self._host)

    def add(self, layer: OffloadableLayer) -> None:
        """Move the weights of the next layer to host memory, if it is one to offload. Its tensors are empty until
        `allocate_staging`."""
        if layer.index not in self._number:
            return
        storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        weights, num_bytes = [], 0
        for tensor in _weights_of(layer, self._device):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:  # tensors may be views of one storage
                storages[storage.data_ptr()] = num_bytes, storage
                num_bytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            offset, _ = storages[storage.data_ptr()]
            weights.append(_Weight(tensor, offset, tensor.size(), tensor.stride(), int(tensor.storage_offset())))
        host = torch.empty(num_bytes, dtype=torch.uint8)
        advise_huge_pages(host)
        self._copies.pin(host)
        for offset, storage in storages.values():
            stored = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            host[offset : offset + len(stored)].copy_(stored)
        for weight in weights:
            weight.tensor.set_()
        self._host.append(host)
        self._weights.append(weights)

    def allocate_staging(self) -> None:
        """Allocate the staging buffers, after all layers were added."""
        num_bytes = max(host.nbytes for host in self._host)
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(STAGING_BUFFERS)]
        self._staged = [buffers[number % STAGING_BUFFERS][: host.nbytes] for number, host in enumerate(self._host)]
        for staged, weights in zip(self._staged, self._weights, strict=True):
            for weight in weights:
                weight.view(staged.untyped_storage())

    def in_turn(self, layers: Sequence[L]) -> Iterator[L]:
        """Yield a step's layers. The work queued after a layer was yielded sees its weights, until the next one is
        requested."""
        copies = [self._start(number) for number in range(min(STAGING_BUFFERS, self.num_layers))]
        for index, layer in enumerate(layers):
            number = self._number.get(index)
            if number is not None:
                self._copies.wait(copies[number])
            yield layer
            if number is not None and number + STAGING_BUFFERS < self.num_layers:
                copies.append(self._start(number + STAGING_BUFFERS))

    def _start(self, number: int) -> Any:
        return self._copies.start(self._staged[number], self._host[number])


def _weights_of(layer: OffloadableLayer, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensors on `device` of a layer's linears and experts, each once."""
    parts: list[object] = [layer.qkv, layer.o, layer.gate_up, layer.down]
    if layer.routed is not None:
        parts += [layer.routed.router, layer.routed.shared_gate, layer.routed.experts]
    seen: set[int] = set()
    while parts:
        part = parts.pop()
        if id(part) in seen or isinstance(part, Workspace):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            if part.device == device and part.nbytes:
                yield part
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, partial):
            parts += [part.args, part.keywords]
        else:
            parts += getattr(part, "__dict__", {}).values()
