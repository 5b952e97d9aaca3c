"""Data in and out: which rows there are, what is asked of each, and how results are committed.

Follow a row: `source` reads its window, `prompts` renders it, `bucket` places it in a unit, `units` carries it,
`output.parts` commits the finished unit, `output.result_columns` names the columns it ends up in. No torch and no Ray.
"""
