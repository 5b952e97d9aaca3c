"""cuBLAS's fp8 products with one scale per 128 inputs of a token and of an output, or one for all inputs.

`torch._scaled_mm` supports block scales on compute capability 9.0 from cuBLASLt 12.9 on, other scales on all cards with
fp8 products. It is not public, its scales have changed from version to version, and cuBLASLt rejects some shapes, so
version numbers are no guide: a probe runs products of each weight's shape and compares them. cuBLAS chooses its tiles
by the number of tokens: a token's last bits depend on the rest of the step.
"""

import warnings

import torch

BLOCK = 128
MIN_TOKENS_PER_TOKEN = 65  # for products with one scale per token; for fewer tokens Triton's are faster
_PROBED_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 208, 256, 400, 512, 1040)
_PROBED_OUTPUTS = 64
_SUMS = 2**-11  # relative to the largest output: four times the error of an H200's sums
# Not their subclasses, which torch raises when memory ran out or a kernel failed.
_REFUSALS = RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError


def scaled_mm(
    value_MK: torch.Tensor, scale_BM: torch.Tensor, value_NK: torch.Tensor, scale_BN: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return (M, N) in `dtype`. Values are float8_e4m3fn, scales float32 for blocks B of 128 inputs, or for all inputs
    if B is 1; all are contiguous.

    M must be a multiple of `fp8_rounding.TOKENS_MULTIPLE`.
    """
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # no public name before torch 2.13
    return product(value_MK, value_NK.t(), scale_a=scale_BM.t(), scale_b=scale_BN, out_dtype=dtype)


class ScaledMm:
    """`scaled_mm` on one device in one type, for the weight shapes (N, K) that cuBLAS supports."""

    def __init__(self, dtype: torch.dtype, per_token: bool) -> None:
        self.dtype, self.min_tokens = dtype, MIN_TOKENS_PER_TOKEN if per_token else 1
        self._supported: dict[torch.Size, bool] = {}

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, per_token: bool) -> "ScaledMm | None":
        """Return None if a small product is rejected or wrong, like block scales on most cards. Waits for its
        result."""
        if device.type != "cuda" or not (per_token or torch.cuda.get_device_capability(device) == (9, 0)):
            return None
        value_NK = torch.randn(BLOCK, 2 * BLOCK, device=device).to(torch.float8_e4m3fn)
        scale_BN = torch.rand(1 if per_token else 2, BLOCK, device=device) + 0.1
        return cls(dtype, per_token) if agrees(value_NK, scale_BN, dtype) else None

    def probe(self, value_NK: torch.Tensor, scale_BN: torch.Tensor) -> None:
        """Run the product with several numbers of tokens, once per shape of weights. Waits for the results."""
        if value_NK.shape not in self._supported:
            self._supported[value_NK.shape] = True
            if not agrees(value_NK, scale_BN, self.dtype):
                self._disable(value_NK.shape, "wrong or rejected when probed")

    def supports(self, value_NK: torch.Tensor) -> bool:
        """Return whether a weight of this shape was probed and has not been rejected since."""
        return self._supported.get(value_NK.shape, False)

    def __call__(
        self, value_MK: torch.Tensor, scale_BM: torch.Tensor, value_NK: torch.Tensor, scale_BN: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `scaled_mm`; None if cuBLAS rejects it, which makes `supports` False for the weight's shape.

        cuBLAS rejects a product before it launches anything, so a capture that contains the call stays intact.
        """
        try:
            return scaled_mm(value_MK, scale_BM, value_NK, scale_BN, self.dtype)
        except _REFUSALS as error:
            if type(error) not in _REFUSALS:
                raise
            self._disable(value_NK.shape, f"rejected at {len(value_MK)} tokens: {error}")
            return None

    def _disable(self, shape: torch.Size, reason: str) -> None:
        self._supported[shape] = False
        outputs, inputs = shape
        warnings.warn(
            f"cuBLAS's fp8 product of {outputs} outputs and {inputs} inputs was {reason}. Triton computes linears of "
            "this shape from now on, which takes longer.",
            RuntimeWarning,
            stacklevel=2,
        )


@torch.inference_mode()
def agrees(value_NK: torch.Tensor, scale_BN: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether products in `dtype` with this weight are correct: with distinct scales in both directions, at all
    probed numbers of tokens, for outputs from the first to the last."""
    device, (num_outputs, num_inputs) = value_NK.device, value_NK.shape
    random = torch.Generator(device).manual_seed(0)
    output_n = torch.linspace(0, num_outputs - 1, _PROBED_OUTPUTS, device=device).long()
    wide_nK = value_NK.view(torch.uint8)[output_n].view(torch.float8_e4m3fn).float()
    num_blocks, block = len(scale_BN), num_inputs // len(scale_BN)
    allowed = torch.finfo(dtype).eps + _SUMS  # twice the rounding of the largest output
    wide_nK *= scale_BN[:, output_n].t().repeat_interleave(block, 1)
    for tokens in _PROBED_TOKENS:
        value_MK = torch.randn(tokens, num_inputs, device=device, generator=random).to(torch.float8_e4m3fn)
        scale_BM = torch.rand(num_blocks, tokens, device=device, generator=random) + 0.1
        try:
            found_Mn = scaled_mm(value_MK, scale_BM, value_NK, scale_BN, dtype)[:, output_n].float()
        except _REFUSALS as error:
            if type(error) not in _REFUSALS:
                raise
            return False
        expected_Mn = (value_MK.float() * scale_BM.t().repeat_interleave(block, 1)) @ wide_nK.t()
        if not bool((found_Mn - expected_Mn).abs().max() <= allowed * expected_Mn.abs().max()):
            return False
    return True
