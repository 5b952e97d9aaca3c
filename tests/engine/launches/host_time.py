"""How long the host works on a layer that is launched kernel by kernel, without the launches: building them, planning,
and what torch does around them. `TRITON_INTERPRET=1 python -m tests.engine.launches.host_time`;
no GPU is needed.

Triton's launches are recorded, and cuBLAS's products are replaced by an allocation of their outputs. Seconds are of the
processor, and beside them stands how often an addition of two numbers in torch would have fitted in, measured in turn:
that says more on another machine. At last what the device takes for a layer by the cost model: what the host must not
exceed.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

from pipeline.bench.roofline import model_size
from pipeline.model.decoder import DecoderLayer
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings, StepTokens, step_seconds
from pipeline.roofline.shares import MEASURED
from tests.engine.launches.noted import LAYERS, STEPS, an_h100, runner_of, write_models
from tests.kernels.triton.problems import recorded_launches

REPEATS, ADDITIONS, MIDDLE = 300, 20, 1
DEVICE_MODELS, CARD = ("qwen3-0.6b", "llama-8b-awq"), "h100"
DEVICE_STEPS = (64, 0), (64, 320), (64, 2048), (512, 0), (512, 7680)  # rows that decode, tokens of a prompt beside them


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, an_h100():
        for weights, path in write_models(Path(folder)).items():
            runner = runner_of(path)
            for name, step in STEPS.items():
                layer_s, step_s, addition_s = _measured(partial(runner.execute, step))
                around_s = step_s - LAYERS * layer_s
                times = (f"{1e6 * s:.0f} us = {s / addition_s:.0f} additions" for s in (layer_s, around_s))
                print(f"| {' | '.join((weights, name, *times))} |")
    for model in DEVICE_MODELS:
        print(f"| {' | '.join((model, *(f'{1e6 * _device_s(model, *step):.0f}' for step in DEVICE_STEPS)))} |")


def _device_s(model: str, rows: int, prompt: int) -> float:
    """Of a layer, the head over the vocabulary included. Rows have contexts of 1,024 tokens."""
    size, weights, _ = model_size(model)
    prompts = [prompt] if prompt else []
    tokens = StepTokens(np.array([1] * rows + prompts), np.array([1024] * rows + prompts), rows + len(prompts))
    return step_seconds(tokens, size, weights, Ceilings.of_card(find_card(CARD), MEASURED)).total_s / size.layers


def _measured(step: Callable[[], object]) -> tuple[float, float, float]:
    """Medians of a layer in the middle, of the step with all layers, and of an addition."""
    forward, layers, steps, additions = DecoderLayer.forward, [], [], []
    one, into = torch.ones(1), torch.ones(1)

    def timed(layer: DecoderLayer, *arguments: object) -> object:
        made = []
        seconds = _seconds(lambda: made.append(forward(layer, *arguments)))  # type: ignore[arg-type]
        if layer.index == MIDDLE:
            layers.append(seconds)
        return made[0]

    def allocated(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        return x_MK.new_empty(len(x_MK), len(weight_NK))

    with patch.object(DecoderLayer, "forward", timed), patch("torch.nn.functional.linear", allocated):
        for _ in range(REPEATS):
            with recorded_launches():
                steps.append(_seconds(step))
            additions.append(_seconds(lambda: [torch.add(one, one, out=into) for _ in range(ADDITIONS)]) / ADDITIONS)
    return median(layers), median(steps), median(additions)


if __name__ == "__main__":
    main()
