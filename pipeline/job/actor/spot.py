"""Spot notices: a thread polls the cloud's metadata service for the end of this machine.

A notice drains as SIGTERM does: on the driver's machine it stops the run, on an engine actor's machine it stops that
actor, whose units move to others. If no metadata service answers, that is logged once and has no other effect: a notice
saves work, but no row depends on it.
"""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Literal

Cloud = Literal["aws", "gcp", "azure"]

POLL_S = 5.0  # AWS gives two minutes of notice, GCP and Azure thirty seconds
ANSWER_S = 2.0
MAX_SILENT = 3  # consecutive requests without a response before a warning
_AWS = "http://169.254.169.254"
_GCP = "http://metadata.google.internal"
_AZURE = "http://169.254.169.254"


class _NoResponse(Exception):
    """The service is absent: no connection, or no response in time. A 404 is a response."""


class SpotNotice:
    """Poll every POLL_S until `close` or the first notice; `came` is then true."""

    def __init__(
        self, cloud: Cloud, on_notice: Callable[[], None], warn: Callable[[str], None], endpoint: str | None = None
    ) -> None:
        """`on_notice`: called once, in this object's thread. `warn`: called there with a message if no service
        responds.
        `endpoint`: replaces the cloud's address."""
        self._cloud = cloud
        self._poll = {
            "aws": lambda: _aws(endpoint or _AWS),
            "gcp": lambda: _gcp(endpoint or _GCP),
            "azure": lambda: _azure(endpoint or _AZURE),
        }[cloud]
        self._on_notice, self._warn = on_notice, warn
        self._closed = threading.Event()
        self.came = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="spot notice")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        num_silent = 0
        while not self._closed.is_set():
            try:
                if self._poll():
                    self.came = True
                    self._on_notice()
                    return
                num_silent = 0
            except _NoResponse as error:
                num_silent += 1
                if num_silent == MAX_SILENT:
                    self._warn(
                        f"run.spot_notice {self._cloud}: no metadata service responds on this machine ({error}), so "
                        "no spot notice can arrive. Is this the right cloud? Set it to off elsewhere"
                    )
            self._closed.wait(POLL_S)


def _aws(endpoint: str) -> bool:
    """Check EC2's `spot/instance-action`, which is missing (404) until the machine is to stop. Needs an IMDSv2
    token."""
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{endpoint}/latest/api/token", seconds, method="PUT")
    if token is None:
        return False
    action = _get(f"{endpoint}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return action is not None


def _gcp(endpoint: str) -> bool:
    """Check Compute Engine's `instance/preempted`, which turns from FALSE to TRUE."""
    answer = _get(f"{endpoint}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer is not None and answer.strip().upper() == "TRUE"


def _azure(endpoint: str) -> bool:
    """Check Scheduled Events for a `Preempt` event of this machine."""
    answer = _get(f"{endpoint}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    try:
        events = json.loads(answer or "{}").get("Events", [])
        return any(event.get("EventType") == "Preempt" for event in events)
    except (ValueError, AttributeError):
        return False


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return the body of a 200, None for another status. Proxies are bypassed: the service is local to the machine.

    Raises _NoAnswer.
    """
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as response:
            return response.read(65536).decode(errors="replace") if response.status == 200 else None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        raise _NoResponse(str(error)) from None
