"""Captured steps in Triton's interpreter contain the sums over ranks, here of a communicator for one process."""

from pathlib import Path

import pytest
import torch

from pipeline.kernels.ranks import OneRank
from tests.engine.test_gpu_kernels import capture, engine_of, tokens_of, watch_replays
from tests.kernels.triton.problems import DEVICE


class ScalingRanks(OneRank):
    """Counts sums. Each one doubles its input, as the sum over two equal ranks does."""

    num_sums = 0

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return x_TH.mul_(2)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU")
def test_replayed_steps_sum_over_the_ranks(int4_folder: Path) -> None:
    found = []
    for kernels in ("reference", "triton"):
        engine = engine_of(int4_folder, kernels, speculation="off")
        ranks = engine.runner.decoder.ranks = ScalingRanks()
        for layer in engine.runner.decoder.layers:
            layer.ranks = ranks
        steps = []
        if kernels == "triton":
            steps = watch_replays(capture(engine, max_num_seqs=3, max_queries=3, max_tokens=6))
            ranks.num_sums = 0
        tokens, num_steps = tokens_of(engine, is_drawn=False)
        found.append(tokens)
        # Two for each of two layers; the first chunk of a prompt needs no results of the last layer.
        assert ranks.num_sums == 4 * num_steps - 2
    assert len(steps) > num_steps / 2
    assert found[0] == found[1]
