"""What kernels reached as shares of the card's data sheet: the form in which estimates and `pipeline bench roofline`
take it (`ASSUMED` in pipeline/estimate/cards.py, `--bandwidth-share` and the like)."""

from dataclasses import replace

from pipeline.bench.gpu.rates import Rates
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import Reached

OF_BANDWIDTH, OF_FLOPS = ("bandwidth", "kv"), ("gemm", "int4", "attention")


def of_data_sheet(reached: Reached, rates: Rates, card: Card) -> Reached:
    """reached: shares of `rates`. fp8 stays as it is: no section measures products in fp8 alone."""
    copied = rates.copy_bytes_per_s / card.bandwidth_bytes_per_s
    multiplied = rates.gemm_flops_per_s / card.bf16_flops
    scaled = {name: getattr(reached, name) * copied for name in OF_BANDWIDTH}
    scaled |= {name: getattr(reached, name) * multiplied for name in OF_FLOPS}
    return replace(reached, **scaled)


def shares_to_text(model: str, reached: Reached, rates: Rates, card: Card) -> str:
    shares = of_data_sheet(reached, rates, card)
    told = ", ".join(f"{name}={getattr(shares, name):.2f}" for name in (*OF_BANDWIDTH, *OF_FLOPS))
    return f"Kernels of {model} reached, of the data sheet of {card.name}: {told}"
