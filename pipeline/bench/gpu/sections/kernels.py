"""Times of attention, sampling and elementwise kernels, and of linears by each path; what is wrong has none."""

from dataclasses import asdict

from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.crossover import borders
from pipeline.bench.gpu.kernels.kernel_times import KernelTime, KernelTimes, kernel_cases
from pipeline.bench.gpu.kernels.linear_times import LinearTime, linear_cases, summed_up
from pipeline.bench.gpu.kernels.torch_times import NoBaseline, torch_cases
from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.subject import Subject, known_rates
from pipeline.kernels.select import select_kernels


def run(result: Result, model: str, what: str) -> None:
    """what: "kernels" or "linears"."""
    found = _Times(result, Subject.of(result.setting, model), what)
    if what == "kernels":
        found.kernels()
    else:
        found.linears()


class _Times:
    """Of one model; what each case gives is kept at once."""

    def __init__(self, result: Result, subject: Subject, what: str) -> None:
        self._result, self._subject, self._what = result, subject, what
        self._served = select_kernels(subject.device, subject.dtype)
        self._stopwatch, self._checks = subject.stopwatch(), list[Check]()
        self._rates = known_rates(result.setting, self._stopwatch, subject.dtype, subject.scale)

    def kernels(self) -> None:
        of, times = self._subject, list[KernelTime]()
        how = self._served, of.dtype, self._stopwatch, self._rates, of.scale.kernels, True
        for case in kernel_cases(of.size, *how):
            with self._result.part(self._what):
                checked, time = case()
                self._checks.append(checked)
                times += [] if time is None else [time]
                found = KernelTimes(tuple(times))
                self._keep(found.to_text(), kernels=found.to_json())

    def linears(self) -> None:
        """Ours, then torch's own."""
        of, times, missing = self._subject, list[LinearTime](), list[str]()

        def keep() -> None:
            found = summed_up(times, of.size, of.weights, self._rates)
            met = borders(found)
            text = "\n".join([found.to_text(), *(border.to_text() for border in met), *missing])
            self._keep(text, linears=found.to_json(), borders=[asdict(border) for border in met])

        how = self._served, of.dtype, self._stopwatch, of.scale.tokens, True
        for case in linear_cases(of.size, of.weights, *how):
            with self._result.part(self._what):
                found = case()
                self._checks += [checked for checked, _ in found]
                times += [time for _, time in found if time is not None]
                keep()
        for case in torch_cases(of.size, of.weights, of.dtype, self._stopwatch, of.scale.tokens):
            try:
                times += case()
            except NoBaseline as why:
                missing.append(str(why))
            keep()

    def _keep(self, text: str, **figures: object) -> None:
        launched = self._stopwatch.num_launched
        head = f"{self._subject.name}, {self._subject.dtype_name}"
        head += f"; {launched} measured with their launches, as they cannot be captured" if launched else ""
        wrong = [f"WRONG {check.to_text()}" for check in self._checks if not check.passed]
        told = [asdict(check) for check in self._checks]
        self._result.keep("\n".join([head, text, *wrong]), model=self._subject.name, checks=told, **figures)
