"""The process of a rank other than the leader: `python -m pipeline.engine.rank_process`, started by
`engine/parallel/group.py`.

It loads its share of the weights and computes the calls of the leader. It ends when the leader does.
"""

import faulthandler
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection

from pipeline.engine.forward.runner import DeviceContext
from pipeline.engine.parallel.group import failure_of
from pipeline.engine.parallel.plans import PlanMemory
from pipeline.engine.parallel.runner import serve
from pipeline.engine.startup.build import LoadSpec, load_runner
from pipeline.errors import RankLost
from pipeline.kernels.ranks import ProcessRanks
from pipeline.kernels.select import keep_cpu_kernels_in
from pipeline.machine.caches import cpu_kernel_folder


def main(leader_fd: str, memory_fd: str, life_fd: str, folder: str) -> None:
    """leader_fd: socket to the leader. memory_fd: of `PlanMemory`. life_fd: a pipe that closes when the leader ends.
    folder: of the store, removed then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles Ctrl-C in a terminal
    faulthandler.enable()
    threading.Thread(target=_exit_with, args=(int(life_fd), folder), daemon=True, name="leader's end").start()
    leader = Connection(int(leader_fd))
    rank, size, store, spec = leader.recv()
    assert isinstance(spec, LoadSpec)
    leader.send(None)
    try:
        keep_cpu_kernels_in(cpu_kernel_folder())
        with DeviceContext(spec.num_threads, spec.resolved.device):
            ranks = ProcessRanks(rank, size, store, spec.resolved.device, _lost)
            loaded = load_runner(spec, ranks, log=lambda text: None)
            serve(loaded.runner, spec.model, ranks, PlanMemory(int(memory_fd)), leader)
    except Exception as error:
        leader.send(failure_of(error))
        os._exit(1)  # a device in an unknown state may hang in its destructors


def _lost(error: Exception) -> Exception:
    return RankLost(f"another rank ended: {error}")


def _exit_with(life_fd: int, folder: str) -> None:
    os.read(life_fd, 1)
    shutil.rmtree(folder, ignore_errors=True)  # a leader that is killed leaves it
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
