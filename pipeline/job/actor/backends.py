"""The backends of a job: this project's engine, and a server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints.adapters import resolve_adapter
from pipeline.checkpoints.locate import NO_CHECKPOINT, resolve_model, resolve_tokenizer
from pipeline.endpoint.spec import EndpointConfig
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.job.actor.endpoint_rows import EndpointRows
from pipeline.job.actor.tokenize import Tokenize
from pipeline.job.actor.work_spec import Backend, RowReader, WorkSpec
from pipeline.job.process.child import ChildSpec
from pipeline.job.process.main import load_factory
from pipeline.stores.retries import RetryCounts

TOKENIZER = "pipeline.tokenization.tokenizer:Tokenizer.from_folder"


@dataclass(frozen=True)
class OwnEngine:
    """This project's engine, by the `module:callable` of the engine (called in its own process with an EngineConfig and
    a progress function) and of the tokenizer (called with the model's folder and a chat template, or None for its own).
    Tests name fakes here."""

    engine: str = "pipeline.engine.engine:Engine"
    tokenizer: str = TOKENIZER

    def open(self, spec: WorkSpec, retries: RetryCounts) -> tuple[ChildSpec, Callable[[], RowReader]]:
        config, reference = _configs_here(spec, retries)
        # Ray sets OMP_NUM_THREADS to its own count of cores; set the engine's instead.
        threads = {f"{library}_NUM_THREADS": str(config.num_threads) for library in ("OMP", "MKL", "NUMBA")}
        child = ChildSpec(self.engine, config, spec.step_timeout_s, spec.load_timeout_s, threads, reference)

        def reader() -> RowReader:
            tokenizer = load_factory(self.tokenizer)(config.model, spec.chat_template)
            return Tokenize(tokenizer, spec.params, spec.seed, spec.chat, spec.quality_sample, spec.task, spec.author)

        return child, reader

    def resuming(self, resolved: Mapping[str, Any]) -> "OwnEngine":
        return self


@dataclass(frozen=True)
class EndpointBackend:
    """A server. model, version: those of the run that this one continues."""

    engine: str = "pipeline.endpoint.engine:EndpointEngine"
    model: str | None = None
    version: str = ""

    def open(self, spec: WorkSpec, retries: RetryCounts) -> tuple[ChildSpec, Callable[[], RowReader]]:
        assert isinstance(spec.engine, EndpointConfig)
        config = replace(spec.engine, expected_model=self.model, expected_version=self.version)
        # Until the server is ready, `start_timeout` of the backend decides.
        load_timeout_s = max(spec.load_timeout_s, 2 * config.start_timeout_s)
        child = ChildSpec(self.engine, config, spec.step_timeout_s, load_timeout_s)

        def reader() -> RowReader:
            tokenizer = None
            if spec.model != NO_CHECKPOINT:
                folder = resolve_tokenizer(spec.model, spec.storage, retries, spec.revision)
                tokenizer = load_factory(TOKENIZER)(str(folder), spec.chat_template)
            return EndpointRows(config.route, tokenizer, spec.params, spec.seed, spec.chat, spec.task, spec.author)

        return child, reader

    def resuming(self, resolved: Mapping[str, Any]) -> "EndpointBackend":
        return replace(self, model=resolved.get("model"), version=str(resolved.get("server", "")))


def backend_of(config: EngineConfig | EndpointConfig) -> Backend:
    """Return the backend for an engine's config."""
    return OwnEngine() if isinstance(config, EngineConfig) else EndpointBackend()


def _configs_here(spec: WorkSpec, retries: RetryCounts) -> tuple[EngineConfig, ReferenceConfig | None]:
    """Return the engine's and the reference's config with the folders of their models on this machine. Missing models
    are downloaded."""

    def folder(found: str, path: str, key: str, revision: str | None = None) -> str:
        if Path(found).is_dir():
            return found
        return str(resolve_model(path, spec.storage, None, retries, key, revision))

    config, reference, draft = spec.engine, spec.reference, None
    assert isinstance(config, EngineConfig)
    model = folder(config.model, spec.model, "model.path", spec.revision)
    speculation = config.speculation_config
    if speculation.model is not None and spec.draft is not None:
        draft = folder(speculation.model, spec.draft, "speculation.model")
    adapters = {
        name: path
        if Path(path).is_dir()
        else str(resolve_adapter(spec.adapters[name], spec.storage, f"model.adapters.{name}", retries=retries))
        for name, path in config.adapters.items()
    }
    if reference is not None:
        found = model
        if spec.reference_model is not None:
            found = folder(reference.engine.model, spec.reference_model, "quality.model")
        reference = replace(reference, engine=replace(reference.engine, model=found, adapters=adapters))
    speculation = replace(speculation, model=draft)
    return replace(config, model=model, speculation=speculation, adapters=adapters), reference
