"""Data in and out: reading input rows, rendering prompts, and committing results.

A row passes through these modules: `source` reads its window, `prompts` renders it, `bucket` assigns it to a unit,
`units` holds the unit, `output.parts` commits the finished unit, and `output.result_columns` names its columns. No
torch and no Ray.
"""
