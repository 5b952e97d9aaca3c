"""The GPU session: sections as processes of their own, one after another, inside a budget of minutes.

`plan` says which in which order; `run` starts them (`processes`) while the budget lasts and packs what they leave
(`packing`, `triton_cache`). Needs neither Ray nor pydantic nor click: `python -m pipeline.bench.gpu.session`.
"""
