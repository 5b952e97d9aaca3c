"""Specifications of the engine actors: work, cores, devices, and the job's settings."""

import json
import os
from dataclasses import replace

from pipeline.config import JobConfig
from pipeline.data.source import Source
from pipeline.endpoint.spec import DocumentFolder, EndpointConfig
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.batch_limits import max_default_seqs
from pipeline.job.actor.work_spec import Backend, WorkSpec
from pipeline.job.dataflow.spec import NUM_READERS, FlowSpec, WindowTask, ray_address, units_in_flight
from pipeline.job.planning.plan import JobPlan
from pipeline.job.planning.reference_model import reference_of
from pipeline.job.telemetry.logs import Level
from pipeline.job.telemetry.run_log import versions
from pipeline.machine.host import available_cores
from pipeline.stores import failpoints
from pipeline.stores.filesystem import is_url


def flow_spec(
    plan: JobPlan,
    tasks: tuple[WindowTask, ...],
    backend: Backend,
    run_id: str,
    log_level: Level = "info",
) -> FlowSpec:
    """Return the specification of the dataflow. Each actor gets its share of the machine's cores unless the job sets
    it, and the GPUs that it uses."""
    job, config, run = plan.job, plan.job.config, plan.job.config.run
    on_gpu = plan.device.startswith("cuda")
    gpus = run.gpus_per_actor
    if gpus is None:
        gpus = float(config.engine.tensor_parallel_size if on_gpu else 0)
    (min_size, max_size), address = run.pool, ray_address()
    cpus = run.cpus_per_actor or _cpus(max_size, address, gpus)
    engine = job.work_config(max(1, int(cpus)))
    if isinstance(engine, EndpointConfig):
        prices = config.cost.prices
        has_budget = bool(prices.usd_per_million) and config.cost.budget_usd is not None
        engine = replace(with_documents(engine, plan.source), prices=prices, has_budget=has_budget)
    work = WorkSpec(
        job=job,
        backend=backend,
        engine=engine,
        reference=reference_of(job, engine) if isinstance(engine, EngineConfig) else None,
        output=config.output.path if is_url(config.output.path) else os.path.abspath(config.output.path),
        fingerprint=plan.fingerprint.short,
        date=plan.fingerprint.date,
        run_id=run_id,
        log_level=log_level,
        metadata=provenance(plan),
        kept_types=plan.kept_types,
        sample=any(task.sample is not None for task in tasks),
        again=plan.again,
    )
    units = job.units
    if isinstance(engine, EngineConfig):
        num_seqs = engine.max_num_seqs or max_default_seqs(on_gpu)
    else:
        num_seqs = engine.max_concurrency
    per_row = units.default_max_tokens, units.default_n
    in_flight = units_in_flight(num_seqs, units.unit_rows, units.unit_tokens, *per_row, bool(units.prompt.images))
    requested = failpoints.requested(os.environ)
    return FlowSpec(
        source=plan.source,
        tasks=tasks,
        work=work,
        actors=max_size,
        cpus=cpus,
        gpus=gpus,
        units_in_flight=in_flight,
        ray_address=address,
        drain_timeout_s=run.drain_timeout,
        failpoints=requested,
        always_ray=os.environ.get("RAY_ADDRESS") == "local",
        min_actors=min_size,
    )


def with_documents(engine: EndpointConfig, source: Source) -> EndpointConfig:
    """Return the config with the folder of the documents whose pages are the rows of `source`, if they are."""
    documents = DocumentFolder(source.url, source.base) if source.has_pages else None
    return replace(engine, images=replace(engine.images, documents=documents))


def _cpus(actors: int, address: str | None, gpus: float) -> float:
    if address is None:
        return max(1, available_cores() // actors)
    from pipeline.job.dataflow.ray_session import cluster_cpus

    return cluster_cpus(address, gpus, reserved=NUM_READERS)


def resolve_device(config: JobConfig) -> str:
    """Return the resolved `engine.device`: `auto` is cuda if this machine (or the cluster to join) has a GPU; `server`
    if a server computes."""
    if config.server is not None:
        return "server"
    if config.engine.device != "auto":
        return config.engine.device
    if (address := ray_address()) is not None:
        from pipeline.job.dataflow.ray_session import cluster_has_gpus

        return "cuda" if cluster_has_gpus(address) else "cpu"
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def provenance(plan: JobPlan) -> dict[str, str]:
    """Return the origin of a part, for its footer."""
    found = {name: v for name, v in versions().items() if name not in ("host", "pid", "process")}
    return {
        "pipeline.fingerprint": plan.fingerprint.digest,
        "pipeline.model": json.dumps(plan.fingerprint.identity["model"], sort_keys=True),
        "pipeline.numerics": json.dumps(plan.fingerprint.numerics, sort_keys=True),
        "pipeline.versions": json.dumps(found, sort_keys=True),
    }
