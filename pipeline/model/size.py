"""What the cost model (`pipeline.roofline`) is told of a checkpoint."""

from dataclasses import replace

from pipeline.model.config import ModelConfig
from pipeline.roofline.step import AWQ, DENSE, DecoderSize, Weights
from pipeline.weights.formats import is_int4


def decoder_size(config: ModelConfig) -> DecoderSize:
    return DecoderSize(
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
    )


def weights_of(config: ModelConfig, activation_dtype: str = "auto") -> Weights:
    """What the linears of a checkpoint are on a card: 4-bit integers stay so, all others are computed from 16 bit; with
    activations in fp8 quantized ones are a byte each."""
    quantized = config.quantization
    if quantized is None:
        return DENSE
    group_size = quantized.group_size or config.hidden_size
    if activation_dtype == "fp8":
        return replace(AWQ if is_int4(quantized) else DENSE, group_size=group_size, fp8=True)
    return replace(AWQ, group_size=group_size) if is_int4(quantized) else DENSE
