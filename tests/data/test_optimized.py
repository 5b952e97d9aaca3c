"""The checks that protect rows work under `python -O` too, which removes assertions."""

import subprocess
import sys

PROGRAM = """
import sys
from dataclasses import replace

from pipeline.data.output.parts import PartStore
from pipeline.errors import PipelineError
from tests.data.output.finished_units import name, result
from tests.stores.boxes import box_url

assert False, "assertions are on"
store = PartStore(sys.argv[1])
store.folder.probe()
store.write(name(), result(50))
part = store.read_part(name())


def refused(call, *args):
    try:
        call(*args)
    except PipelineError as error:
        print(type(error).__name__, error)


refused(store.write, name(1), result(49))
refused(store.rewrite, name(), result(49), {}, part.tag)
refused(store.folder.read, "../secret")
refused(PartStore(box_url("optimized")).folder.read, "../secret")
refused(lambda: replace(name(), unit=40))
"""


def test_rows_are_guarded_without_assertions(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM, str(tmp_path / "out")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.splitlines()
    assert [line.partition(" ")[0] for line in told] == ["PipelineError"] * 5, told
    assert ["has 49 rows" in line for line in told] == [True, True, False, False, False]
