"""A first job file for a dataset and a model, for `pipeline init`: looks at both, writes what fits."""

from pipeline.starter.job_text import job_text, write_job
from pipeline.starter.look import Look, look

__all__ = ["Look", "job_text", "look", "write_job"]
