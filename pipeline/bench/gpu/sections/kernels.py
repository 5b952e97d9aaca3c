"""Times of attention, sampling and elementwise kernels, and of linears by each path; what is wrong has none."""

from dataclasses import asdict

from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.crossover import borders
from pipeline.bench.gpu.kernels.kernel_times import KernelTime, KernelTimes, kernel_cases
from pipeline.bench.gpu.kernels.linear_times import LinearTime, linear_cases, summed_up
from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.subject import Subject, known_rates
from pipeline.kernels.select import select_kernels


def run(result: Result, model: str, what: str) -> None:
    """what: "kernels" or "linears"."""
    subject = Subject.of(result.setting, model)
    kernels, stopwatch = select_kernels(subject.device, subject.dtype), subject.stopwatch()
    rates = known_rates(result.setting, stopwatch, subject.dtype, subject.scale)
    head = f"{subject.name}, {subject.dtype_name}"
    checks: list[Check] = []

    def keep(text: str, **figures: object) -> None:
        beside = f"; {stopwatch.num_launched} measured with launches" if stopwatch.num_launched else ""
        wrong = [f"WRONG {check.to_text()}" for check in checks if not check.passed]
        told = [asdict(check) for check in checks]
        result.keep("\n".join([head + beside, text, *wrong]), model=model, checks=told, **figures)

    if what == "kernels":
        times: list[KernelTime] = []
        cases = kernel_cases(subject.size, kernels, subject.dtype, stopwatch, rates, subject.scale.kernels, True)
        for case in cases:
            with result.part(what):
                checked, time = case()
                checks.append(checked)
                times += [] if time is None else [time]
                of_all = KernelTimes(tuple(times))
                keep(of_all.to_text(), kernels=of_all.to_json())
        return
    linears: list[LinearTime] = []
    paths = linear_cases(subject.size, subject.weights, kernels, subject.dtype, stopwatch, subject.scale.tokens, True)
    for case in paths:
        with result.part(what):
            found = case()
            checks += [checked for checked, _ in found]
            linears += [time for _, time in found if time is not None]
            summed = summed_up(linears, subject.size, subject.weights, rates)
            met = borders(summed)
            text = "\n".join([summed.to_text(), *(border.to_text() for border in met)])
            keep(text, linears=summed.to_json(), borders=[asdict(border) for border in met])
