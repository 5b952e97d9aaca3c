"""Generation without a job: a handful of prompts from a flag, a text or JSON Lines file, or standard input.

They are read (`prompts.py`), run through an engine in this process (`inference.py`; no Ray, no output folder) and
handed back in the input's order (`answer.py`). A Parquet input is a job, with all its promises, and not done here.
"""

from pipeline.generate.answer import Answer, Saved
from pipeline.generate.inference import Done, answers, complete
from pipeline.generate.prompts import Prompts, is_dataset, prompt_of_dataset, read_prompts

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
