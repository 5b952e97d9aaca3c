"""AWQ int4 by autoawq (Lin et al., arXiv 2306.00978), in the GEMM layout. Needs the extra `quantize`."""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, ModelError


def check_installed() -> None:
    """Raises ConfigError when autoawq is not there, with the command that installs it."""
    if find_spec("awq") is None:
        raise ConfigError(
            "--method awq needs autoawq, which is not installed: pip install 'parquet-batch-inference[quantize]' "
            "(or pip install autoawq==0.2.9); the other methods work without it"
        )


def quantize_by_autoawq(
    source: Path, partial: Path, group_size: int, texts: Sequence[Sequence[int]], say: Callable[[str], None]
) -> dict[str, Any]:
    """Write the weights into `partial` and return what config.json has to say of them.

    All layers are in memory, and an interrupted run begins anew. Raises ModelError for a model that autoawq does not
    know.
    """
    check_installed()
    # it joins the texts and cuts them at this length; longer ones it would drop without a word
    length = max(map(len, texts))
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    say(f"quantizing by autoawq with {len(texts):,} texts")
    try:
        model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", safetensors=True)
    except TypeError as error:  # "... isn't supported yet."
        raise ModelError(f"{source}: autoawq cannot take this model: {error}") from None
    wanted = {"zero_point": True, "q_group_size": group_size, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        AutoTokenizer.from_pretrained(source),
        quant_config=wanted,
        calib_data=[list(ids) for ids in texts],  # pyright: ignore[reportArgumentType]  # says its loader
        max_calib_samples=len(texts),
        max_calib_seq_len=length,
    )
    written = partial / "awq"
    model.save_quantized(str(written), safetensors=True)
    for file in written.glob("model*.safetensors*"):
        file.replace(partial / file.name)
    # its own config.json switches sampling on and the cache off, and notes the folder it read
    quantization = json.loads((written / "config.json").read_text())["quantization_config"]
    shutil.rmtree(written)
    return quantization
