"""A job as it is sent to a cluster: one file with everything filled in, in a folder of its own.

Overlays, `--set`, parameters, the date and environment variables are those of whoever sends it. So what runs on the
cluster is what was checked here, and nothing of it goes through a shell.
"""

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints.chat_template import read_template
from pipeline.config import JobConfig
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import shown_url

JOB_FILE = "job.json"  # JSON is YAML in which every text is quoted
TEMPLATE_FILE = "chat_template.jinja"
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class ShippedJob:
    """`files`: name -> text of what is sent. `name`: what submissions of this job are called: its own name and a digest
    of its output, so that two submissions with one output are told to be one job."""

    name: str
    output: str
    files: dict[str, str]
    drain_s: float

    @classmethod
    def of(cls, config: JobConfig, open_params: Mapping[str, str] | None = None) -> "ShippedJob":
        """open_params: parameters that each run fills in with its date, by the text that stands for them in `config`.
        Raises ConfigError where the file of a chat template cannot be read."""
        data: dict[str, Any] = copy.deepcopy(dict(config.data))
        declared = data.pop("params", {})  # the others are filled in
        if open_params:
            data["params"] = {name: declared[name] for name in open_params}
        data.setdefault("run", {}).setdefault("ray_address", "auto")
        for section, key in (("input", "path"), ("output", "path")):
            place = _everywhere(data[section][key])
            for name, text in (open_params or {}).items():
                place = place.replace(text, f"${{{name}}}")
            data[section][key] = place
        for section, key in (("model", "path"), ("speculation", "model"), ("quality", "model")):
            place = data.get(section, {}).get(key)
            if isinstance(place, str) and os.path.exists(os.path.expanduser(place)):  # a name is none
                data[section][key] = _everywhere(place)
        files = {}
        if (chat := config.prompt.chat) is not None and chat.template is not None:
            files[TEMPLATE_FILE] = read_template(chat.template)
            data["prompt"]["chat"]["template"] = TEMPLATE_FILE
        files[JOB_FILE] = json.dumps(data, indent=1)
        output = str(data["output"]["path"]).rstrip("/")
        slug = _NO_NAME.sub("-", config.name).strip("-").lower()[:40] or "job"
        return cls(f"{slug}-{_digest(output)}", shown_url(output), files, config.run.drain_s)

    @property
    def digest(self) -> str:
        return _digest(json.dumps(self.files, sort_keys=True))

    @property
    def is_local(self) -> bool:
        return not is_url(self.output)

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def _everywhere(place: str) -> str:
    """A path that means the same in any working directory, where its disk is there."""
    if is_url(place):
        return place
    return os.path.abspath(os.path.expanduser(place))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
