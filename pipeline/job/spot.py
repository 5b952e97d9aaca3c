"""Whether the cloud is about to take this machine back: asked of its own metadata service, in a thread.

A notice drains as SIGTERM does: the driver's machine stops the run, an engine actor's machine stops that actor, whose
units go to others. Where no metadata service answers there is no notice, and nothing else happens: a notice saves
work, no row depends on it.
"""

import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Literal

Cloud = Literal["aws", "gcp", "azure"]

POLL_S = 5.0  # AWS gives two minutes, GCP and Azure thirty seconds
ANSWER_S = 2.0
_AWS = "http://169.254.169.254"
_GCP = "http://metadata.google.internal"
_AZURE = "http://169.254.169.254"


class SpotNotice:
    """Asks every POLL_S until `close` or the first notice; `came` says whether there was one."""

    def __init__(self, cloud: Cloud, told: Callable[[], None], endpoint: str | None = None) -> None:
        """`told`: called once, in this object's thread. `endpoint`: in the place of the cloud's own address."""
        self._asks = {
            "aws": lambda: _aws(endpoint or _AWS),
            "gcp": lambda: _gcp(endpoint or _GCP),
            "azure": lambda: _azure(endpoint or _AZURE),
        }[cloud]
        self._told = told
        self._closed = threading.Event()
        self.came = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="spot notice")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            if self._asks():
                self.came = True
                self._told()
                return
            self._closed.wait(POLL_S)


def _aws(endpoint: str) -> bool:
    """EC2's `spot/instance-action` is not there (404) until the machine is to stop. Needs an IMDSv2 token."""
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _answer(f"{endpoint}/latest/api/token", seconds, method="PUT")
    if token is None:
        return False
    action = _answer(f"{endpoint}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return action is not None


def _gcp(endpoint: str) -> bool:
    """Compute Engine's `instance/preempted` turns from FALSE to TRUE."""
    answer = _answer(f"{endpoint}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer is not None and answer.strip().upper() == "TRUE"


def _azure(endpoint: str) -> bool:
    """Scheduled Events lists a `Preempt` event for this machine."""
    answer = _answer(f"{endpoint}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    try:
        events = json.loads(answer or "{}").get("Events", [])
        return any(event.get("EventType") == "Preempt" for event in events)
    except (ValueError, AttributeError):
        return False


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The body of a 200, else None. A proxy of the environment is not for the machine's own address."""
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as response:
            return response.read(65536).decode(errors="replace") if response.status == 200 else None
    except (OSError, ValueError):  # URLError is an OSError
        return None
