"""The engine without packages of jobs, and with a numba that refuses its numpy: it runs, and reports that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.doctor.check import Setup
from pipeline.doctor.machine_checks import kernels
from pipeline.engine.config import EngineConfig
from pipeline.machine import numba

ROOT = Path(__file__).parents[2]
REFUSED = "Numba needs NumPy 2.4 or less. Got NumPy 2.5."
SCRIPT = f"""
import json, sys

# as if not installed
sys.modules.update(dict.fromkeys(("ray", "pydantic", "pyarrow", "s3fs", "rich", "click", "llguidance", "jsonschema")))

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "numba._version":
            raise ImportError({REFUSED!r})

sys.meta_path.insert(0, Refusing())
from pipeline.engine.engine import Engine
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.config import EngineConfig
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import EnvironmentFailed
from pipeline.kernels.triton import kernel_set

speculation = {{"method": "lookup", "num_speculative_tokens": 3, "forced": True}}
sizes = {{"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}}
found = []
for drafts in ("off", speculation):
    with Engine(EngineConfig("pipeline/demo/models/target", device="cpu", speculation=drafts, **sizes)) as engine:
        done = engine.generate([[5, 6, 7, 5, 6, 7, 5, 6]], SamplingParams(max_tokens=12, ignore_eos=True))
        found.append((done[0].token_ids, engine.resolved, engine.stats.num_draft_steps))
        try:
            engine.generate([[5]], SamplingParams(structured_outputs=StructuredOutputs.from_config({{"regex": "a"}})))
        except EnvironmentFailed as error:
            refused = str(error)
print(json.dumps((found, refused)))
"""


def test_the_engine_runs_and_reports_what_is_slower_or_refused() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr[-3000:]
    ((plain, resolved, _), (drafted, resolved_drafts, num_draft_steps)), refused = json.loads(
        process.stdout.splitlines()[-1]
    )
    assert plain == drafted
    assert num_draft_steps == 0
    assert resolved["kernel.attention"] == f"torch (reference): numba cannot be imported ({REFUSED}), this is slower"
    assert resolved["speculation"] == "off"
    assert resolved_drafts["speculation"] == f"off: lookup needs numba, which cannot be imported ({REFUSED})"
    assert "sampling.structured_outputs: needs the package llguidance" in refused
    assert "pip install llguidance" in refused


def test_doctor_warns_of_a_numba_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(REFUSED)

    monkeypatch.setattr(numba, "import_module", refuse)
    checks = {check.name: check for check in kernels(Setup(engine=EngineConfig("", device="cpu")))}
    assert checks["numba threads"].state == "warning"
    assert checks["numba threads"].found == f"numba cannot be imported ({REFUSED})"
    assert "numba cannot be imported" in checks["attention"].found
