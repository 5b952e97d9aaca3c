"""A complete job config: the keys of a job file, checked together, and their translation for the engine.

`identity.py` defines the identity of a job; `job/planning/resolution.py` resolves what a job file leaves open.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, PrivateAttr, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from pipeline.checkpoints.locate import NO_CHECKPOINT
from pipeline.config.contradictions import contradictions, rules_for_editors
from pipeline.config.jobfile import Document, Value, path_of
from pipeline.config.keys import JobKeys
from pipeline.config.requests import filled, is_of_requests
from pipeline.engine.config import EngineConfig


def _with_model(raw: Any) -> Any:
    """Return the job file with a model: a server may be the only one that knows it."""
    has_server = isinstance(raw, dict) and raw.get("server") is not None
    return {**raw, "model": {"path": NO_CHECKPOINT}} if has_server and raw.get("model") is None else raw


class JobConfig(JobKeys):
    """Complete and checked config of one job, with the line of each key."""

    model_config = ConfigDict(json_schema_extra=rules_for_editors)

    _document: Document = PrivateAttr(default_factory=lambda: Document({}))
    _written: Document = PrivateAttr(default_factory=lambda: Document({}))

    @model_validator(mode="wrap")
    @classmethod
    def _agrees(cls, raw: Any, handler: Any) -> "JobConfig":
        """Refuse contradicting keys, all at once. If input lines are requests, first fill in the prompt source."""
        job = handler(_with_model(filled(raw) if is_of_requests(raw) else raw))
        found = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": reason}),
                loc=path_of(key),
                input=None,
            )
            for key, reason in contradictions(job, raw)
        ]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return job

    def location(self, key: str) -> str:
        """Return `file:line` of a dotted key, or of the closest enclosing key in the file."""
        return self._document.location(path_of(key))

    @property
    def data(self) -> Mapping[str, Value]:
        """Values of the job file after overlays, `--set` and variables, without defaults."""
        return self._document.data

    @property
    def written(self) -> Mapping[str, Value]:
        """Values of the job file after overlays and `--set`, with variables and names of files as they are written."""
        return self._written.data

    def engine_config(
        self,
        model_path: str,
        draft_path: str | None,
        num_threads: int | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> EngineConfig:
        """Return the engine's config, given the local folders of the model, its draft model and its adapters."""
        generates = self.task.type == "generate"
        return EngineConfig(
            model=model_path,
            quantization=self.model.quantization,
            speculation=self.speculation.engine_config(draft_path) if generates else "off",
            num_threads=num_threads,
            adapters=adapters or {},
            **self.engine.model_dump(),
        )
