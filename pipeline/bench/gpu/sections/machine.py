"""What the machine is, and what it reaches alone: copying memory and multiplying matrices."""

import shutil
import subprocess
from dataclasses import asdict

from pipeline.bench.gpu.device import device_facts, find_device
from pipeline.bench.gpu.rates import Stopwatch, measure_rates
from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.scale import scale_of
from pipeline.bench.measure import facts_to_text
from pipeline.kernels.select import default_dtype
from pipeline.model.config import DTYPES

ASKED = {  # what a figure may have to be read with
    "nvidia-smi": ["nvidia-smi"],
    "clocks": ["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE"],
    "gcc": ["gcc", "--version"],  # without a C compiler Triton starts nothing
    "ptxas": ["ptxas", "--version"],
    "packages": ["python3", "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
}
PATIENCE_S = 10.0


def run(result: Result) -> None:
    setting, scale = result.setting, scale_of(result.setting)
    device = find_device(setting.device, setting.is_smoke)
    facts = device_facts(device)
    result.keep(facts_to_text(facts), machine=facts)
    dtype = DTYPES.get(setting.dtype) or default_dtype(device, DTYPES["bfloat16"])
    rates = measure_rates(Stopwatch(device, scale.budget_s), dtype, scale.copy_bytes, scale.gemm_sizes)
    text = f"{facts_to_text(facts)}\n{rates.to_text()}"
    result.keep(text, rates=asdict(rates), dtype=str(dtype).removeprefix("torch."))
    if not setting.is_smoke:
        result.keep(said={name: said(command) for name, command in ASKED.items()})


def said(command: list[str]) -> str:
    """What a program says; that it is not there, or why it said nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there"
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"said nothing within {PATIENCE_S:.0f} s"
    return (ran.stdout + ran.stderr).strip()
