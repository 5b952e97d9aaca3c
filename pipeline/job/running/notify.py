"""Send events of a run to `run.notify`, a url or a file.

A failed notification is a warning: no row depends on it. Events are sent by a thread of their own, since a hook that
does not answer must not delay the run.
"""

import contextlib
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.stores.redaction import shown_url

ANSWER_S = 10.0
MAX_WAITING = 16  # further events are dropped, with a warning
END_S = 2.0  # wait for the last events at the end of a run


class Notifier:
    """Sender of a run's events, in order. warn: called from its thread."""

    def __init__(self, target: str | None, warn: Callable[[str], None]) -> None:
        self._target, self._warn = target, warn
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._send, daemon=True, name="notify")
        if target is not None:
            self._thread.start()

    def put(self, event: Mapping[str, Any]) -> None:
        """Send an event soon, if a target is set."""
        if self._target is None:
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._warn(f"run.notify {shown_url(self._target)}: too slow; an event was dropped: {event.get('event')}")

    def close(self) -> None:
        """Wait up to END_S until all events were sent."""
        if self._target is not None:
            with contextlib.suppress(queue.Full):
                self._events.put_nowait(None)
            self._thread.join(END_S)

    def _send(self) -> None:
        while (event := self._events.get()) is not None:
            notify(self._target, event, self._warn)


def notify(target: str | None, event: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Send one event, if a target is set."""
    if target is None:
        return
    line = json.dumps(dict(event), ensure_ascii=False)
    try:
        if target.startswith(("http://", "https://")):
            request = urllib.request.Request(target, line.encode(), {"Content-Type": "application/json"}, method="POST")
            with urllib.request.urlopen(request, timeout=ANSWER_S):
                return
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except (OSError, ValueError, urllib.error.URLError) as error:
        warn(f"run.notify {shown_url(target)}: {type(error).__name__}: {error}")
