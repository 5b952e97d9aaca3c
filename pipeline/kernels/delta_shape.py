"""Shape of a Gated DeltaNet (`delta_net.py`), and how far its states lag. No torch."""

from dataclasses import dataclass

MAX_LAG = 8
"""Tokens of a sequence in a step up to which its state lags."""
NUM_INPUTS = 16
"""Kept inputs of a state: those of a step that lags, and those that its convolution sees before."""
STATE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class DeltaNet:
    """Shape of a layer. key_dim, value_dim: values of a head. conv_width: tokens that the convolution sees.
    state_dtype: of kept states, one of STATE_DTYPES."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_dtype: str = "float32"

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_outputs

    @property
    def num_outputs(self) -> int:
        return self.num_value_heads * self.value_dim

    def state_bytes(self, input_bytes: int) -> int:
        """Return the bytes of a sequence's state. input_bytes: of a number in the model's type."""
        inputs = NUM_INPUTS * (self.num_channels + 2 * self.num_value_heads)
        value_bytes = 4 if self.state_dtype == "float32" else 2
        return value_bytes * self.num_outputs * self.key_dim + input_bytes * inputs + 4
