"""Ray's job server on a cluster's head: submitting a job there, joining its run, following and stopping it.

A submission is called `<job>-<digest of its output>-<n>`, n counting the tries. While one runs, none other of the same
job begins: whoever asks joins it. Ray takes each name once, so of two who ask at the same moment one joins the other.
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline import __version__
from pipeline.cluster.shipped_job import JOB_FILE, ShippedJob
from pipeline.errors import ConfigError, EnvironmentFailed, Interrupted
from pipeline.machine.host import wall_time

BEYOND_DRAIN_S = 30  # from the end of run.drain_s to the end of the driver: parts and records are being written
POLL_S = 1.0
AGENT_S = 60.0  # a head that was just started answers some seconds before it takes jobs
LOST_S = 300.0  # without an answer of the job server until following it is given up
_ADDRESS = "RAY_API_SERVER_ADDRESS"  # the one variable that Ray puts before its argument
_DIGEST, _OUTPUT, _VERSION = "pipeline_job", "pipeline_output", "pipeline_version"
# loggers that tell of each package and connection
_TALKATIVE = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
_NOT_FOUND = 127  # a shell's exit code for a command that is not there


@dataclass(frozen=True)
class Submission:
    """One try of a job on the cluster. `exit_code` is None until the driver has ended; `seconds` are those since its
    start, or up to its end."""

    id: str
    state: str
    output: str
    digest: str
    exit_code: int | None
    message: str
    began_s: float | None
    ended_s: float | None

    @property
    def is_over(self) -> bool:
        return JobStatus(self.state).is_terminal()

    @property
    def seconds(self) -> float | None:
        return None if self.began_s is None else (self.ended_s or wall_time().timestamp()) - self.began_s

    def to_json(self) -> dict[str, Any]:
        return {
            "submission_id": self.id,
            "state": self.state,
            "exit_code": self.exit_code,
            "output": self.output,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
        }

    @classmethod
    def of(cls, found: JobDetails) -> "Submission":
        state, metadata = found.status.value, found.metadata or {}
        code = Interrupted.exit_code if found.status == JobStatus.STOPPED else found.driver_exit_code
        if (code is None and found.status.is_terminal()) or (code is not None and code < 0):
            code = EnvironmentFailed.exit_code
        return cls(
            found.submission_id or "",
            state,
            metadata.get(_OUTPUT, ""),
            metadata.get(_DIGEST, ""),
            code,
            found.message or "",
            found.start_time and found.start_time / 1000,
            found.end_time and found.end_time / 1000,
        )


class JobServer:
    """Raises EnvironmentFailed where it does not answer, ConfigError where it refuses us."""

    def __init__(self, address: str | None) -> None:
        """`address`: http://HEAD:8265; left out, what RAY_API_SERVER_ADDRESS or RAY_ADDRESS says, else the Ray of this
        machine. The token goes along where RAY_AUTH_MODE=token is set."""
        if address is not None:
            os.environ[_ADDRESS] = address
        self._place = os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        with self._asked():
            self._client = JobSubmissionClient()

    @property
    def url(self) -> str:
        return self._client.get_address()

    def submissions(self) -> list[Submission]:
        """Those of this program, the oldest first."""
        with self._asked():
            found = [job for job in self._client.list_jobs() if _DIGEST in (job.metadata or {})]
        return [Submission.of(job) for job in sorted(found, key=lambda job: job.start_time or 0)]

    def submission(self, submission_id: str) -> Submission:
        with self._asked():
            return Submission.of(self._client.get_job_info(submission_id))

    def running(self, name: str) -> Submission | None:
        """The try of the job `name` that is under way or waits."""
        return next((one for one in self._tries(name) if not one.is_over), None)

    def submit(self, job: ShippedJob, options: list[str]) -> tuple[Submission, bool]:
        """Send a job, or find its run that is under way; and whether it was sent. `options`: of `pipeline run`.

        Raises ConfigError where another form of the job is running into this output.
        """
        while True:
            tries = self._tries(job.name)
            for one in tries:
                if not one.is_over and one.digest != job.digest:
                    raise ConfigError(
                        f"{one.id} is running into {job.output}, with other settings. Wait for its end, or stop it: "
                        f"pipeline cancel {one.id}"
                    )
                if not one.is_over:
                    return one, False
            number = 1 + max((int(one.id.rpartition("-")[2]) for one in tries), default=0)
            submission_id = f"{job.name}-{number}"
            if self._sent(job, options, submission_id):
                return self.submission(submission_id), True

    def stop(self, submission_id: str) -> bool:
        """Ask the driver to drain. False where it has ended."""
        with self._asked():
            return self._client.stop_job(submission_id)

    def ended(self, submission_id: str) -> Submission:
        """Wait for the end of a submission."""
        while not (now := self.submission(submission_id)).is_over:
            time.sleep(POLL_S)
        return now

    def follow(self, submission_id: str, write: Callable[[str], None], say: Callable[[str], None]) -> Submission:
        """Hand on what the driver prints, from its beginning, until the submission ends. A connection that breaks is
        made again; the run does not depend on it."""
        printed, heard_s = 0, time.monotonic()

        async def read_on() -> None:
            nonlocal printed, heard_s
            passed = 0  # the log comes from its beginning each time
            async for text in self._client.tail_job_logs(submission_id):
                heard_s, passed = time.monotonic(), passed + len(text)
                if passed > printed:
                    write(text[printed - passed :])
                    printed = passed

        while True:
            try:
                asyncio.run(read_on())
                now = self.submission(submission_id)
                heard_s = time.monotonic()
                if now.is_over:
                    return now
            except (EnvironmentFailed, RuntimeError, OSError, aiohttp.ClientError) as error:
                if time.monotonic() - heard_s > LOST_S:
                    raise EnvironmentFailed(
                        f"{self._place} has not answered for {LOST_S:.0f} s. {submission_id} may go on there."
                    ) from error
                say(f"{self._place} does not answer; trying again. The job does not depend on this.")
            time.sleep(POLL_S)

    def why_it_failed(self, ended: Submission) -> str:
        """What a submission's end means where its driver did not say so itself."""
        if ended.exit_code == _NOT_FOUND:
            return (
                "the cluster has no `pipeline` command. Install parquet-batch-inference there, in the environment in "
                "which `ray start` runs, or take an image that has it"
            )
        return ended.message.strip() or f"it ended as {ended.state} without a word"

    def _tries(self, name: str) -> list[Submission]:
        return [one for one in self.submissions() if one.id.rpartition("-")[0] == name]

    def _sent(self, job: ShippedJob, options: list[str], submission_id: str) -> bool:
        """False where the name is taken by now."""
        wait_s, deadline_s = int(job.drain_s) + BEYOND_DRAIN_S, time.monotonic() + AGENT_S
        with tempfile.TemporaryDirectory() as folder, self._asked():
            job.write(Path(folder))
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=" ".join(["exec pipeline run", JOB_FILE, *options]),
                        submission_id=submission_id,
                        runtime_env={"working_dir": folder, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}},
                        metadata={_DIGEST: job.digest, _OUTPUT: job.output, _VERSION: __version__},
                    )
                    return True
                except RuntimeError as error:
                    if "already exists" in str(error) and submission_id in str(error):
                        return False
                    if "No available agent" not in str(error) or time.monotonic() > deadline_s:
                        raise EnvironmentFailed(f"{self._place} did not take the job: {error}") from error
                time.sleep(POLL_S)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise ConfigError(
                f"{self._place} asks for a token: {str(error).splitlines()[0]} Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's."
            ) from None
        except (RuntimeError, OSError) as error:
            if "does not exist" in str(error):
                raise ConfigError(f"{self._place}: {str(error).splitlines()[0]}") from None
            raise EnvironmentFailed(
                f"No job server of a Ray cluster at {self._place}: {error} Give --address http://HEAD:8265; the head "
                "needs ray[default], and `ray start --head --include-dashboard=true`."
            ) from error
