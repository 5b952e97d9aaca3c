"""The job file: read safely (`jobfile.py`), checked section by section (`sections/`, `keys.py`) and as a whole
(`contradictions.py`, `job.py`), and its mistakes reported all at once with the line, the key and what to write
(`mistakes.py`).

Owns the shape of a job and what makes two jobs different; looks at no dataset, model or output.
"""

from pipeline.config.job import JobConfig
from pipeline.config.jobfile import JobFileError, Mistake
from pipeline.config.load import job_from_flags, load_job
from pipeline.config.values import FromColumn, parse_bytes

__all__ = ["FromColumn", "JobConfig", "JobFileError", "Mistake", "job_from_flags", "load_job", "parse_bytes"]
