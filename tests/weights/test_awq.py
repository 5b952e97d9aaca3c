"""AWQ int4: unpacking over all nibbles, and the two paths of its linear on CPU."""

import numpy as np
import torch

from pipeline.kernels.cpu.linear.selection import Int4Linear, serves_int4
from pipeline.weights.awq import ORDER
from pipeline.weights.packed import GroupIntWeight
from pipeline.weights.tensor_reader import unpack_words_transposed


def test_every_nibble_lands_in_its_column() -> None:
    # written out from AutoAWQ's packing: nibble i of a word is column ORDER[i]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rng = np.random.default_rng(0)
    true = rng.permutation(np.repeat(np.arange(16), 16)).reshape(16, 16)
    words = np.zeros((16, 2), dtype=np.uint32)
    for row in range(16):
        for word in range(2):
            for nibble in range(8):
                words[row, word] |= np.uint32(true[row, 8 * word + order[nibble]] << (4 * nibble))
    unpacked = unpack_words_transposed(torch.from_numpy(words.view(np.int32)), ORDER)
    assert np.array_equal(unpacked.numpy(), true.T)


def test_int4_and_dense_paths_agree_to_bfloat16_rounding() -> None:
    torch.manual_seed(0)
    weight = GroupIntWeight(
        torch.randint(0, 16, (192, 256), dtype=torch.uint8),
        torch.rand(192, 2) * 0.05 + 0.01,
        torch.randint(0, 16, (192, 2)).float(),
        128,
        torch.randn(192),
    )
    assert serves_int4(weight, torch.bfloat16)
    linear = Int4Linear(weight)
    x_TK = torch.randn(5, 256, dtype=torch.bfloat16)
    exact = x_TK.float() @ weight.dequantize(torch.float32).T + weight.bias_N
    scale = exact.abs().max()
    for path in (linear.int4, linear.dense):
        assert float((path(x_TK).float() - exact).abs().max() / scale) < 0.02
    linear.crossover = 4
    assert torch.equal(linear(x_TK), linear.dense(x_TK))
    assert torch.equal(linear(x_TK[:4]), linear.int4(x_TK[:4]))
