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

    def open(self, spec: WorkSpec, retries: RetryCounts) -> tuple[ChildSpec, Callable[[], list[RowReader]]]:
        (config, reference), job = _configs_here(spec, retries), spec.job
        # Ray sets OMP_NUM_THREADS to its own count of cores; set the engine's instead.
        threads = {f"{library}_NUM_THREADS": str(config.num_threads) for library in ("OMP", "MKL", "NUMBA")}
        run = job.config.run
        child = ChildSpec(self.engine, config, run.step_timeout_s, run.load_timeout_s, threads, reference)

        def readers() -> list[RowReader]:
            tokenizer = load_factory(self.tokenizer)(config.model, job.chat_template)
            first = job.tokenize(tokenizer, spec.date, quality_sample=job.config.quality.sample)
            return [first, *(prompt.tokenize(tokenizer, spec.date) for prompt in job.prompts[1:])]

        return child, readers

    def resuming(self, resolved: Mapping[str, Any]) -> "OwnEngine":
        return self


@dataclass(frozen=True)
class EndpointBackend:
    """A server. model, version: those of the run that this one continues."""

    engine: str = "pipeline.endpoint.engine:EndpointEngine"
    model: str | None = None
    version: str = ""

    def open(self, spec: WorkSpec, retries: RetryCounts) -> tuple[ChildSpec, Callable[[], list[RowReader]]]:
        assert isinstance(spec.engine, EndpointConfig)
        config = replace(spec.engine, expected_model=self.model, expected_version=self.version)
        job, run = spec.job, spec.job.config.run
        # Until the server is ready, `start_timeout` of the backend decides.
        child = ChildSpec(self.engine, config, run.step_timeout_s, max(run.load_timeout_s, 2 * config.start_timeout_s))

        def readers() -> list[RowReader]:
            tokenizer, model = None, job.config.model
            if model.path != NO_CHECKPOINT:
                folder = resolve_tokenizer(model.path, job.config.storage_options, retries, model.revision)
                tokenizer = load_factory(TOKENIZER)(str(folder), job.chat_template)
            return [prompt.endpoint_rows(config.route, tokenizer, spec.date) for prompt in job.prompts]

        return child, readers

    def resuming(self, resolved: Mapping[str, Any]) -> "EndpointBackend":
        return replace(self, model=resolved.get("model"), version=str(resolved.get("server", "")))


def backend_of(config: EngineConfig | EndpointConfig) -> Backend:
    """Return the backend for an engine's config."""
    return OwnEngine() if isinstance(config, EngineConfig) else EndpointBackend()


def _configs_here(spec: WorkSpec, retries: RetryCounts) -> tuple[EngineConfig, ReferenceConfig | None]:
    """Return the engine's and the reference's config with the folders of their models on this machine. Missing models
    are downloaded."""
    job, storage = spec.job.config, spec.job.config.storage_options

    def folder(found: str, path: str | None, key: str, revision: str | None = None) -> str:
        if path is None or Path(found).is_dir():
            return found
        return str(resolve_model(path, storage, None, retries, key, revision))

    config, reference = spec.engine, spec.reference
    assert isinstance(config, EngineConfig)
    model = folder(config.model, job.model.path, "model.path", job.model.revision)
    speculation = config.speculation_config
    if speculation.model is not None:
        draft = folder(speculation.model, job.speculation.model, "speculation.model")
        speculation = replace(speculation, model=draft)
    adapters = {
        name: path
        if Path(path).is_dir()
        else str(resolve_adapter(job.model.adapters[name], storage, f"model.adapters.{name}", retries=retries))
        for name, path in config.adapters.items()
    }
    if reference is not None:
        own = reference.engine.model if job.quality.model is not None else model
        engine = replace(reference.engine, model=folder(own, job.quality.model, "quality.model"), adapters=adapters)
        reference = replace(reference, engine=engine)
    return replace(config, model=model, speculation=speculation, adapters=adapters), reference
