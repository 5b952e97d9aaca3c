"""Generation without a job, for a few prompts from a flag, a text or JSON Lines file, or standard input.

`prompts.py` reads them, `inference.py` runs them through an engine in this process without Ray, and `answer.py` prints
or saves the answers in input order. Datasets are refused: they are jobs.
"""

from pipeline.generate.answer import Answer, Saved
from pipeline.generate.inference import Done, answers, complete
from pipeline.generate.prompts import Prompts, is_dataset, read_prompts

__all__ = [
    "Answer",
    "Done",
    "Prompts",
    "Saved",
    "answers",
    "complete",
    "is_dataset",
    "read_prompts",
]
