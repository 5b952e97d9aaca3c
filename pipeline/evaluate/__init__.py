"""Evaluate models, such as quantized ones: perplexity, divergence from a reference, equal outputs, speed and memory.

`measurement.py` runs the models over the rows and `table.py` shows the results. Logits come from the engine
(`engine/quality/divergence.py`), so the evaluation measures exactly what a job would run, including its kernels.
"""

from pipeline.evaluate.measurement import ModelVariant, evaluate
from pipeline.evaluate.table import Evaluation, Measured

__all__ = ["Evaluation", "Measured", "ModelVariant", "evaluate"]
