"""Energy by the machine's own counters: RAPL as Linux shows it in a folder, NVML as its Python package answers."""

import os
import queue
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pipeline.job.process.main import serve
from pipeline.machine import energy
from pipeline.machine.energy import EnergyMeter
from pipeline.report.render import markdown, text
from tests.report.records import delivering, report, run

WRAPS_AT = 1_000_000


@pytest.fixture
def zones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages, one of them with a part of its own that must not be counted twice."""
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "core")):
        folder = tmp_path / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{WRAPS_AT - 1}\n")
        (folder / "energy_uj").write_text("100\n")
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return tmp_path


def use(zones: Path, **uj: int) -> None:
    for zone, value in uj.items():
        (zones / f"intel-rapl:{zone[1:]}" / "energy_uj").write_text(str(value))


def meter_of(**resolved: str | int) -> EnergyMeter:
    found = EnergyMeter.from_resolved(resolved)
    assert found is not None
    return found


def test_processors_are_counted_by_package_through_a_wrap(zones: Path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    meter, quarter = (meter_of(device="cpu", num_threads=threads) for threads in (8, 2))
    assert meter.read_uj() == 0
    use(zones, z0=600, z1=300)
    assert (meter.read_uj(), quarter.read_uj()) == (700, 700 // 4)
    assert quarter.source == "RAPL, 2 of 8 cores' share of the processors"
    use(zones, z0=50, z1=300)  # wrapped around
    assert meter.read_uj() == 700 + WRAPS_AT - 550
    (zones / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.read_uj() == 700 + WRAPS_AT - 550  # unchanged, and nothing fails


def test_a_machine_without_counters_has_no_meter(tmp_path: Path, zones: Path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_text", Mock(side_effect=PermissionError))  # RAPL is root's to read on most machines
        assert EnergyMeter.from_resolved({"device": "cpu", "num_threads": 2}) is None
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "nowhere")
    assert EnergyMeter.from_resolved({"device": "cpu", "num_threads": 2}) is None


class NVMLError(Exception):
    pass


def test_a_card_is_counted_whole_where_its_driver_counts(monkeypatch):
    count = {"GPU-1234": 5000}
    consumption = Mock(side_effect=lambda handle: count[handle])
    driver = SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
                             nvmlDeviceGetTotalEnergyConsumption=consumption)  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    meter = meter_of(device="cuda:0")
    count["GPU-1234"] = 5750
    assert meter.read_uj() == 750_000
    consumption.side_effect = NVMLError("not supported")
    assert meter.read_uj() == 750_000
    assert EnergyMeter.from_resolved({"device": "cuda:0"}) is None


def test_an_engine_process_sends_its_energy_with_its_counters(zones: Path, monkeypatch):
    class Sent(Exception):
        pass

    send = Mock(side_effect=Sent)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    meter, inbox = meter_of(device="cpu", num_threads=1), queue.SimpleQueue()
    use(zones, z0=600)
    engine = SimpleNamespace(has_unfinished=True, step=lambda: [1], counters=lambda: {"num_steps": 3})
    with pytest.raises(Sent):
        serve(engine, inbox, send, meter)
    assert send.call_args.args[0].stats == {"num_steps": 3, "energy_uj": 500, "quality_us": 0}


def test_the_report_has_the_energy_of_a_token():
    record = delivering(run(decode=10**6))
    (actor,) = record.actors
    actor = replace(actor, stats=actor.stats | {"energy_uj": 600_000 * 10**6})
    built = report(replace(record, actors=[actor], resolved={"energy": "NVML, the whole card"}),
                   num_generated_tokens=300_000)  # fmt: skip
    assert built.energy_uj == 600_000 * 10**6
    for page in (text(built), markdown(built)):
        assert "167 Wh, 2 J per generated token (NVML, the whole card)" in page
    assert built.to_json()["joules_per_generated_token"] == 2.0
    assert report(delivering(run(decode=1))).energy_uj is None
    assert "Energy" not in text(report(delivering(run(decode=1))))
