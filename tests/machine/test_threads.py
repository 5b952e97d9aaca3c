"""Threads of an engine's process: which library runs numba's loops, and how long libgomp's threads spin."""

import platform
import subprocess
import sys

import pytest

from pipeline.machine.interpreter import child_environment
from pipeline.machine.threads import bounded_spin

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="oneTBB is installed on x86_64 only")

LAYER = """
import torch
from pipeline.kernels.select import select_kernels
select_kernels(torch.device("cpu"), torch.float32)
import numba
print(numba.threading_layer(), torch.get_num_threads())
"""


def layer(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LAYER],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()


def test_children_run_loops_on_tbb_and_torch_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert layer(OMP_NUM_THREADS="1") == ["tbb", "1"]


@pytest.mark.parametrize("environment", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "30000000"}])
def test_loops_stay_with_torch_where_its_threads_spin(environment: dict[str, str]) -> None:
    """Threads of libgomp that spin for long take the cores of oneTBB's."""
    assert layer(**environment)[0] == "omp"


def test_a_setting_of_the_user_stays() -> None:
    assert bounded_spin({}).keys() == {"GOMP_SPINCOUNT"}
    assert bounded_spin({"OMP_WAIT_POLICY": "active"}) == bounded_spin({"GOMP_SPINCOUNT": "7"}) == {}
