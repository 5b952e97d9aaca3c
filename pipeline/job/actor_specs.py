"""What the engine actors are given: work, cores, a device, and all they need to know of the job."""

import json
import os
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pipeline.config import JobConfig
from pipeline.data.source import Source
from pipeline.data.units import UnitSpec
from pipeline.job.actor.stages import Chat
from pipeline.job.actor.worker import Backend, WorkSpec
from pipeline.job.plan import Plan, WindowTask
from pipeline.job.telemetry.record import versions
from pipeline.machine.host import available_cores
from pipeline.stores import failpoints

NUM_READERS = 2  # windows read at once; one for a single actor, as each is a process to start


@dataclass(frozen=True)
class Spot:
    """Whom an actor asks whether its machine is to be taken away, and how long it then goes on."""

    notice: Literal["off", "aws", "gcp", "azure"] = "off"
    drain_s: float = 30.0


@dataclass(frozen=True)
class FlowSpec:
    """All that the graph is made of. `cpus` and `gpus` are what one actor is booked with."""

    source: Source = field(repr=False)
    tasks: tuple[WindowTask, ...] = field(repr=False)
    units: UnitSpec
    work: WorkSpec = field(repr=False)
    actors: int
    cpus: float
    gpus: float
    units_in_flight: int
    ray_address: str | None = None
    spot: Spot = Spot()
    failpoints: str = ""  # of tests


def flow_spec(
    plan: Plan, tasks: tuple[WindowTask, ...], backend: Backend, run_id: str, retry_failed: bool = False
) -> FlowSpec:
    """What each actor gets: its share of the machine's cores unless the job says so, and a GPU where it uses
    one. `retry_failed`: of a unit whose part is there, the error rows are computed again."""
    config, run = plan.config, plan.config.run
    gpus = run.gpus_per_actor if run.gpus_per_actor is not None else float(plan.device.startswith("cuda"))
    cpus = run.cpus_per_actor or _cpus(run.actors, run.ray_address, gpus)
    threads = max(1, int(cpus))
    engine = config.engine_config(str(plan.model), plan.draft and str(plan.draft), threads)
    work = WorkSpec(
        backend,
        config.model.path,
        engine,
        config.sampling_params(),
        config.seed,
        chat_of(config, plan.fingerprint.date),
        config.output.path if "://" in config.output.path else os.path.abspath(config.output.path),
        dict(config.output.storage),
        run_id,
        plan.fingerprint.short,
        dict(config.output.rename),
        provenance(plan),
        run.step_timeout_s,
        run.load_timeout_s,
        threads,
        retry_failed,
        dict(config.model.storage),
        config.model.draft,
        plan.kept_types,
    )
    spot = Spot(run.spot_notice, run.drain_s)
    return FlowSpec(
        plan.source,
        tasks,
        plan.units,
        work,
        run.actors,
        cpus,
        gpus,
        run.units_in_flight,
        run.ray_address,
        spot,
        failpoints.requested(os.environ),
    )


def chat_of(config: JobConfig, now: datetime | None) -> Chat | None:
    """How a prompt becomes a chat; None where it is sent as it is. `now`: the date, where the job file has none."""
    given = config.prompt.chat
    if given is None:
        return None
    return Chat(
        config.prompt.messages is not None,
        given.system,
        given.add_generation_prompt,
        given.template_kwargs,
        now if given.date is None else datetime.fromisoformat(given.date),
    )


def _cpus(actors: int, ray_address: str | None, gpus: float) -> float:
    if ray_address is None:
        return max(1, available_cores() // actors)
    from pipeline.job.dataflow.ray_session import cluster_cpus

    return cluster_cpus(ray_address, gpus, reserved=NUM_READERS)


def resolve_device(config: JobConfig) -> str:
    """What `engine.device` is: `auto` is cuda where this machine (or the cluster to join) has a GPU."""
    if config.engine.device != "auto":
        return config.engine.device
    if config.run.ray_address is not None:
        from pipeline.job.dataflow.ray_session import cluster_has_gpus

        return "cuda" if cluster_has_gpus(config.run.ray_address) else "cpu"
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def provenance(plan: Plan) -> dict[str, str]:
    """Provenance, kept in each part's footer."""
    found = {name: v for name, v in versions().items() if name not in ("host", "pid", "process")}
    return {
        "pipeline.fingerprint": plan.fingerprint.digest,
        "pipeline.model": json.dumps(plan.fingerprint.identity["model"], sort_keys=True),
        "pipeline.numerics": json.dumps(plan.fingerprint.numerics, sort_keys=True),
        "pipeline.versions": json.dumps(found, sort_keys=True),
    }
