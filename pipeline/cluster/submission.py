"""Ray's job server on a cluster's head: submit a job there, join its run, follow and stop it.

A submission is called `<job>-<digest of its output>-<n>`, n counting the tries. While one runs, no other of the same
job starts: a second caller joins it. Ray accepts each name once, so of two callers at the same moment one joins the
other.
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline.cluster.shipped_job import JOB_FILE, STOP_WAIT_BEYOND_DRAIN_S, ShippedJob
from pipeline.errors import ConfigError, EnvironmentFailed, Interrupted
from pipeline.machine.host import wall_time

POLL_S = 1.0
HEAD_START_S = 60.0  # a head that was just started answers some seconds before it accepts jobs
LOST_S = 300.0  # without an answer of the job server until following ends
_ADDRESS = "RAY_API_SERVER_ADDRESS"  # the one variable that Ray prefers to its argument
_DIGEST, _OUTPUT = "pipeline_job", "pipeline_output"
_NOISY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")


class JobServer:
    """Client of a job server. Raises EnvironmentFailed where it does not answer, ConfigError where it refuses us."""

    def __init__(self, address: str | None) -> None:
        """`address`: http://HEAD:8265; else RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else this machine's Ray. Sends the
        token where RAY_AUTH_MODE=token is set."""
        if address is not None:
            os.environ[_ADDRESS] = address
        self._place = os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        with self._errors():
            self._client = JobSubmissionClient()

    @property
    def url(self) -> str:
        return self._client.get_address()

    def find(self, submission_id: str) -> JobDetails | None:
        return next((each for each in self._list() if each.submission_id == submission_id), None)

    def running(self, name: str) -> JobDetails | None:
        """The try of the job `name` that runs or waits."""
        return next((each for each in self._tries(name) if not each.status.is_terminal()), None)

    def submit(self, job: ShippedJob, options: list[str], log: Callable[[str], None]) -> tuple[JobDetails, bool]:
        """Send a job with `options` of `pipeline run`, or find its run; and whether it was sent.

        Raises ConfigError where the job runs into this output with other settings.
        """
        deadline_s, is_first = time.monotonic() + HEAD_START_S, True
        while True:
            try:
                return self._submit_once(job, options)
            except EnvironmentFailed as error:  # the head has just started, or another caller took the number
                if time.monotonic() > deadline_s:
                    raise
                if is_first:
                    tries = f"trying again for up to {HEAD_START_S:.0f} s"
                    log(f"{self._place} has not accepted the job; {tries} ({error.__cause__!s:.200})")
            is_first = False
            time.sleep(POLL_S)

    def _submit_once(self, job: ShippedJob, options: list[str]) -> tuple[JobDetails, bool]:
        tries = self._tries(job.name)
        found = next((each for each in tries if not each.status.is_terminal()), None)
        if found is not None:
            if (found.metadata or {}).get(_DIGEST) != job.digest:
                raise ConfigError(
                    f"{found.submission_id} is running into {job.output}, with other settings. Wait for its end, "
                    f"or stop it: pipeline cancel {found.submission_id}"
                )
            return found, False
        number = 1 + max((int(str(each.submission_id).rpartition("-")[2]) for each in tries), default=0)
        submission_id, wait_s = f"{job.name}-{number}", int(job.drain_s) + STOP_WAIT_BEYOND_DRAIN_S
        with tempfile.TemporaryDirectory() as folder, self._errors():
            job.write(Path(folder))
            self._client.submit_job(
                entrypoint=" ".join(["exec pipeline run", JOB_FILE, *options]),
                submission_id=submission_id,
                runtime_env={"working_dir": folder, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}},
                metadata={_DIGEST: job.digest, _OUTPUT: job.output},
            )
        return self._details(submission_id), True

    def stop(self, submission_id: str) -> JobDetails:
        """Have Ray send SIGTERM to the driver, and wait until it has drained."""
        with self._errors():
            self._client.stop_job(submission_id)
        while not (details := self._details(submission_id)).status.is_terminal():
            time.sleep(POLL_S)
        return details

    def follow(self, submission_id: str, write: Callable[[str], None], log: Callable[[str], None]) -> JobDetails:
        """Pass on what the driver prints, from its beginning, until the submission ends. A broken connection is made
        again; the run does not depend on it."""
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
                details = self._details(submission_id)
                heard_s = time.monotonic()
                if details.status.is_terminal():
                    return details
            except (EnvironmentFailed, RuntimeError, OSError, aiohttp.ClientError) as error:
                if time.monotonic() - heard_s > LOST_S:
                    raise EnvironmentFailed(
                        f"{self._place} has not answered for {LOST_S:.0f} s. {submission_id} may still run there."
                    ) from error
                log(f"{self._place} does not answer; trying again. The job does not depend on this.")
            time.sleep(POLL_S)

    def _details(self, submission_id: str) -> JobDetails:
        with self._errors():
            return self._client.get_job_info(submission_id)

    def _list(self) -> list[JobDetails]:
        with self._errors():
            return self._client.list_jobs()

    def _tries(self, name: str) -> list[JobDetails]:
        ours = [each for each in self._list() if _DIGEST in (each.metadata or {})]
        return [each for each in ours if str(each.submission_id).rpartition("-")[0] == name]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise ConfigError(
                f"{self._place} requires a token: {str(error).splitlines()[0]} Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's."
            ) from None
        except (RuntimeError, OSError) as error:
            raise EnvironmentFailed(
                f"{self._place} did not answer as the job server of a Ray cluster: {error} Give --address "
                "http://HEAD:8265; the head needs ray[default], and `ray start --head --include-dashboard=true`."
            ) from error


def exit_code(details: JobDetails) -> int | None:
    """The exit code of `pipeline submit`: the driver's, 75 where it was stopped, 3 where it has none. None until the
    submission has ended."""
    if details.status == JobStatus.STOPPED:
        return Interrupted.exit_code
    if not details.status.is_terminal():
        return None
    code = details.driver_exit_code
    return EnvironmentFailed.exit_code if code is None or code < 0 else code  # a signal's is negative


def to_json(details: JobDetails) -> dict[str, Any]:
    started_ms, ended_ms = details.start_time, details.end_time
    return {
        "submission_id": details.submission_id,
        "state": details.status.value,
        "exit_code": exit_code(details),
        "output": (details.metadata or {}).get(_OUTPUT, ""),
        "seconds": started_ms and round((ended_ms or 1000 * wall_time().timestamp()) / 1000 - started_ms / 1000, 3),
    }
