"""What a model's form costs in quality: perplexity, divergence from a reference, the outputs it still gives, and what
it takes in time and memory.

`measurement.py` takes the models through the rows, `table.py` shows what was found. Logits are the engine's own
(`engine/quality/divergence.py`), so what is measured is what a job would run, kernels included.
"""

from pipeline.evaluate.measurement import ModelVariant, evaluate
from pipeline.evaluate.table import Evaluation, Measured

__all__ = ["Evaluation", "Measured", "ModelVariant", "evaluate"]
