"""Paths of the embedded demonstration models and adapters. Importing this module is cheap.

The README describes how `tools/demo` made the models, and their quality. `check` checks the output of a job.
"""

from pathlib import Path

MODELS = Path(__file__).parent / "models"
NAMES = ("target", "target-awq", "draft")
ADAPTERS = ("invoice", "short")


def demo_model(name: str) -> Path:
    """Return the folder of a shipped model: `target` (bf16), `target-awq` (int4) or `draft` (bf16, one layer).

    Raises KeyError for any other name.
    """
    if name not in NAMES:
        raise KeyError(f"unknown demonstration model {name!r}; expected one of {', '.join(NAMES)}")
    return MODELS / name


def demo_adapter(name: str) -> Path:
    """Return the folder of a shipped LoRA adapter of `target`: `invoice` or `short`. Raises KeyError for any other
    name."""
    if name not in ADAPTERS:
        raise KeyError(f"unknown demonstration adapter {name!r}; expected one of {', '.join(ADAPTERS)}")
    return MODELS.parent / "adapters" / name
