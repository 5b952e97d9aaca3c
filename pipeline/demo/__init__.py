"""The embedded demonstration model: where its folders lie.

Owns the paths only, so importing it costs nothing. How the models were made is in the modules beside it
(`reports`, `tokenizer`, `train`, `quantize`) and in the README; what they are worth is measured by
`measure` and `check`.
"""

from pathlib import Path

MODELS = Path(__file__).parent / "models"
NAMES = ("target", "target-awq", "draft")


def demo_model(name: str) -> Path:
    """The folder of one shipped model: `target` (bf16), `target-awq` (int4) or `draft` (bf16, one layer).

    Raises `KeyError` for any other name.
    """
    if name not in NAMES:
        raise KeyError(f"no demonstration model is called {name!r}; there are {', '.join(NAMES)}")
    return MODELS / name
