"""Time a layer's experts by form of their weights, the choice of experts, and adapters of one linear.

Each token's experts are random. A floor counts the weights of the experts that at least one token uses. Variants:

- served: the engine's kernels.
- 16 bit: the same kernels on the same weights, dequantized.
- torch: experts by `grouped_mm`, with the tokens' order by expert computed beforehand; otherwise plain torch.
- torch products: of those experts, only the products and the activation.

Suffixes as in `kernels/contract.py`; P: pairs of a token and one of its experts.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.kernels import SERVED, Work, time_works
from benchmarks.gpu.section import Found, Setting
from benchmarks.shapes import model_size
from pipeline.kernels import experts as plain
from pipeline.kernels.adapters import AdapterTokens, Lora
from pipeline.kernels.contract import Experts
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.routing import Routing
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, ExpertWeights, LinearWeight, select_outputs
from tests.kernels.experts import random_linear
from tests.kernels.lora import random_updates

DENSE, TORCH, PRODUCTS = "16 bit", "torch", "torch products"
UNQUANTIZED = "dense"
WEIGHT_BYTES = {  # of one weight with its share of the scales, as the GPU kernels store it
    UNQUANTIZED: 2.0,
    "int4, groups of 128": 0.5 + 4 / 128,
    "fp8, blocks": 1.0 + 4 / 128,
    "mxfp4": 0.5 + 2 / 32,
}


@dataclass(frozen=True)
class ExpertLayer:
    """Sizes of a layer of experts. width: between up and down. forms: of its weights to time."""

    model: str
    hidden: int
    num_experts: int
    top_k: int
    width: int
    forms: tuple[str, ...] = tuple(WEIGHT_BYTES)
    activation: str = "silu"
    has_bias: bool = False

    @classmethod
    def from_model(cls, model: str) -> "ExpertLayer":
        """Return the sizes of a model, or of Qwen3-30B-A3B for a model without experts."""
        size = model_size(model)[0]
        if size.experts is None:
            return cls.from_model("qwen3-30b-a3b")
        return cls(model, size.hidden, size.experts.num_experts, size.experts.top_k, size.experts.width)

    @property
    def parameters(self) -> int:
        """Parameters of one expert, without biases."""
        return 3 * self.hidden * self.width


GPT_OSS_20B = ExpertLayer("gpt-oss-20b", 2880, 32, 4, 2880, ("mxfp4",), "clamped_swiglu", has_bias=True)


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens of each kind of work, numbers of adapters, and the adapted linear's inputs (and outputs)."""

    experts: tuple[int, ...] = (1, 16, 64, 512, 4096)
    route: tuple[int, ...] = (1, 64, 512, 4096)
    lora: tuple[int, ...] = (1, 64, 2048)
    adapters: tuple[int, ...] = (1, 8)
    linear: int = 4096
    rank: int = 16


SMOKE = Sizes((1, 5), (3,), (1, 4), (1, 2), 64, 4)
SMOKE_LAYER = {"hidden": 256, "num_experts": 4, "top_k": 2, "width": 128}


def expert_times(setting: Setting) -> Iterator[Found]:
    works = ExpertWorks(setting)
    if works.kernels.compile_ahead is not None:
        works.kernels.compile_ahead(works.launch_all, print, os.cpu_count() or 1)
    yield from time_works("Experts (torch: without sorting the tokens by expert) and adapters", works.all(), setting)


@dataclass(frozen=True)
class TorchExperts:
    """Experts of dense weights by torch's grouped product."""

    gate_up_EH2F: torch.Tensor
    down_EFH: torch.Tensor
    gate_mul: Callable[[torch.Tensor], torch.Tensor]

    def products(self, x_PH: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
        """Multiply the inputs of sorted pairs. end_E (int32): where each expert's pairs end."""
        inner_PF = self.gate_mul(F.grouped_mm(x_PH, self.gate_up_EH2F, offs=end_E))
        return F.grouped_mm(inner_PF, self.down_EFH, offs=end_E)

    def layer(
        self,
        x_TH: torch.Tensor,
        token_P: torch.Tensor,
        end_E: torch.Tensor,
        row_TA: torch.Tensor,
        weight_T1A: torch.Tensor,
    ) -> torch.Tensor:
        """Return the layer's outputs. token_P: each sorted pair's token. row_TA: each pair's index in that order."""
        y_PH = self.products(x_TH[token_P], end_E)
        return (weight_T1A @ y_PH[row_TA]).squeeze(1)


@dataclass(frozen=True)
class PackedExperts:
    """Experts of one form. dense: None if `served` has 16-bit weights. torch: only then."""

    served: Experts
    dense: Experts | None = None
    torch: TorchExperts | None = None


class ExpertWorks:
    """Builder of each work's inputs. Experts of a form are packed once."""

    def __init__(self, setting: Setting) -> None:
        self.dtype, self.device = setting.dtype, setting.device
        self.kernels = select_kernels(self.device, self.dtype)
        self.random = torch.Generator(self.device).manual_seed(0)
        self.sizes = SMOKE if setting.is_smoke else Sizes()
        self.layers = [ExpertLayer.from_model(setting.model), GPT_OSS_20B]
        if setting.is_smoke:
            self.layers = [replace(layer, **SMOKE_LAYER) for layer in self.layers]
        self._packed: dict[tuple[str, str], PackedExperts] = {}

    def all(self) -> Iterator["partial[Work]"]:
        for layer in self.layers:
            for form in layer.forms:
                yield from (partial(self.experts, layer, form, tokens) for tokens in self.sizes.experts)
        for num_adapters in self.sizes.adapters:
            yield from (partial(self.adapters, num_adapters, tokens) for tokens in self.sizes.lora)
        for layer in self.layers:
            yield from (partial(self.route, layer, tokens) for tokens in self.sizes.route)

    def launch_all(self) -> None:
        """Call each variant that launches kernels of the engine, for `Kernels.compile_ahead`."""
        for build in self.all():
            with suppress(Exception):  # `time_works` reports it
                for name, call in build().variants.items():
                    if name in (SERVED, DENSE):
                        call()

    def experts(self, layer: ExpertLayer, form: str, tokens: int) -> Work:
        x_TH = self._normal(tokens, layer.hidden)
        expert_TA, weight_TA = plain.route(self._normal(tokens, layer.num_experts), Routing(layer.top_k))
        packed = self._packed.get((layer.model, form)) or self._pack(layer, form)
        variants: dict[str, Callable[[], torch.Tensor]] = {SERVED: partial(packed.served, x_TH, expert_TA, weight_TA)}
        if packed.dense is not None:
            variants[DENSE] = partial(packed.dense, x_TH, expert_TA, weight_TA)
        if packed.torch is not None:
            order_P = expert_TA.flatten().argsort(stable=True)
            token_P, row_TA = order_P // layer.top_k, order_P.argsort().view_as(expert_TA)
            end_E = expert_TA.flatten().bincount(minlength=layer.num_experts).cumsum(0).to(torch.int32)
            weight_T1A = weight_TA.unsqueeze(1).to(self.dtype)
            variants[TORCH] = partial(packed.torch.layer, x_TH, token_P, end_E, row_TA, weight_T1A)
            variants[PRODUCTS] = partial(packed.torch.products, x_TH[token_P], end_E)
        num_used = expert_TA.unique().numel()
        num_bytes = num_used * layer.parameters * WEIGHT_BYTES[form] + 2 * x_TH.nbytes
        shape = f"{layer.model}, {tokens:,} tokens, {num_used} experts"
        return Work(form, shape, num_bytes, 2.0 * expert_TA.numel() * layer.parameters, variants)

    def route(self, layer: ExpertLayer, tokens: int) -> Work:
        logits_TE, routing = self._normal(tokens, layer.num_experts), Routing(layer.top_k)
        variants = {
            SERVED: partial(self.kernels.route, logits_TE, routing),
            TORCH: partial(plain.route, logits_TE, routing),
        }
        num_bytes = logits_TE.nbytes + tokens * layer.top_k * (8 + 4)
        shape = f"{tokens:,} tokens, {layer.top_k} of {layer.num_experts} experts"
        return Work("route", shape, num_bytes, 0.0, variants)

    def adapters(self, num_adapters: int, tokens: int) -> Work:
        """Add the updates of a linear. Variants add to their own outputs, again in each run."""
        width, rank = self.sizes.linear, self.sizes.rank
        updates = random_updates([rank] * num_adapters, width, width)
        x_TK = self._normal(tokens, width)
        adapter_T = np.random.default_rng(0).integers(0, num_adapters, tokens)

        def call(lora: Lora, adapter_tokens: AdapterTokens, y_TN: torch.Tensor) -> torch.Tensor:
            lora(y_TN, x_TK, adapter_tokens)
            return y_TN

        sets = {SERVED: self.kernels, TORCH: reference_kernels(self.dtype, self.device)}
        variants = {
            name: partial(
                call,
                kernels.prepare_lora(updates),
                AdapterTokens(adapter_T, num_adapters, self.device),
                torch.zeros_like(x_TK),
            )
            for name, kernels in sets.items()
        }
        parameters = 2 * rank * width
        num_bytes = len(np.unique(adapter_T)) * parameters * x_TK.itemsize + 3.0 * x_TK.nbytes
        shape = f"{width} x {width}, rank {rank}, {num_adapters} adapters, {tokens:,} tokens"
        return Work("adapters", shape, num_bytes, 2.0 * tokens * parameters, variants)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.random).to(self.dtype)

    def _pack(self, layer: ExpertLayer, form: str) -> PackedExperts:
        weights = self._random_experts(layer, form)
        served = self._prepare(weights, layer)
        if form == UNQUANTIZED:
            gate_up_E2FH, down_EHF = (
                torch.stack([each.dequantize(self.dtype) for each in linears])
                for linears in (weights.gate_up, weights.down)
            )
            by_torch = TorchExperts(
                gate_up_E2FH.transpose(1, 2),
                down_EHF.transpose(1, 2),
                lambda gate_up_P2F: self.kernels.gate_mul(gate_up_P2F, layer.activation),
            )
            packed = PackedExperts(served, torch=by_torch)
        else:
            gate_up, down = (
                tuple(DenseWeight(each.dequantize(self.dtype), each.bias_N) for each in linears)
                for linears in (weights.gate_up, weights.down)
            )
            packed = PackedExperts(served, dense=self._prepare(ExpertWeights(gate_up, down), layer))
        self._packed[layer.model, form] = packed
        return packed

    def _prepare(self, weights: ExpertWeights, layer: ExpertLayer) -> Experts:
        return self.kernels.prepare_experts(weights, layer.activation, self.kernels.prepare_linear)

    def _random_experts(self, layer: ExpertLayer, form: str) -> ExpertWeights:
        """Return experts on the device whose outputs are those of one random expert, in different orders."""
        random = torch.Generator().manual_seed(0)

        def linears(num_outputs: int, num_inputs: int) -> tuple[LinearWeight, ...]:
            first = random_linear(form, num_outputs, num_inputs, layer.has_bias, random)
            tensors = {name: value for name, value in vars(first).items() if isinstance(value, torch.Tensor)}
            first = replace(first, **{name: tensor.to(self.device) for name, tensor in tensors.items()})
            row_N = torch.arange(num_outputs, device=self.device)
            return tuple(select_outputs(first, row_N.roll(expert)) for expert in range(layer.num_experts))

        return ExpertWeights(linears(2 * layer.width, layer.hidden), linears(layer.hidden, layer.width))
