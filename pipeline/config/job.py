"""One whole job: a job file's keys, checked together, and what they mean to the engine.

What makes two jobs different is in `identity.py`; `job/planning/resolution.py` finds what a job file leaves open.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, PrivateAttr, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from pipeline.config.contradictions import contradictions, rules_for_editors
from pipeline.config.jobfile import Document, Value
from pipeline.config.keys import JobKeys
from pipeline.config.requests import filled, is_of_requests
from pipeline.engine.params import EngineConfig


class JobConfig(JobKeys):
    """One job, complete and checked. `where` says which line a key came from."""

    model_config = ConfigDict(json_schema_extra=rules_for_editors)

    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @model_validator(mode="wrap")
    @classmethod
    def _agrees(cls, raw: Any, handler: Any) -> "JobConfig":
        """Keys that contradict each other are refused, all of them at once. Where the lines of the input are requests,
        they say the prompt, so the job file has none."""
        job = handler(filled(raw) if is_of_requests(raw) else raw)
        found = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": why}),
                loc=tuple(key.split(".")),
                input=None,
            )
            for key, why in contradictions(job, raw)
        ]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return job

    def where(self, key: str) -> str:
        """`file:line` of a dotted key, or of the nearest key around it that is written down."""
        return self._document.where(tuple(key.split(".")))

    @property
    def data(self) -> Mapping[str, Value]:
        """The job file's values after overlays, `--set` and variables, without defaults."""
        return self._document.data

    def engine_config(self, model_path: str, draft_path: str | None, num_threads: int | None = None) -> EngineConfig:
        """The engine's options, with the folders that the model and its draft model were found in."""
        generates = self.task.type == "generate"
        return EngineConfig(
            model=model_path,
            quantization=self.model.quantization,
            speculation=self.speculation.engine_config(draft_path) if generates else "off",
            num_threads=num_threads,
            **self.engine.model_dump(),
        )
