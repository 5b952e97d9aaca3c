"""Generation without a job: a handful of prompts from a flag, a text or JSON Lines file, or standard input.

They are read (`prompts.py`), run through an engine in this process (`run.py`; no Ray, no output folder) and handed back
in the input's order (`answer.py`). A Parquet input is no business of this package: it is a job, with all its promises.
"""

from pipeline.generate.answer import Answer, Saved
from pipeline.generate.prompts import Prompts, is_dataset, prompt_of_dataset, read_prompts
from pipeline.generate.run import Done, answers, complete

__all__ = [
    "Answer",
    "Done",
    "Prompts",
    "Saved",
    "answers",
    "complete",
    "is_dataset",
    "prompt_of_dataset",
    "read_prompts",
]
