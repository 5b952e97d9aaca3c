"""The job file: parsed safely (`jobfile.py`), checked by section (`sections/`, `keys.py`) and as a whole
(`contradictions.py`, `job.py`). All mistakes are reported at once, each with line, key and correction (`mistakes.py`).

Defines the keys of a job and the identity of a job. Reads no dataset, model or output.
"""

from pipeline.config.job import JobConfig
from pipeline.config.jobfile import JobFileError, Mistake
from pipeline.config.load import job_from_flags, load_job
from pipeline.config.values import FromColumn, parse_bytes

__all__ = ["FromColumn", "JobConfig", "JobFileError", "Mistake", "job_from_flags", "load_job", "parse_bytes"]
