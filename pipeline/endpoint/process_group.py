"""A server's process group: `python process_group.py FD COMMAND...`, started by `server.py`.

Runs the command in this process's group, and ends the whole group when FD closes, which happens however the parent
dies. Imports nothing but the standard library, since it runs without the package's path.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0


def _end_group_after(fd: int) -> None:
    os.read(fd, 1)  # returns when the parent's end is closed
    _end_group()


def _end_group() -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and _has_others():
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # this process too


def _has_others() -> bool:
    """Return whether the group has another process."""
    own = os.getpgrp()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, _, group = file.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == own and state != "Z":
                return True
    return False


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    fd, command = int(sys.argv[1]), sys.argv[2:]
    try:
        process = subprocess.Popen(command, preexec_fn=_end_with_parent)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be started: {error.strerror}")
    # After the start, since a process inherits it. The end of the group must not end this process first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_group_after, args=(fd,), daemon=True).start()
    code = process.wait()
    print(f"the server ended: {f'signal {-code}' if code < 0 else f'exit code {code}'}", flush=True)
    _end_group()


if __name__ == "__main__":
    main()
