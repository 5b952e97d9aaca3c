"""Choice of the output embedding: its own tensor if the checkpoint's differs from the input embedding."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import ModelError
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder
from pipeline.model.load import as_stored
from tests.model.test_load import CONFIG, edit_config, load, rewrite
from tests.model_folders import VOCAB, Family, load_reference, write_checkpoint
from tests.weights.packers import named, write_pair
from tests.weights.test_model_folders import WHOLE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def copied(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def one_value_apart(tensors: Tensors) -> None:
    copied(tensors)
    tensors[HEAD][-1, -1] += 1


def without_the_embedding(tensors: Tensors) -> None:
    tensors.pop(EMBEDDING)


def without_prefix(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def head_of(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(torch.eye(decoder.config.hidden_size)).t()


@pytest.mark.parametrize(
    ("change", "tie", "is_tied"),
    [
        (lambda tensors: None, True, False),
        (lambda tensors: None, False, False),
        (one_value_apart, True, False),
        (copied, True, True),
        (copied, False, False),
        (without_the_embedding, True, True),
        (lambda tensors: tensors.pop(HEAD), True, True),
        (without_prefix, True, False),
    ],
    ids=["own", "own, untied", "a value apart", "a copy", "a copy, untied", "head alone", "embedding alone", "bare"],
)
def test_the_output_embedding_is_that_of_transformers(
    tmp_path: Path, change: Callable[[Tensors], None], tie: bool, is_tied: bool
) -> None:
    folder = write_checkpoint(tmp_path / "m", Family("qwen3", "qwen3"), CONFIG | {"head_dim": 8}, seed=0)
    rewrite(folder, change)
    edit_config(folder, tie_word_embeddings=tie)
    decoder, expected = load(folder), load_reference(folder)
    assert torch.equal(decoder.embedding.weight_NK, expected.get_input_embeddings().weight)
    torch.testing.assert_close(head_of(decoder), expected.get_output_embeddings().weight.detach())
    stored = as_stored(read_config(folder), folder)
    assert stored.tie_embeddings == is_tied
    ours = stored.num_parameters() - stored.num_linear_parameters()
    assert ours == VOCAB * CONFIG["hidden_size"] * (1 if is_tied else 2)


@pytest.mark.parametrize("head_is_quantized", [False, True], ids=["16-bit head", "quantized head"])
@pytest.mark.parametrize("method", ["awq gemm", "gptq", "compressed int4"])
def test_a_quantized_checkpoint_has_its_own_output_embedding(
    tmp_path: Path, method: str, head_is_quantized: bool
) -> None:
    quantization, pack, _ = WHOLE[method]
    folder, dense = write_pair(tmp_path, quantization | {"ignore": []}, lambda stem: pack)
    expected = head_of(load(dense))
    if head_is_quantized:
        packed, weight = pack(np.random.default_rng(0), (VOCAB, 128))
        expected = torch.from_numpy(weight)

        def quantized(tensors: Tensors) -> None:
            del tensors[HEAD]
            tensors.update(named("lm_head", packed))

        rewrite(folder, quantized)
    edit_config(folder, tie_word_embeddings=True)
    torch.testing.assert_close(head_of(load(folder)), expected)


def test_a_missing_output_embedding_names_the_key_that_would_tie_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", Family("llama", "llama"), CONFIG, seed=0)
    rewrite(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing.*tie_word_embeddings: true"):
        load(folder)
