"""Loading of the decoder's weights from safetensors. Every tensor must be used, and none may be missing.

Only safetensors is read: a pickle can run code. Shard names must be plain file names inside the model folder. The
safetensors library checks headers: sizes, types and offsets must cover the file exactly, without overlap.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pipeline.checkpoints.file_checks import GGUF_TABLE, checked_file, read_json
from pipeline.checkpoints.quantizer_files import QUANTIZER_FILES
from pipeline.errors import ModelError
from pipeline.kernels.delta_net import DeltaWeights
from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.layer_parts import Norm
from pipeline.model.config import ModelConfig, StoredParts
from pipeline.model.gguf_names import PREFIX as GGUF_PREFIX
from pipeline.model.gguf_names import gguf_names
from pipeline.model.layer_spec import ExpertSpec, Heads, LayerSpec
from pipeline.model.rotation import rotary_order
from pipeline.weights.fp4 import Mxfp4Format, read_expert_blocks
from pipeline.weights.fp8 import CACHE_SCALES
from pipeline.weights.gguf import GgufTensors, read_gguf
from pipeline.weights.packed import DenseWeight, ExpertWeights, LinearWeight, StackedWeight, concatenate, select_outputs
from pipeline.weights.round_to_nearest import RoundToNearest
from pipeline.weights.tensor_reader import FLOATS, StoredLinear

DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias", "attn.masked_bias")
CPU = torch.device("cpu")
# Prefixes of the decoder's tensors and of the head, the first one found. Checkpoints made for embeddings may have none.
PREFIXES = {"model.": "", "model.language_model.": "", "language_model.model.": "language_model.", "transformer.": "",
            "": ""}  # fmt: skip
ENCODERS = ("vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.", "visual.")
ENCODERS += tuple(f"model.{name}" for name in ENCODERS)
DRAFT_HEADS = ("mtp.",)  # which predict further tokens
PLAIN_NAME = re.compile(r"[\w.+=@ ()-]+\.safetensors")


class ExpertNorms(NamedTuple):
    """Norms of experts (`ExpertSpec.own_norms`): of the inputs of router and experts, and of the outputs of experts and
    shared expert."""

    router: Norm
    expert: Norm
    expert_post: Norm
    shared_post: Norm


@dataclass(frozen=True)
class RoutedWeights:
    """Weights of a layer's experts and of their router. choice_bias_E: see `Routing`. scale_E: factors of the experts'
    weights. shared_gate: (1, H)."""

    router: DenseWeight
    choice_bias_E: torch.Tensor | None
    scale_E: torch.Tensor | None
    shared_gate: DenseWeight | None
    norms: ExpertNorms | None
    experts: ExpertWeights


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer. qkv: with an output gate it computes the gates first; of a Gated DeltaNet it also computes z.
    ba: the other linear of a Gated DeltaNet. qk_norm: of queries and keys, per head or over all heads. gate_up, down:
    None if the layer has experts and none of them is shared. residual_scale: factor of the layer's output."""

    qkv: LinearWeight
    o: LinearWeight
    gate_up: LinearWeight | None
    down: LinearWeight | None
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None
    residual_scale: float = 1.0
    sinks_N: torch.Tensor | None = None
    routed: RoutedWeights | None = None
    ba: LinearWeight | None = None
    delta: DeltaWeights | None = None


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors or GGUF files of a model folder. Raises ModelError for pickles, unsafe names, missing
    shards."""
    if (folder / GGUF_TABLE).is_file():
        return [folder / name for name in read_json(folder / GGUF_TABLE)["files"]]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if single.exists():
            return [_inside(folder, single.name)]
        found = sorted(p.name for p in folder.glob("*.safetensors")) if folder.is_dir() else []
        if len(found) == 1:
            return [_inside(folder, found[0])]
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise ModelError(f"{folder}: only pickle weights found; convert them to safetensors (pickles can run code)")
        raise ModelError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: expected an object under weight_map")
    return [_inside(folder, name) for name in sorted({str(v) for v in weight_map.values()})]


def _inside(folder: Path, name: str) -> Path:
    if not PLAIN_NAME.fullmatch(name):
        raise ModelError(
            f"{folder}: weight file {name!r:.200} is not a plain .safetensors file name in the model folder"
        )
    try:
        return checked_file(folder / name)
    except FileNotFoundError:
        raise ModelError(f"{folder / name}: listed in the index but not found") from None


class Checkpoint:
    """Named tensors of a folder, each returned exactly once; `finish` checks that none is left.

    unused: suffixes of tensor names that may be left. device: device of the returned tensors. On a GPU, quantized
    tensors arrive as stored and are unpacked there, which costs the host neither memory nor time. files: those to read,
    if not the model's. names: from a GGUF tensor's name to the family's, see `gguf_names`; else names are GGUF's.
    """

    def __init__(
        self,
        folder: Path,
        unused: tuple[str, ...] = (),
        device: torch.device = CPU,
        files: Sequence[Path] | None = None,
        names: Callable[[str], tuple[str, int | None]] = lambda stem: (stem, None),
    ) -> None:
        self.folder, self.device = folder, device
        self.home: dict[str, Path] = {}
        table = folder / GGUF_TABLE
        if table.is_file() and files is None:
            self.open: dict[Path, Any] = {table: GgufTensors(folder, read_json(table), names)}
        else:
            self.open = {path: _opened(path) for path in (checkpoint_files(folder) if files is None else files)}
        for path, handle in self.open.items():
            for name in [*handle.keys()]:
                if name in self.home:
                    raise ModelError(f"{path}: tensor {name} is also in {self.home[name].name}")
                self.home[name] = path
        self.left = {name for name in self.home if not name.endswith(DERIVED) and name.rpartition(".")[2] not in unused}
        self.parts: dict[str, torch.Tensor] = {}
        """Parts of tensors that hold several linears, by the names under which they are read, once."""

    def __contains__(self, name: str) -> bool:
        return name in self.home or name in self.parts

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor as stored, on the device. Raises ModelError if it is missing."""
        if name in self.parts:
            return self.parts.pop(name)
        if name not in self.home:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the checkpoint{self._quantized_as(name)}")
        self.left.discard(name)
        return self._stored(name).to(self.device)

    def _quantized_as(self, name: str) -> str:
        """Return a hint if the missing weight is stored quantized, but no options describe how."""
        stem = name.removesuffix("weight")
        found = [f"{stem}{suffix}" for suffix in ("qweight", "weight_packed") if f"{stem}{suffix}" in self]
        if not found:
            return ""
        files = " or ".join(QUANTIZER_FILES)
        return f", which has {found[0]}: add a quantization_config to config.json, or the quantizer's own {files}"

    def _stored(self, name: str) -> torch.Tensor:
        path = self.home[name]
        try:
            return self.open[path].get_tensor(name)
        except (SafetensorError, AttributeError) as error:  # AttributeError: a type that this torch does not support
            raise ModelError(f"{path}: tensor {name} cannot be read ({error})") from None

    def skip(self, name: str) -> None:
        """Exempt this tensor from the check of `finish`."""
        self.left.discard(name)

    def skip_parts(self, prefixes: tuple[str, ...]) -> None:
        """Exempt tensors whose names begin so from the check of `finish`."""
        self.left -= {name for name in self.left if name.startswith(prefixes)}

    def holds_copy(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same type, shape and values. Reads both."""
        one, two = self._stored(name), self._stored(other)
        return one.dtype == two.dtype and torch.equal(one, two)

    def read_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.read(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in FLOATS:
            raise ModelError(
                f"{self.home[name]}: tensor {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} in a "
                "floating type of 16 or 32 bits"
            )
        return tensor

    def finish(self) -> None:
        """Raise ModelError naming the tensors that no part of the model has taken."""
        if self.left:
            some = ", ".join(sorted(self.left)[:5])
            raise ModelError(f"{self.folder}: {len(self.left)} tensors are not part of this architecture: {some}")


def _opened(path: Path) -> Any:
    try:
        handle = safe_open(path, framework="pt").__enter__()
        handle.keys()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a valid safetensors file ({error})") from None
    return handle


def output_rows(config: ModelConfig, layer: int, linear: str) -> torch.Tensor | None:
    """Return the order in which a fused linear of a layer has the stored outputs; None: as stored."""
    spec, heads = config.layers[layer], config.heads(layer)
    if spec.mixer is not None:
        by_key_head = config.names.delta_by_key_head and linear in ("qkv", "ba")
        return _rows_by_key_head(spec.mixer, linear) if by_key_head else None
    order_D = rotary_order(spec.rope, heads.head_dim)
    if linear != "qkv" or (order_D is None and not spec.output_gate):
        return None
    num_q = config.num_heads * (1 + spec.output_gate)
    rows_MD = torch.arange((num_q + 2 * heads.num_kv_heads) * heads.head_dim).view(-1, heads.head_dim)
    if spec.output_gate:  # after each query head
        rows_MD = torch.cat([rows_MD[1:num_q:2], rows_MD[:num_q:2], rows_MD[num_q:]])
    rotated = slice(num_q - config.num_heads, num_q + heads.num_kv_heads)
    if order_D is not None:
        rows_MD[rotated] = rows_MD[rotated, order_D]
    return rows_MD.flatten()


def _rows_by_key_head(delta: DeltaNet, linear: str) -> torch.Tensor:
    """Return the rows of q, k, v, z, or of b and a, of all heads, stored key head by key head."""
    repeats = delta.num_value_heads // delta.num_key_heads
    values = repeats * delta.value_dim
    sizes = (repeats, repeats) if linear == "ba" else (delta.key_dim, delta.key_dim, values, values)
    rows_KN = torch.arange(delta.num_key_heads * sum(sizes)).view(delta.num_key_heads, -1)
    return torch.cat([part_KN.flatten() for part_KN in rows_KN.split(sizes, dim=1)])


class WeightReader:
    """Reads a checkpoint of `config` layer by layer, so that packing holds only one layer twice.

    Weights are moved to `device` first, and all processing happens there.
    """

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device = CPU) -> None:
        self.config = config
        num_experts = max((each.experts.num_experts for each in config.layers if each.experts), default=0)
        self.checkpoint = Checkpoint(
            folder,
            unused=(*CACHE_SCALES, *(config.quantization.unused if config.quantization is not None else ())),
            device=device,
            names=gguf_names(config.names, num_experts),
        )
        embedding = f"{config.names.embedding}.weight"
        found = (prefix for prefix in PREFIXES if f"{prefix}{embedding}" in self.checkpoint)
        self.prefix = next(found, GGUF_PREFIX)
        """Prefix of the names of the decoder's tensors."""
        self.embedding_name = f"{self.prefix}{embedding}"
        self.head_name = f"{PREFIXES[self.prefix]}lm_head"
        if self.prefix not in ("model.", ""):
            self.checkpoint.skip_parts(ENCODERS)
        unused = range(config.num_layers, config.num_layers + config.num_unused_layers)
        unused_layers = (f"{self.prefix}{config.names.layer.format(layer)}" for layer in unused)
        self.checkpoint.skip_parts((*unused_layers, *DRAFT_HEADS))
        self._head_names = {name for name in self.checkpoint.left if name.startswith(f"{self.head_name}.")}
        self.ties_head = config.tie_embeddings and self._ties_head()
        """True if the output embedding is the input embedding. If config.json ties them, the checkpoint may still
        contain a different output embedding, as merged fine-tunes do, which is then used; or the output embedding only.
        """

    def _ties_head(self) -> bool:
        head = f"{self.head_name}.weight"
        if self._head_names != {head}:
            return not self._head_names  # several tensors: the head is quantized
        if self.config.num_classes is None and self.embedding_name not in self.checkpoint:
            self.embedding_name = head
        elif self.config.num_classes is None and not self.checkpoint.holds_copy(head, self.embedding_name):
            return False
        else:
            self.checkpoint.skip(head)
        return True

    def embedding(self) -> LinearWeight:
        """Read the input embedding, as a linear's weight (V, H)."""
        shape_VH = self.config.vocab_size, self.config.hidden_size
        if self.embedding_name in self.checkpoint:
            return DenseWeight(self._copied(self.embedding_name, shape_VH))
        return read_gguf(StoredLinear(self.embedding_name.removesuffix(".weight"), shape_VH, self.checkpoint))

    def position_embedding(self) -> torch.Tensor | None:
        """Read the table of learned positions (P, H); None if the model has none."""
        name, shape = self.config.names.position, (self.config.max_position, self.config.hidden_size)
        return self._copied(f"{self.prefix}{name}.weight", shape) if name else None

    def final_norm(self) -> Norm:
        return self._norm(f"{self.prefix}{self.config.names.final_norm}")

    @property
    def has_vocabulary_head(self) -> bool:
        """True if the model predicts next tokens: not with a classification head, nor as a bare decoder without output
        embedding."""
        if self.config.num_classes is not None:
            return False
        return self.config.tie_embeddings or bool(self.prefix or self._head_names)

    def lm_head(self) -> LinearWeight:
        """Read the untied output embedding."""
        if not self._head_names:
            raise ModelError(
                f"{self.checkpoint.folder}: tensor {self.head_name}.weight is missing from the checkpoint, and "
                "config.json does not tie the output embedding to the input embedding; if it should, set "
                "tie_word_embeddings: true there"
            )
        return self._linear(self.head_name, (self.config.vocab_size, self.config.hidden_size), bias=False)

    def class_head(self) -> torch.Tensor | None:
        """Read the classification head (classes, H); None if the model has none."""
        classes = self.config.num_classes
        return None if classes is None else self._copied("score.weight", (classes, self.config.hidden_size))

    def layers(self) -> Iterator[LayerWeights]:
        names = self.config.names
        for index, spec in enumerate(self.config.layers):
            prefix = f"{self.prefix}{names.layer.format(index)}"
            linears = self.config.linears(index)
            heads = self.config.heads(index)
            order_D = None if spec.mixer else rotary_order(spec.rope, heads.head_dim)
            yield LayerWeights(
                qkv=self._ordered(index, "qkv", self._fused(linears["qkv"], spec.qkv_bias)),
                o=self._fused(linears["o"], spec.o_bias),
                gate_up=self._fused(linears["gate_up"], spec.mlp_bias) if "gate_up" in linears else None,
                down=self._fused(linears["down"], spec.mlp_bias) if "down" in linears else None,
                attn_norm=self._norm(f"{prefix}{names.attn_norm}") if spec.pre_norm else None,
                attn_post_norm=self._norm(f"{prefix}{names.attn_post_norm}") if spec.post_norm else None,
                mlp_norm=self._norm(f"{prefix}{names.mlp_norm}") if spec.pre_norm else None,
                mlp_post_norm=self._norm(f"{prefix}{names.mlp_post_norm}") if spec.post_norm else None,
                qk_norm=self._qk_norm(prefix, spec, heads, order_D),
                residual_scale=float(self._copied(f"{prefix}{names.residual_scale}", (1,)))
                if spec.residual_scale
                else 1.0,
                sinks_N=self._copied(f"{prefix}{names.sinks}", (self.config.num_heads,)) if spec.sinks else None,
                routed=None if spec.experts is None else self._routed(index, prefix, spec.experts),
                ba=None if spec.mixer is None else self._ordered(index, "ba", self._unrounded(linears["ba"])),
                delta=None if spec.mixer is None else self._delta(f"{prefix}{names.delta}", spec.mixer),
            )

    def _ordered(self, layer: int, linear: str, weight: LinearWeight) -> LinearWeight:
        rows_N = output_rows(self.config, layer, linear)
        return weight if rows_N is None else select_outputs(weight, rows_N.to(self.checkpoint.device))

    def _unrounded(self, parts: StoredParts) -> LinearWeight:
        """Read a linear of few outputs, which is not quantized at load: publishers leave it in 16 bits."""
        if not isinstance(self.config.quantization, RoundToNearest):
            return self._fused(parts, bias=False)
        stored = (StoredLinear(f"{self.prefix}{name}", (rows, inputs), self.checkpoint) for name, rows, inputs in parts)
        return concatenate([linear.dense() for linear in stored])

    def _delta(self, prefix: str, shape: DeltaNet) -> DeltaWeights:
        heads, convolved = (shape.num_value_heads,), (shape.num_channels, 1, shape.conv_width)
        return DeltaWeights(
            shape,
            conv_WC=self._copied(f"{prefix}conv1d.weight", convolved).squeeze(1).float().t().contiguous(),
            decay_V=-self._copied(f"{prefix}A_log", heads).float().exp(),
            dt_bias_V=self._copied(f"{prefix}dt_bias", heads).float(),
            norm_D=self._copied(f"{prefix}norm.weight", (shape.value_dim,)).float(),
        )

    def _routed(self, layer: int, prefix: str, spec: ExpertSpec) -> RoutedWeights:
        names, size = self.config.names, (spec.num_experts, self.config.hidden_size)
        bias_E = self._copied(f"{prefix}{names.router}.bias", size[:1]) if spec.router_bias else None
        router = DenseWeight(self._copied(f"{prefix}{names.router}.weight", size), bias_E)
        choice_bias_E = self._copied(f"{prefix}{names.choice_bias}", size[:1]) if spec.choice_bias else None
        scale_E = self._copied(f"{prefix}{names.expert_scale}", size[:1]) if spec.expert_scale else None
        shared_gate = f"{prefix}{names.shared_gate}.weight"
        gate = DenseWeight(self._copied(shared_gate, (1, size[1]))) if spec.shared_gate else None
        bias, packed = self.config.layers[layer].mlp_bias, f"{prefix}{names.expert.replace('{}.', '')}"
        if names.packed_experts == "by_inputs":
            experts = self._interleaved_experts(packed, spec)
        elif names.packed_experts == "by_outputs" and f"{packed}gate_up_proj" in self.checkpoint:
            experts = self._packed_experts(packed, spec)
        elif names.packed_experts == "by_outputs" and f"{packed}gate_up_proj_packed" in self.checkpoint:
            experts = self._quantized_experts(packed, spec)
        else:
            each = [self.config.expert_linears(layer, expert) for expert in range(spec.num_experts)]
            gate_up = tuple(_one_form(self._fused(linears["gate_up"], bias)) for linears in each)
            experts = ExpertWeights(gate_up, tuple(self._fused(linears["down"], bias) for linears in each))
        norms = self._expert_norms(prefix) if spec.own_norms else None
        return RoutedWeights(router, choice_bias_E, scale_E, gate, norms, experts)

    def _expert_norms(self, prefix: str) -> ExpertNorms:
        """Read the norms of experts. The router's inputs are also divided by the root of their number."""
        names, hidden = self.config.names, self.config.hidden_size
        router_H = self._copied(f"{prefix}{names.router_norm}", (hidden,)).float() * hidden**-0.5
        others = names.expert_norm, names.expert_post_norm, names.shared_post_norm
        return ExpertNorms(Norm(router_H), *(self._norm(f"{prefix}{name}") for name in others))

    def _packed_experts(self, prefix: str, spec: ExpertSpec) -> ExpertWeights:
        """Read experts of which one tensor holds a linear of all, as (experts, outputs, inputs)."""
        width, hidden = spec.width, self.config.hidden_size

        def read(name: str, shape_ENK: tuple[int, int, int]) -> tuple[LinearWeight, ...]:
            stored_ENK = self.checkpoint.read_float(f"{prefix}{name}", shape_ENK)
            return self._rounded(f"{prefix}{name}", [DenseWeight(stored_NK) for stored_NK in stored_ENK])

        gate_up = read("gate_up_proj", (spec.num_experts, 2 * width, hidden))
        return ExpertWeights(gate_up, read("down_proj", (spec.num_experts, hidden, width)))

    def _quantized_experts(self, prefix: str, spec: ExpertSpec) -> ExpertWeights:
        """Read the same in compressed-tensors: `name`_packed and `name`_scale are those of all experts."""

        def read(name: str, shape_NK: tuple[int, int]) -> tuple[LinearWeight, ...]:
            linears = [f"{prefix}{expert}.{name}" for expert in range(spec.num_experts)]
            for part in ("packed", "scale"):
                whole = f"{prefix}{name}_{part}"
                stored = self.checkpoint.read(whole)
                if stored.shape[:1] != (spec.num_experts,):
                    raise ModelError(
                        f"{whole}: found {tuple(stored.shape)}, expected those of {spec.num_experts} experts"
                    )
                self.checkpoint.parts |= zip((f"{linear}.weight_{part}" for linear in linears), stored)
            shapes = dict.fromkeys((f"{linear}.weight_shape" for linear in linears), torch.tensor(shape_NK))
            self.checkpoint.parts |= shapes
            return tuple(self._linear(linear, shape_NK, bias=False) for linear in linears)

        width, hidden = spec.width, self.config.hidden_size
        return ExpertWeights(read("gate_up_proj", (2 * width, hidden)), read("down_proj", (hidden, width)))

    def _interleaved_experts(self, prefix: str, spec: ExpertSpec) -> ExpertWeights:
        """Read experts of which one tensor holds a linear of all, as (experts, inputs, outputs). The outputs of gate
        and up are interleaved."""
        width, hidden = spec.width, self.config.hidden_size
        order_N = torch.arange(2 * width).view(-1, 2).t().flatten().to(self.checkpoint.device)
        gate_up = self._by_inputs(f"{prefix}gate_up_proj", (spec.num_experts, 2 * width, hidden))
        down = self._by_inputs(f"{prefix}down_proj", (spec.num_experts, hidden, width))
        return ExpertWeights(tuple(select_outputs(weight, order_N) for weight in gate_up), down)

    def _by_inputs(self, name: str, shape_ENK: tuple[int, int, int]) -> tuple[LinearWeight, ...]:
        num_experts, outputs, inputs = shape_ENK
        bias_EN = self._copied(f"{name}_bias", (num_experts, outputs))
        if isinstance(self.config.quantization, Mxfp4Format):
            prefix, _, linear = name.rpartition(".")
            stored = StoredLinear(prefix, (outputs, inputs), self.checkpoint)
            return tuple(read_expert_blocks(stored, linear, num_experts, bias_EN))
        stored_EKN = self.checkpoint.read_float(name, (num_experts, inputs, outputs))
        pairs = zip(stored_EKN, bias_EN, strict=True)
        return self._rounded(name, [DenseWeight(stored_KN.t(), bias_N) for stored_KN, bias_N in pairs])

    def _rounded(self, name: str, experts: Sequence[DenseWeight]) -> tuple[LinearWeight, ...]:
        """Return the experts' weights of the linear `name`, quantized if that is done at load."""
        if isinstance(self.config.quantization, RoundToNearest):
            return tuple(self.config.quantization.quantize(each, name) for each in experts)
        return tuple(experts)

    def _qk_norm(
        self, prefix: str, spec: LayerSpec, heads: Heads, order_D: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        c, sizes, head_dim = self.config, (1, 1), heads.head_dim
        if spec.qk_norm == "none" or spec.mixer is not None:
            return None
        if spec.qk_norm == "full":
            sizes = c.num_heads, heads.num_kv_heads
        names = c.names.q_norm, c.names.k_norm
        q_norm, k_norm = (
            self._norm(f"{prefix}{name}", head_dim * size).weight_H for name, size in zip(names, sizes, strict=True)
        )
        if order_D is None:
            return q_norm, k_norm
        q_norm, k_norm = (norm.view(-1, head_dim)[:, order_D].flatten() for norm in (q_norm, k_norm))
        return q_norm, k_norm

    def finish(self) -> None:
        self.checkpoint.finish()

    def _copied(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor that may be kept. On the CPU it is copied: otherwise a small tensor would keep the whole mapped
        file in memory. Linears need no copy, because they are repacked."""
        stored = self.checkpoint.read_float(name, shape)
        return stored.clone() if stored.device == CPU else stored

    def _norm(self, name: str, width: int | None = None) -> Norm:
        """Read a norm; its weight is in float32 if an offset is added, which narrower types would round."""
        width = self.config.hidden_size if width is None else width
        weight_H = self._copied(f"{name}.weight", (width,))
        if self.config.norm_offset:
            weight_H = weight_H.float() + self.config.norm_offset
        is_layer_norm = self.config.norm_kind == "layer"
        return Norm(weight_H, self._copied(f"{name}.bias", (width,)) if is_layer_norm else None)

    def _fused(self, parts: list[tuple[str, int, int]], bias: bool) -> LinearWeight:
        return concatenate([self._linear(f"{self.prefix}{name}", (rows, inputs), bias) for name, rows, inputs in parts])

    def _linear(self, prefix: str, shape_NK: tuple[int, int], bias: bool) -> LinearWeight:
        bias_N = self._copied(f"{prefix}.bias", shape_NK[:1]) if bias else None
        if self.config.names.is_transposed and prefix != self.head_name:
            stored_KN = self.checkpoint.read_float(f"{prefix}.weight", shape_NK[::-1])
            return DenseWeight(stored_KN.t().contiguous(), bias_N)
        linear, quantization = StoredLinear(prefix, shape_NK, self.checkpoint, bias_N), self.config.quantization
        return linear.dense() if quantization is None else quantization.read_linear(linear)


def _one_form(weight: LinearWeight) -> LinearWeight:
    """Return an expert's weight for products of all experts, which read one form."""
    if isinstance(weight, StackedWeight):
        return DenseWeight(weight.dequantize(torch.float32), weight.bias_N)
    return weight


def as_stored(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return `config` with `tie_embeddings` as the tensors in `folder` have it. Raises ModelError."""
    return replace(config, tie_embeddings=WeightReader(folder, config).ties_head) if config.tie_embeddings else config
