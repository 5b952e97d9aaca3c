"""AWQ int4 by autoawq (Lin et al., arXiv 2306.00978), in the GEMM layout. Needs the extra `quantize`."""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, ModelError


def check_installed() -> None:
    """Raise ConfigError, with the command that installs autoawq, if it is not installed."""
    if find_spec("awq") is None:
        raise ConfigError(
            "--method awq needs autoawq, which is not installed: pip install 'parquet-batch-inference[quantize]' "
            "(or pip install autoawq==0.2.9); the other methods work without it"
        )


def quantize_by_autoawq(
    source: Path, partial: Path, group_size: int, texts: Sequence[Sequence[int]], log: Callable[[str], None]
) -> dict[str, Any]:
    """Write the weights into `partial` and return their description for config.json.

    Keeps all layers in memory; an interrupted run starts over. Raises ModelError for a model that autoawq does not
    support.
    """
    check_installed()
    # autoawq concatenates the texts and cuts them at this length; it silently drops longer ones
    length = max(map(len, texts))
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    log(f"quantizing by autoawq with {len(texts):,} texts")
    try:
        model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", safetensors=True)
    except TypeError as error:  # "... isn't supported yet."
        raise ModelError(f"{source}: autoawq does not support this model ({error}); use --method gptq") from None
    wanted = {"zero_point": True, "q_group_size": group_size, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        AutoTokenizer.from_pretrained(source),
        quant_config=wanted,
        calib_data=[list(ids) for ids in texts],  # pyright: ignore[reportArgumentType]  # its loader accepts ids
        max_calib_samples=len(texts),
        max_calib_seq_len=length,
    )
    written = partial / "awq"
    model.save_quantized(str(written), safetensors=True)
    for file in written.glob("model*.safetensors*"):
        file.replace(partial / file.name)
    # autoawq's config.json enables sampling, disables the cache and contains the source folder
    quantization = json.loads((written / "config.json").read_text())["quantization_config"]
    shutil.rmtree(written)
    return quantization
