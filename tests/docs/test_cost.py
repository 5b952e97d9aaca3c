"""The worked example of docs/cost.md, computed by the program."""

import re
from pathlib import Path

import pytest

from pipeline.report.account import Tokens, accounted, allocate
from pipeline.report.faults import LostTime
from pipeline.report.record.run_record import PHASES, ActorRecord, RunRecord

PAGE = Path("docs/cost.md").read_text()
EXAMPLE = PAGE.partition("### A worked example")[2]
WORDS = {"startup": "start-up", "wasted": "wasted work", "quality": "quality watch", "idle": "idle time"}


def told(label: str) -> float:
    (line,) = re.findall(rf"^\| {re.escape(label)} \| ([0-9.,]+)", EXAMPLE, re.M)
    return float(line.replace(",", ""))


def phase_us(phase: str) -> int:
    (seconds,) = re.findall(rf"([0-9,]+) s\s+of\s+{WORDS.get(phase, phase)}\b", EXAMPLE)
    return int(seconds.replace(",", "")) * 1_000_000


def test_the_worked_example_is_what_the_program_computes():
    run = RunRecord("1", "", actors=[ActorRecord(0, {phase: phase_us(phase) for phase in PHASES})], hourly_usd=2.5)
    accounts = accounted([run], [LostTime()])
    cost = allocate([run], accounts, Tokens(30_000_000, 0, 6_000_000), rows=1)
    assert run.machine_us == told("machine time") * 1e6
    assert cost.total_usd == pytest.approx(told("total"))
    assert cost.prompt_usd == pytest.approx(told("money of prompts"))
    assert cost.per_1m_prompt_usd == pytest.approx(told("1M prompt tokens"))
    assert cost.per_1m_generated_usd == pytest.approx(told("1M generated tokens"))
    assert cost.per_1m_blended_usd == pytest.approx(told("1M tokens, both"), abs=5e-6)
    efficiency = (run.phase_us("prefill") + run.phase_us("decode")) / run.machine_us
    assert efficiency == pytest.approx(told("batch efficiency"), abs=5e-6)
