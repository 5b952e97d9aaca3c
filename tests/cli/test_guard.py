"""Guarded commands run in a process of their own: exit codes pass through, a silent death is an environment error."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("default_sighup")

SCRIPT = """
import os, signal, sys, time
from pipeline.errors import PipelineError
from pipeline.cli.guard import guarded

try:
    with guarded():
        {body}
    print("continued")
except PipelineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(body: str, before: str = "", **options) -> subprocess.Popen:
    """Start the script with this body, and wait for "ready" if it prints that."""
    command = [sys.executable, "-c", before + SCRIPT.format(body=body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if "'ready'" in body:
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("body", "code", "out", "message"), [
    ("print('done')", 0, "done\ncontinued\n", ""),
    ("sys.exit(1)", 1, "", ""),
    ("sys.exit(75)", 75, "", ""),
    ("sys.exit()", 0, "", ""),
    ("os._exit(75)", 3, "", "exited with code 75"),  # without a signal before
    ("os._exit(1)", 3, "", "exited with code 1, as it does when"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 3, "", "killed by SIGKILL. It may have run out of memory"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 3, "", "killed by SIGSEGV"),
])  # fmt: skip
def test_an_exit_code_is_the_commands_own_or_the_environments(body, code, out, message):
    process = start(body)
    got = process.communicate(timeout=30)
    assert (process.returncode, got[0]) == (code, out)
    assert message in got[1]


@pytest.mark.parametrize(("handler", "code"), [
    ("lambda n, f: sys.exit(75)", 75),  # a regular exit
    ("lambda n, f: os._exit(75)", 75),  # like a run that hangs at exit
    ("signal.SIG_DFL", 75),  # a library removed the handler, like Ray at its end
    ("lambda n, f: os.abort()", 75),  # like Ray's own handler
    ("lambda n, f: os._exit(1)", 3),
    ("lambda n, f: os.kill(os.getpid(), signal.SIGKILL)", 3),
])  # fmt: skip
def test_a_signal_reaches_the_command_and_a_silent_end_after_it_is_an_interruption(handler, code):
    body = f"signal.signal(signal.SIGTERM, {handler}); print('ready', flush=True); "
    # Sleep briefly: a signal that arrives just before a sleep is handled after it.
    process = start(body + "[time.sleep(0.1) for _ in range(300)]")
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert ("Stopped by SIGTERM." in stderr) == (code == 75 and "sys" not in handler)


def test_a_signal_to_the_whole_group_reaches_the_command_once():
    """Ctrl-C on a terminal signals the whole group, and a second signal would end a drain at once."""
    body = "seen = []; signal.signal(signal.SIGINT, lambda n, f: seen.append(n)); print('ready', flush=True); "
    body += "time.sleep(1.5); print(len(seen))"
    process = start(body, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "1\ncontinued\n"


def test_a_hangup_that_is_ignored_is_not_passed_on():
    """`nohup` relies on this."""
    body = "signal.signal(signal.SIGHUP, lambda n, f: sys.exit(75)); print('ready', flush=True); time.sleep(1)"
    process = start(body, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=60)[0] == "continued\n"


def test_a_command_that_hangs_after_its_exit_code_is_killed():
    body = "import threading; threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit(75)"
    began = time.monotonic()
    process = start(body, "import pipeline.cli.guard\npipeline.cli.guard.EXIT_TIMEOUT_S = 0.5\n")
    assert process.wait(timeout=50) == 75
    assert time.monotonic() - began < 30


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.8])
def test_a_signal_while_the_command_line_starts_leaves_with_75(tmp_path, number, delay_s):
    """The exit code holds from the first line of our code; before that, the interpreter decides."""
    (tmp_path / "job.yaml").write_text("name: x\n")
    script = Path(sys.executable).with_name("pipeline")
    pipe_in = ["sh", "-c", f"exec {script} generate --input - <&0"]
    process = subprocess.Popen(pipe_in, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not _catches_sigterm(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay_s)
    process.send_signal(number)
    try:
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, stderr.count("Interrupted.")) == (75, 1), stderr


ENTRY = """
import atexit, os, signal, sys, threading, time, types, weakref
import pipeline.__main__ as entry
from pipeline.machine import signals

def act():
    {body}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {on_import!r}:
            act()

if {on_import!r}:
    sys.meta_path.insert(0, Finder())
else:
    cli = sys.modules["pipeline.cli.main"] = types.ModuleType("pipeline.cli.main")
    cli.main = act
sys.argv = ["pipeline", "validate", "job.yaml"]
entry.main()
"""
# the code to run, and the module whose import runs it; "" runs it instead of the command line
ENDS = {
    "a signal that comes where nothing can be raised": ("""class Thing:
        pass
    thing = Thing()
    ref = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGTERM), list(map(abs, range(9)))))
    del thing
    time.sleep(1)""", "pipeline.cli.main"),
    "a signal that a library turns into an error of its own": ("""try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("SchemaError: Interrupt: SIGINT")""", "pipeline.config"),
    "a signal that nothing lets through": ("""signals.GRACE_S = 0.3
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        time.sleep(60)""", ""),
    # libraries create classes by `exec`, and a KeyboardInterrupt from there ends `python -m` with SIGINT
    "a signal in the middle of an `exec`": (
        """exec("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)")""", ""),
    "an end that libraries would delay": ("""class Slow:
        __del__ = lambda self, end=time.sleep: end(60)
    entry.slow = Slow()
    print("printed", end="")
    atexit.register(time.sleep, 60)
    threading.Thread(target=time.sleep, args=(60,)).start()
    sys.exit(3)""", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_process_exits_with_its_code_at_once(tmp_path, name):
    """After a command's own end no signal changes its exit code."""
    body, on_import = ENDS[name]
    (tmp_path / "job.yaml").write_text("name: x\n")
    (tmp_path / "started.py").write_text(ENTRY.format(body=body, on_import=on_import))
    command = [sys.executable, "-m", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    signalled = name.startswith("a signal")
    expected = (75, "", "Interrupted.\n") if signalled else (3, "printed", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_the_command_dies_with_its_guard():
    process = start("print(os.getpid(), flush=True); time.sleep(60)")
    child = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Return False for a zombie too: its new parent may collect it late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_closed_terminal_drains_the_run_and_failed_prints_do_not_end_it(tmp_path):
    """A dropped ssh connection sends SIGHUP, and every later write to the terminal fails."""
    script = """
import sys, time
import pipeline.job.running.run
from pipeline import __main__
from pipeline.errors import Interrupted
from pipeline.job.running.reporter import harmless
from pipeline.job.telemetry.status import Status
from pipeline.machine.signals import StopSignals
def run_job(config, *, accept_numerics, retry_failed, redo, append, sample, progress, logs, metrics):
    show = harmless(progress)
    with StopSignals() as stop, stop.draining():
        for number in range(300):
            show(Status(phase=f"running {number}", warning=f"warning {number}"))
            time.sleep(0.05)
            if stop.count and number > 30:
                raise Interrupted("stopped")
pipeline.job.running.run.run_job = run_job
sys.argv = ["pipeline", "run", "job.yaml"]
__main__.main()
"""
    job = {"input": {"path": "."}, "prompt": {"column": "text"}, "model": {"path": "demo"}, "output": {"path": "o"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-c", script], {**os.environ, "TERM": "xterm"})
    shown = b""
    while b"running" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    deadline = time.monotonic() + 60
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == 75
