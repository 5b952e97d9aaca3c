"""Shares of a card's data sheet that the engine's kernels reach: measured on one H200, assumed for other cards. Rates
and latencies of links between cards are assumed.

Measured on 2026-11-26 with torch 2.11 and triton 3.6, on the shapes of Llama-3-8B (AWQ int4, bfloat16) and of a 0.6B
model. The H200's data sheet says 4.8 TB/s, 989.5 TFLOP/s in 16 bits and 1,979 in fp8. `gemm`, `kv` and `layer_s` were
fitted, within the range that kernels and steps showed, to five whole jobs: the match is a fit, not a validation.
"""

from collections.abc import Collection

from pipeline.roofline.cost_model import Reached

MEASURED_ON, DATE = "H200", "2026-11-26"  # a card of hardware.yaml

BOUND = Reached()
"""The data sheet itself: a lower bound on time."""

MEASURED = Reached(
    # A large copy moves 4.26 TB/s; the head's product reads its weight at 4.23, a layer's 16-bit linears at 3.9.
    bandwidth=0.85,
    # Decode reads 3.3 to 3.4 TB/s at contexts of 260 to 300 tokens, 4.0 to 4.2 at 1,040 to 1,130.
    kv=0.80,
    # A layer's linears at 8,192 tokens take 4,777 us (0.76); with norms, rotations and gating between them 5,135
    # (0.70). In jobs it is 0.66: 20.3 s for the prompts of `classification`, 10.9 ms for a decode step of 512 rows.
    gemm=0.66,
    # The fused product takes 118 us for 64 tokens (0.24) and 704 us for 512 (0.32).
    int4=0.24,
    # For 1 to 16 tokens, unpacking the 113 MB of a layer alone takes 74 us, less in a captured step: `single` takes
    # 2.85 ms per token.
    int4_read=0.50,
    # Prompts of 735 tokens reach 210 TFLOP/s, of 2,048 320, of 8,192 411; rows after a shared prefix 55 to 107.
    attention=0.21,
    # The layer of 8,192 tokens takes 3,860 us including the rounding of activations (0.47); gaps are as with 16 bits.
    fp8=0.40,
    # Between kernels and between steps the card is idle for 0.25 to 0.35 ms per step.
    step_s=0.3e-3,
    # About a dozen short kernels: 12 to 20 us in a step of one row of the 8B model, 33 us in one of the 0.6B model.
    layer_s=25e-6,
    # Links are assumed: no job ran on several cards. NVIDIA states 370 of 450 GB/s for a ring over an H100's NVLink
    # (nccl-tests issue 212). For PCIe NCCL counts on at most 24 of 32 GB/s (`PCI_BW` in src/graph/topo.h); without
    # peer access tensors pass through the host's memory.
    nvlink=0.80,
    pcie=0.50,
    # Copies of pinned memory reach 54.6 of 64 GB/s over the H200's PCIe 5 (2026-11-27).
    host_copy=0.85,
    # Latencies of NCCL's LL protocol, which it uses for small tensors, by its own table (`ncclTunerConstantsDefaults`
    # in src/graph/tuning.cc, commit 5067397c): 6.6 us for a ring, 0.6 us a hop over NVLink, 1.0 us over PCIe.
    exchange_s=6.6e-6,
    nvlink_hop_s=0.6e-6,
    pcie_hop_s=1.0e-6,
)


def source(cards: Collection[str], has_groups: bool = False) -> str:
    """Return the source of figures that `MEASURED` gives for these cards. cards: names in hardware.yaml. has_groups:
    several cards compute together."""
    found = f"kernels as measured on one {MEASURED_ON} ({DATE})"
    if not set(cards) <= {MEASURED_ON}:
        found += "; on other cards assumed to reach the same shares of the data sheet"
    return f"{found}; exchanges between cards assumed" if has_groups else found
