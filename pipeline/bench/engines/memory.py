"""What an engine takes in memory against what it has to hold: weights and KV cache."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeline.bench.measure import resident_bytes
from pipeline.bench.shapes import bench_model
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig
from pipeline.engine.startup.memory import return_freed_bytes, weight_bytes
from pipeline.model.config import read_config


@dataclass(frozen=True)
class MemoryTaken:
    """In bytes. taken: the resident set's growth while the engine was loaded and warmed up, over that of a process
    which has run an engine of the shape `tiny`: libraries and compiled code are not in it. Scratch of a step is."""

    taken_bytes: int
    weight_bytes: int
    kv_bytes: int

    @property
    def excess(self) -> float:
        """As a share of what has to be held."""
        held = self.weight_bytes + self.kv_bytes
        return self.taken_bytes / held - 1

    def to_text(self) -> str:
        taken, weights, kv = (f"{count / 2**20:,.0f}" for count in (self.taken_bytes, self.weight_bytes, self.kv_bytes))
        return (
            f"Memory, MB: {taken} above a process that has run the shape tiny; weights {weights}, KV cache {kv}: "
            f"{self.excess:+.1%}."
        )


def load_measured(
    config: EngineConfig, say: Callable[[str], None], folder: str | None = None
) -> tuple[Engine, MemoryTaken | None]:
    """The engine of `config`, warmed up, and what it took; None on a GPU, whose KV cache takes what is free.

    `folder`: where the checkpoint of the shape tiny is written. The caller closes the engine.
    """
    tiny = str(bench_model("tiny", folder, say).folder)
    with Engine(EngineConfig(tiny, max_model_len=64, max_num_seqs=2, num_threads=config.num_threads)) as small:
        small.warm_up()
    del small
    gc.collect()
    return_freed_bytes()
    before_bytes = resident_bytes()
    engine = Engine(config, say)
    engine.warm_up()
    device = torch.device(str(engine.resolved["device"]))
    if device.type != "cpu":
        return engine, None
    model, dtype = read_config(locate_model(config.model)), getattr(torch, str(engine.resolved["dtype"]))
    num_tokens = int(engine.resolved["num_kv_blocks"]) * int(engine.resolved["block_size"])
    return engine, MemoryTaken(
        resident_bytes() - before_bytes,
        weight_bytes(model, device, dtype),
        num_tokens * model.kv_bytes_per_token(dtype),
    )
