"""How long an engine takes to load and to capture its steps, and what its decoding steps take by rows and context."""

import time
from typing import Any

from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.steps.step_times import OUTPUT, PROMPT, StepBench, StepTime, steps_to_text
from pipeline.bench.gpu.subject import Subject
from pipeline.bench.gpu.variants import AS_SERVED, VARIANTS
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig


def run(result: Result, model: str, variant: str = AS_SERVED) -> None:
    subject, chosen = Subject.of(result.setting, model), VARIANTS[variant]
    scale, phases = subject.scale, Phases()
    options: dict[str, Any] = {"max_num_seqs": max(scale.rows) + 1} | dict(
        chosen.options
    )  # a slot for the prompt of a mixed step
    config = EngineConfig(
        str(subject.folder),
        device=str(subject.device),
        dtype=subject.dtype_name,
        max_model_len=max(scale.contexts) + OUTPUT + PROMPT,
        **options | dict(chosen.options),
    )
    with Engine(config, phases.say) as engine:
        engine.warm_up()
        chosen.prepare(engine)
        found, head = phases.seconds(), f"{subject.name}, {subject.dtype_name}, {variant}\n{phases.to_text()}"
        result.keep(head, model=model, variant=variant, loading_s=found, engine=dict(engine.resolved))
        bench = StepBench(engine, scale.num_timed, scale.num_traced, result.setting.traces, result.task.name)
        times: list[StepTime] = []
        for context in scale.contexts:
            with result.part(f"contexts of {context}"):
                for each in bench.measure(scale.rows, context):
                    times.append(each)
                    result.keep(f"{head}\n{steps_to_text(times)}", steps=[time.to_json() for time in times])


class Phases:
    """What an engine says while it loads, and how long each of that took. Percentages and counts are left out."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phases: list[tuple[str, float]] = [("building the engine", self._began)]

    def say(self, text: str) -> None:
        print(text, flush=True)
        phase = text.split(",")[0]
        if phase != self._phases[-1][0]:
            self._phases.append((phase, time.monotonic()))

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, up to now."""
        ends = [*(began for _, began in self._phases[1:]), time.monotonic()]
        found: dict[str, float] = {}
        for (phase, began), end in zip(self._phases, ends):
            found[phase] = found.get(phase, 0.0) + end - began
        return found

    def to_text(self) -> str:
        parts = [f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds().items()]
        return f"until the first step {time.monotonic() - self._began:.1f} s: {', '.join(parts)}"
