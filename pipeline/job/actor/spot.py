"""Whether the cloud is about to take this machine back: asked of its own metadata service, in a thread.

A notice drains as SIGTERM does: the driver's machine stops the run, an engine actor's machine stops that actor, whose
units go to others. Where no metadata service answers that is said once, and nothing else happens: a notice saves work,
no row depends on it.
"""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Literal

Cloud = Literal["aws", "gcp", "azure"]

POLL_S = 5.0  # AWS gives two minutes, GCP and Azure thirty seconds
ANSWER_S = 2.0
MAX_SILENT = 3  # questions in a row without an answer, before that is said
_AWS = "http://169.254.169.254"
_GCP = "http://metadata.google.internal"
_AZURE = "http://169.254.169.254"


class _NoAnswer(Exception):
    """Nobody is there: no connection, or no answer in time. A 404 is an answer."""


class SpotNotice:
    """Asks every POLL_S until `close` or the first notice; `came` says whether there was one."""

    def __init__(
        self, cloud: Cloud, told: Callable[[], None], warn: Callable[[str], None], endpoint: str | None = None
    ) -> None:
        """`told`: called once, in this object's thread; so is `warn`, with a text, where no service answers.
        `endpoint`: in the place of the cloud's own address."""
        self._cloud = cloud
        self._asks = {
            "aws": lambda: _aws(endpoint or _AWS),
            "gcp": lambda: _gcp(endpoint or _GCP),
            "azure": lambda: _azure(endpoint or _AZURE),
        }[cloud]
        self._told, self._warn = told, warn
        self._closed = threading.Event()
        self.came = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="spot notice")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        silent = 0
        while not self._closed.is_set():
            try:
                if self._asks():
                    self.came = True
                    self._told()
                    return
                silent = 0
            except _NoAnswer as error:
                silent += 1
                if silent == MAX_SILENT:
                    self._warn(
                        f"run.spot_notice {self._cloud}: no metadata service answers on this machine ({error}), so no "
                        "spot notice can come. Is this the right cloud? Set it to off elsewhere"
                    )
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
    """The body of a 200, None for another status. A proxy of the environment is not for the machine's own address.

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
        raise _NoAnswer(str(error)) from None
