"""Send events of a run to `run.notify`, a url or a file.

A failed notification is a warning: no row depends on it.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.stores.redaction import shown_url

ANSWER_S = 10.0


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
