"""Client of Ray's job server on a cluster's head: submit a job, join its run, follow and stop it.

A submission is named `<job>-<digest of its output>-<n>`, where n counts attempts. While one runs, no other submission
of the same job starts: a second caller joins it. Ray accepts each name only once, so of two simultaneous callers one
joins the other's submission.
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
HEAD_START_S = 60.0  # a new head answers some seconds before it accepts jobs
LOST_S = 300.0  # without an answer of the job server before `follow` gives up
_ADDRESS = "RAY_API_SERVER_ADDRESS"  # Ray prefers this variable to its argument
_DIGEST, _OUTPUT = "pipeline_job", "pipeline_output"
_NOISY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")


class JobServer:
    """Client of a job server. Raises EnvironmentFailed if it does not answer, ConfigError if it denies access."""

    def __init__(self, address: str | None) -> None:
        """Connect to `address`, such as http://HEAD:8265.

        None uses RAY_API_SERVER_ADDRESS or RAY_ADDRESS, or else this machine's Ray. Sends the token if
        RAY_AUTH_MODE=token is set.
        """
        if address is not None:
            os.environ[_ADDRESS] = address
        self._address = os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
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
        """Return the running or pending submission of the job `name`, or None."""
        return next((each for each in self._tries(name) if not each.status.is_terminal()), None)

    def submit(self, job: ShippedJob, options: list[str], log: Callable[[str], None]) -> tuple[JobDetails, bool]:
        """Submit a job with `options` of `pipeline run`, or join its run. Returns the submission and whether it is new.

        Raises ConfigError if the job already runs with other settings and the same output.
        """
        deadline_s, is_first = time.monotonic() + HEAD_START_S, True
        while True:
            try:
                return self._submit_once(job, options)
            except EnvironmentFailed as error:  # the head just started, or another caller used the number
                if time.monotonic() > deadline_s:
                    raise
                if is_first:
                    retries = f"retrying for up to {HEAD_START_S:.0f} s"
                    log(f"{self._address} has not accepted the job; {retries} ({error.__cause__!s:.200})")
            is_first = False
            time.sleep(POLL_S)

    def _submit_once(self, job: ShippedJob, options: list[str]) -> tuple[JobDetails, bool]:
        tries = self._tries(job.name)
        found = next((each for each in tries if not each.status.is_terminal()), None)
        if found is not None:
            if (found.metadata or {}).get(_DIGEST) != job.digest:
                raise ConfigError(
                    f"{found.submission_id} is running with other settings and writes to {job.output}. Wait until it "
                    f"ends, or stop it: pipeline cancel {found.submission_id}"
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
        """Send SIGTERM to the driver through Ray, and wait until it has drained."""
        with self._errors():
            self._client.stop_job(submission_id)
        while not (details := self._details(submission_id)).status.is_terminal():
            time.sleep(POLL_S)
        return details

    def follow(self, submission_id: str, write: Callable[[str], None], log: Callable[[str], None]) -> JobDetails:
        """Stream the driver's log from its beginning until the submission ends.

        Reconnects when the connection breaks, which does not affect the run.
        """
        printed, last_answer_s = 0, time.monotonic()

        async def stream_log() -> None:
            nonlocal printed, last_answer_s
            passed = 0  # each connection streams the log from its beginning
            async for text in self._client.tail_job_logs(submission_id):
                last_answer_s, passed = time.monotonic(), passed + len(text)
                if passed > printed:
                    write(text[printed - passed :])
                    printed = passed

        while True:
            try:
                asyncio.run(stream_log())
                details = self._details(submission_id)
                last_answer_s = time.monotonic()
                if details.status.is_terminal():
                    return details
            except (EnvironmentFailed, RuntimeError, OSError, aiohttp.ClientError) as error:
                if time.monotonic() - last_answer_s > LOST_S:
                    raise EnvironmentFailed(
                        f"{self._address} has not answered for {LOST_S:.0f} s. {submission_id} may still be running."
                    ) from error
                log(f"{self._address} does not answer; reconnecting. The job is not affected.")
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
                f"{self._address} requires a token: {str(error).splitlines()[0]} Set RAY_AUTH_MODE=token, and set "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token."
            ) from None
        except (RuntimeError, OSError) as error:
            raise EnvironmentFailed(
                f"{self._address}: no answer from a Ray job server: {error} Pass --address http://HEAD:8265, and start "
                "the head with ray[default] installed by `ray start --head --include-dashboard=true`."
            ) from error


def exit_code(details: JobDetails) -> int | None:
    """Return the exit code for `pipeline submit`: the driver's, 75 if it was stopped, 3 if it has none.

    Returns None until the submission has ended.
    """
    if details.status == JobStatus.STOPPED:
        return Interrupted.exit_code
    if not details.status.is_terminal():
        return None
    code = details.driver_exit_code
    return EnvironmentFailed.exit_code if code is None or code < 0 else code  # negative after a signal


def to_json(details: JobDetails) -> dict[str, Any]:
    started_ms, ended_ms = details.start_time, details.end_time
    return {
        "submission_id": details.submission_id,
        "state": details.status.value,
        "exit_code": exit_code(details),
        "output": (details.metadata or {}).get(_OUTPUT, ""),
        "seconds": started_ms and round((ended_ms or 1000 * wall_time().timestamp()) / 1000 - started_ms / 1000, 3),
    }
