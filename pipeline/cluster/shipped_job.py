"""A job as it is sent to a cluster: a folder with one fully resolved job file.

The sender resolves overlays, `--set`, parameters, the date and environment variables. The cluster therefore runs the
job that was validated here, and no setting passes through a shell.
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

JOB_FILE = "job.json"  # JSON is YAML with all strings quoted
TEMPLATE_FILE = "chat_template.jinja"
STOP_WAIT_BEYOND_DRAIN_S = 30  # from the end of run.drain_timeout to SIGKILL, while the driver writes parts and records
_PATHS = (("input", "path"), ("output", "path"), ("model", "path"), ("speculation", "model"), ("quality", "model"))
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class ShippedJob:
    """Resolved job to send to a cluster.

    name: the job's name and a digest of its output, so that submissions to the same output are recognized as the same
    job. files: file name -> text. made_absolute: key -> path, for paths that were relative to the working directory.
    """

    name: str
    output: str
    files: dict[str, str]
    made_absolute: dict[str, str]
    drain_s: float

    @classmethod
    def from_config(cls, config: JobConfig, open_vars: Mapping[str, str] | None = None) -> "ShippedJob":
        """Resolve a job. Raises ConfigError if the chat template's file cannot be read.

        open_vars: variables that each run fills in with its date -> their placeholder text in `config`.
        """
        data: dict[str, Any] = copy.deepcopy(dict(config.data))
        declared = data.pop("vars", {})  # all other variables are already resolved
        if open_vars:
            data["vars"] = {name: declared[name] for name in open_vars}
        data.setdefault("run", {}).setdefault("ray_address", "auto")
        made_absolute = {}
        paths = [(section, data.get(section, {}), key) for section, key in _PATHS]
        adapters = data.get("model", {}).get("adapters") or {}
        paths += [("model.adapters", adapters, name) for name in adapters]
        for section, values, key in paths:
            path = values.get(key)
            if not isinstance(path, str) or is_url(path):
                continue
            path = os.path.expanduser(path)
            if section not in ("input", "output") and not os.path.exists(path):
                continue  # a model's name, not a path
            if not os.path.isabs(path):
                made_absolute[f"{section}.{key}"] = path
            values[key] = os.path.abspath(path)
        for name, text in (open_vars or {}).items():
            for section in ("input", "output"):
                data[section]["path"] = data[section]["path"].replace(text, f"${{{name}}}")
        files = {}
        if (chat := config.prompt.chat) is not None and chat.template is not None:
            files[TEMPLATE_FILE] = read_template(chat.template)
            data["prompt"]["chat"]["template"] = TEMPLATE_FILE
        files[JOB_FILE] = json.dumps(data, indent=1)
        output = str(data["output"]["path"]).rstrip("/")
        slug = _NO_NAME.sub("-", config.name).strip("-").lower()[:40] or "job"
        return cls(
            name=f"{slug}-{_digest(output)}",
            output=shown_url(output),
            files=files,
            made_absolute=made_absolute,
            drain_s=config.run.drain_timeout,
        )

    @property
    def digest(self) -> str:
        return _digest(json.dumps(self.files, sort_keys=True))

    @property
    def is_local(self) -> bool:
        return not is_url(self.output)

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
