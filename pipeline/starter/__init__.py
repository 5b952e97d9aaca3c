"""Write a first job file for a dataset and a model, after inspecting both, for `pipeline init`."""

from pipeline.starter.job_text import job_text, save_job, write_job
from pipeline.starter.look import Look, look

__all__ = ["Look", "job_text", "look", "save_job", "write_job"]
