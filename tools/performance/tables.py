"""The tables of `docs/performance.md`, each between its two marks. A cell links to the results file it comes from."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.performance.results import Figure, Result, newest, step_ms

WAYS = ("lookup, forced", "auto")
END = "<!-- end of table -->"
ADMISSION_RULES = (
    "sum of ends", "sum, by prompt length 75%", "engine, by prompt length", "known lengths", "free blocks",
)  # fmt: skip
STEP_PARTS = ("plan", "build", "sample", "handle", "detokenize")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def link(text: str, result: Result) -> str:
    return f"[{text}](performance/results/{result.name}.json)"


def latest(results: Sequence[Result], bench: str) -> list[Result]:
    """Of one benchmark, newest first: the last result of each work on each machine and with each set of contenders."""
    found = {}
    for result in results:
        if result.bench == bench:
            contenders = tuple(speed["name"] for speed in result.data.get("speeds", ()))
            found[result.what, result.place, contenders, tuple(result.data.get("peers", ()))] = result
    return sorted(found.values(), key=lambda result: result.date, reverse=True)


def aims(results: Sequence[Result], told: Sequence[dict[str, Any]]) -> str:
    """What was aimed at, and how near it is. A figure that meets its aim is bold."""
    by_name = {result.name: result for result in results}
    columns = list(dict.fromkeys(column for aim in told for column in aim["figures"]))

    def cell(aim: dict[str, Any], column: str) -> Iterator[str]:
        for reference in aim["figures"].get(column, []):
            name, _, key = reference.partition("#")
            figure = by_name[name].figure(key)
            text = figure.to_text(aim.get("digits", 2), aim["unit"])
            met = figure.meets(aim["aim"], aim.get("lower_is_better", False))
            yield link(f"**{text}**" if met else text, by_name[name])

    rows = []
    for aim in told:
        target = Figure(aim["aim"]).to_text(0 if aim["unit"] == "%" else 2, aim["unit"])
        rows.append([aim["measure"], target, *("; ".join(cell(aim, column)) for column in columns)])
    return markdown(["measure", "aim", *columns], rows)


def engine(results: Sequence[Result]) -> str:
    """How many times as fast as each other one this engine is, on all requests and on one alone."""
    found = [result for result in latest(results, "engine") if len(result.data["speeds"]) > 1]
    others = sorted({speed["name"].split(",")[0] for result in found for speed in result.data["speeds"][1:]})

    def cell(result: Result, other: str) -> str:
        for speed in result.data["speeds"][1:]:
            if speed["name"].split(",")[0] == other:
                alone = Figure.of(speed["single_faster"]).to_text(2, "x") if speed.get("single_faster") else ""
                return Figure.of(speed["faster"]).to_text(2, "x") + (f"; alone {alone}" if alone else "")
        return ""

    rows = []
    for result in found:
        ours = result.data["speeds"][0].get("tokens_per_s")
        speed = f"{Figure.of(ours).cautious:,.1f}" if ours else ""
        rows.append([link(result.what, result), result.place, speed, *(cell(result, other) for other in others)])
    return markdown(["work", "machine, type", "tokens/s", *others], rows)


def job(results: Sequence[Result]) -> str:
    """A whole job, Parquet to Parquet, against the engine alone and against peers."""

    def seconds(told: list[dict[str, Any]] | None, key: str) -> str:
        values = [run[key] for run in told or () if run.get(key) is not None]
        return f"{Figure.of(values).cautious:,.1f}" if values else ""

    rows = []
    for result in latest(results, "job"):
        data = result.data
        work = [seconds(data.get(side), "work_s") for side in ("job", "engine")]
        ratio = link(Figure.of(data["job_by_engine"]).to_text(2, "x"), result)
        peers = [f"{name} {Figure.of(told).to_text(2, 'x')}" for name, told in data.get("peer_by_job", {}).items()]
        rows.append([result.what, result.place, *work, ratio, ", ".join(peers)])
    return markdown(["work", "machine, type", "job, s", "engine alone, s", "job by engine", "peer by job"], rows)


def speculation(results: Sequence[Result]) -> str:
    """The newest figures on the demonstration job's rows: how many times as fast as plain steps, by rows at once."""
    result = newest(results, "speculation", text="reports")
    rows: list[list[str]] = []
    for batch in (told["batch"] for told in result.data["batches"]):
        forced, auto = (result.speedup(batch, way) for way in WAYS)
        if forced is None or auto is None:
            continue
        share = Figure(auto.cautious / forced.cautious).to_text(1, "%")
        rows.append([str(batch), link(forced.to_text(2, "x"), result), auto.to_text(2, "x"), share])
    return markdown(["rows at once", *WAYS, "auto by forced"], rows)


def ladder(results: Sequence[Result]) -> str:
    """What each idea of the engine is worth, by the first rung, newest of each machine."""
    found = {result.place: result for result in results if result.bench == "ladder"}
    rungs = {place: {rung["name"]: rung for rung in result.data["rungs"]} for place, result in found.items()}
    names = dict.fromkeys(name for each in rungs.values() for name in each)

    def cell(place: str, name: str) -> str:
        rung = rungs[place].get(name)
        if rung is None:
            return ""
        first = found[place].data["rungs"][0].get("tokens_per_s")
        by_first = rung.get("by_first") or Figure.of([a / b for a, b in zip(rung["tokens_per_s"], first)]).cautious
        return link(f"{by_first:.2f}x", found[place])

    return markdown(["rung", *found], ([name, *(cell(place, name) for place in found)] for name in names))


def step(results: Sequence[Result]) -> str:
    """Host time of a step by running rows: the newest result of each machine that has it."""
    found: dict[tuple[str, int], tuple[Result, dict[str, Any]]] = {}
    for result in results:
        if result.bench == "scheduler":
            found |= {(result.machine, cost["sequences"]): (result, cost) for cost in result.data["costs"]}
    rows = []
    for (machine, sequences), (result, cost) in sorted(found.items()):
        parts = (f"{cost[f'{part}_us']:,.0f}" if f"{part}_us" in cost else "" for part in STEP_PARTS)
        rows.append([machine, f"{sequences:,}", link(f"{step_ms(cost).to_text(2)}", result), *parts, result.date[:10]])
    return markdown(["machine", "rows", "step, ms", *(f"{part}, us" for part in STEP_PARTS), "date"], rows)


def plan(results: Sequence[Result]) -> str:
    """What a large job costs its driver: seconds and memory, by size."""
    result = newest(results, "plan")
    rows = []
    for cost in result.data["costs"]:
        spent = (
            f"{cost[f'{do}_s']:g} s, {cost[f'{do}_bytes'] / 1e6:g} MB" for do in ("plan", "resume", "execute", "verify")
        )
        rows.append([link(f"{cost['rows']:,}", result), f"{cost['files']:,}", f"{cost['parts']:,}", *spent])
    return markdown(["rows", "files", "parts", "plan", "resume", "execute", "verify"], rows)


def cluster(results: Sequence[Result]) -> str:
    """Pools of machines in simulated time, by what was varied."""
    result = newest(results, "cluster")
    rows = [
        [
            link(run["what"], result) if not i else run["what"],
            f"{run['actors']:,}",
            f"{run['rows']:,}",
            f"{run['wall_s'] / 60:.1f}",
            f"{run['imbalance']:.2%}",
            f"{run['idle_share']:.2%}",
            f"{run['useful_share']:.0%}",
            f"{run['elastic_usd']:,.2f}",
            f"{run['static_usd']:,.2f}",
        ]
        for i, run in enumerate(result.data["runs"])
    ]
    head = ["pool", "actors", "rows", "minutes", "imbalance", "idle at the tail", "useful", "elastic, $", "static, $"]
    return markdown(head, rows)


def admission(results: Sequence[Result]) -> str:
    """Simulated jobs with the smallest KV cache that was tried: what other rules of admission take, by the engine's."""
    result = newest(results, "admission")
    runs = [run for run in result.data["runs"] if run["kv_share"] == min(r["kv_share"] for r in result.data["runs"])]
    by = {(run["job"], run["rule"]): run for run in runs}
    rows = []
    for job in dict.fromkeys(run["job"] for run in runs):
        ours, others = by[job, "engine"], [by[job, rule] for rule in ADMISSION_RULES]
        card = [f"{run['card_s'] / ours['card_s']:.2f}x" for run in others]
        rows.append([link(job, result), *card, f"{others[-1]['cores_s'] / ours['cores_s']:.2f}x"])
    return markdown(["job", *ADMISSION_RULES, f"{ADMISSION_RULES[-1]}, two cores"], rows)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "engine": engine,
    "job": job,
    "speculation": speculation,
    "ladder": ladder,
    "scheduler": step,
    "admission": admission,
}
SCALE_TABLES: dict[str, Callable[[Sequence[Result]], str]] = {"plan": plan, "cluster": cluster}


def performance_page(page: str, results: Sequence[Result], aims_file: Path) -> str:
    """docs/performance.md with its tables as the results have them now."""
    aimed = {"aims": aims(results, json.loads(aims_file.read_text(encoding="utf-8")))}
    return _written(page, aimed | {name: table(results) for name, table in TABLES.items()})


def scale_page(page: str, results: Sequence[Result]) -> str:
    """docs/scale.md with its tables as the results have them now."""
    return _written(page, {name: table(results) for name, table in SCALE_TABLES.items()})


def _written(page: str, tables: dict[str, str]) -> str:
    """Every table has to have its place."""
    for name, table in tables.items():
        begin = f"<!-- table: {name} -->"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
        if len(place.findall(page)) != 1:
            raise ValueError(f"expected one {begin} with {END} after it")
        page = place.sub(lambda _, text=f"{begin}\n\n{table}\n{END}": text, page)
    return page
