"""The model that a section measures: its checkpoint, its sizes, the device and type it is served in, and what the card
reaches, by the session's first section."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.bench.gpu.device import find_device
from pipeline.bench.gpu.rates import Rates, Stopwatch, measure_rates
from pipeline.bench.gpu.scale import Scale, scale_of
from pipeline.bench.gpu.task import Setting
from pipeline.bench.shapes import bench_model
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES, ModelConfig, read_config
from pipeline.roofline.cost_model import DecoderSize, Weights

MACHINE = "machine"  # the task that measures rates


@dataclass(frozen=True)
class Subject:
    name: str
    folder: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    scale: Scale

    @classmethod
    def of(cls, setting: Setting, model: str, dtype: str | None = None) -> "Subject":
        """dtype: another one than the session's. Writes the checkpoint where it is not there yet."""
        device = find_device(setting.device, setting.is_smoke)
        folder = bench_model(model, setting.models, lambda text: print(text, flush=True)).folder
        config = read_config(folder)
        served = DTYPES.get(dtype or setting.dtype) or default_dtype(device, config.dtype)
        return cls(model, folder, config, device, served, scale_of(setting))

    @property
    def size(self) -> DecoderSize:
        return self.config.size

    @property
    def weights(self) -> Weights:
        return self.config.weights_on_card()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device, self.scale.budget_s)


def known_rates(setting: Setting, stopwatch: Stopwatch, dtype: torch.dtype, scale: Scale) -> Rates:
    """Those of the session's first section; measured now where it failed."""
    try:
        told = json.loads((setting.results / f"{MACHINE}.json").read_text())["figures"]["rates"]
        return Rates(**told)
    except (OSError, KeyError):
        return measure_rates(stopwatch, dtype, scale.copy_bytes, scale.gemm_sizes)
