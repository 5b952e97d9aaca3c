"""Makes a quantized checkpoint of a plain one.

`grid.py` has the numbers a weight may take, `gptq.py` chooses among them so that a layer's outputs stay, `layers.py`
takes a checkpoint through that one layer at a time, `layouts.py` writes them as other engines read them, `awq.py` hands
the work to autoawq. `folder.py` owns the output: whole or not at all.
"""

from pipeline.quantize.run import Recipe, quantize

__all__ = ["Recipe", "quantize"]
