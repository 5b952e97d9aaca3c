"""Table of a model's memory, of the sequences that fit next to it, and of its speed, here and on known cards.

A model that does not fit one card is divided over the fewest that it fits, by tensor parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.estimate.cards import CONTEXT, PredictedSpeed, predicted_speed
from pipeline.estimate.fit import GROUP_SIZES, Fit, ServedModel
from pipeline.formatting import shown_bytes, table
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card, card_of_device, load_cards
from pipeline.roofline.shares import source

LENGTHS = (512, 2_048, 8_192, 32_768)
INT4_GROUP = 128  # inputs per scale of the int4 weights whose size is shown


@dataclass(frozen=True)
class OnDevice:
    """Fit of a model on a device. card: None for a device that `hardware.yaml` does not list. speed: None if it is not
    known or no sequence fits."""

    fit: Fit
    card: Card | None
    speed: PredictedSpeed | None

    @property
    def copy_s(self) -> float | None:
        """Seconds in which PCIe copies the weights in host memory, the minimum of a step; None if there are none, or
        the card is unknown."""
        if self.card is None or not self.fit.host_bytes:
            return None
        return self.fit.host_bytes / self.card.pcie_bytes_per_s


@dataclass(frozen=True)
class MemoryTable:
    """Fit of a model on several devices.

    checkpoint_bytes: file size by the format of the linears, with other weights in 16 bit. The devices' weight_bytes
    use the format that the engine loads: the model's own, or the job's quantization.
    """

    checkpoint_bytes: dict[str, int]
    lengths: tuple[int, ...]
    devices: tuple[OnDevice, ...]

    def sequences(self, each: OnDevice) -> list[int]:
        """Return the number of sequences of each of `lengths` tokens that fit at once."""
        return [each.fit.num_sequences(length) for length in self.lengths]

    def to_json(self) -> dict[str, Any]:
        names = ("name", "num_cards", "memory_bytes", "weight_bytes", "kv_bytes", "kv_bytes_per_token", "step_bytes",
                 "free_bytes", "host_bytes", "lacks")  # fmt: skip
        devices = [
            {name: getattr(each.fit, name) for name in names}
            | {"dtype": _shown(each.fit.dtype), "kv_dtype": _shown(each.fit.kv_dtype)}
            | {"sequences": self.sequences(each), "copy_s": each.copy_s, "speed": each.speed and vars(each.speed)}
            for each in self.devices
        ]
        return {"checkpoint_bytes": self.checkpoint_bytes, "lengths": self.lengths, "devices": devices}

    def to_text(self, width: int | None = None) -> str:
        files = "; ".join(f"{form} {shown_bytes(size)}" for form, size in self.checkpoint_bytes.items())
        lengths = [f"{length:,}" for length in self.lengths]
        parts = ["memory", "weights", "cache", "step", "free"]
        head = ["device", "cards", *parts, "dtype", "KV", "a token", *lengths, "prompts/s", "out/s"]
        rows = []
        for each in self.devices:
            fit, speed = each.fit, each.speed
            sizes = fit.memory_bytes, fit.weight_bytes, fit.kv_bytes, fit.step_bytes, fit.free_bytes
            memory = [shown_bytes(size) if size >= 0 else "" for size in sizes]
            fits = ["-" if fit.lacks else f"{count:,}" for count in self.sequences(each)]
            rates = () if speed is None else (speed.prompt_tokens_per_s, speed.output_tokens_per_s)
            shown = [f"{rate:,.0f}" for rate in rates] or ["", ""]
            kinds = _shown(fit.dtype), _shown(fit.kv_dtype), f"{fit.kv_bytes_per_token:,}"
            rows.append([fit.name, f"{fit.num_cards}", *memory, *kinds, *fits, *shown])
        names, has_groups = [p.fit.name for p in self.devices], any(p.fit.num_cards > 1 for p in self.devices)
        return "\n".join(
            [
                "memory of the model",
                f"  files           {files}",
                "  columns: cards of an engine (engine.tensor_parallel_size); memory of each: weights, KV cache, step,",
                "  free; sequences that fit at once, by length in tokens; prompt and output tokens per second",
                f"  by the cost model, for prompts and for the largest batch of {CONTEXT}-token sequences;",
                f"  {source(names, has_groups)}:",
                table(rows, head=head, sides="<>", width=width, indent=4),
                *self._lacking(),
                *self._host_memory(),
            ]
        )

    def _lacking(self) -> list[str]:
        """Return one line for each reason why devices cannot run this."""
        names: dict[str, list[str]] = {}
        for each in self.devices:
            if each.fit.lacks:
                names.setdefault(each.fit.lacks, []).append(each.fit.name)
        return [f"    {', '.join(lacking)} cannot run this: {reason}" for reason, lacking in names.items()]

    def _host_memory(self) -> list[str]:
        """Return the lines about weights in host memory."""
        offloading = [each for each in self.devices if each.fit.host_bytes and not each.fit.lacks]
        if not offloading:
            return []
        floors: dict[float, list[str]] = {}
        for each in offloading:
            if each.copy_s is not None:
                floors.setdefault(each.copy_s, []).append(each.fit.name)
        return [
            f"    {shown_bytes(max(each.fit.host_bytes for each in offloading))} more of each card's weights in host "
            "memory (engine.cpu_offload_gb);",
            "    a step takes at least the time that PCIe needs to copy them, by data sheet:",
            *(f"      {seconds * 1e3:,.3g} ms on {', '.join(names)}" for seconds, names in floors.items()),
        ]


def memory_table(model: ServedModel, device: torch.device) -> MemoryTable:
    """Return the fit of a model on `device`, of this machine, and on every known card."""
    context = model.config.max_position
    lengths = (*(length for length in LENGTHS if length < context), context)
    known = card_of_device(torch.cuda.get_device_properties(device).name) if device.type == "cuda" else None
    here = _on_device(model, known, model.on_device(device))
    devices = [_on_device(model, card, _on_group(model, card, min(lengths))) for card in load_cards()]
    return MemoryTable(_checkpoint_bytes(model.config), lengths, (here, *devices))


def _on_device(model: ServedModel, card: Card | None, fit: Fit) -> OnDevice:
    return OnDevice(fit, card, None if card is None else predicted_speed(card, model, fit))


def _on_group(model: ServedModel, card: Card, length: int) -> Fit:
    """Return the fit on the job's number of cards; by default on the fewest on which a sequence fits, or on one."""
    num_cards = model.engine.tensor_parallel_size
    found = (model.on_card(card, size) for size in (GROUP_SIZES if num_cards == 1 else (num_cards,)))
    fits = (fit for fit in found if not fit.lacks and fit.num_sequences(length))
    return next(fits, model.on_card(card, num_cards))


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checkpoint_bytes(config: ModelConfig) -> dict[str, int]:
    """Return the file size by weight format.

    Scales have 16 bits: one per output of an int8 linear (about one per `hidden_size` weights), and one per int4 group,
    which also has a 4-bit zero.
    """
    linears = config.num_linear_parameters()
    rest = 2 * config.num_embedding_parameters()
    return {
        "16 bit": 2 * linears + rest,
        "8 bit": linears + 2 * linears // config.hidden_size + rest,
        f"4 bit, groups of {INT4_GROUP}": int(linears * (0.5 + 2.5 / INT4_GROUP)) + rest,
    }
