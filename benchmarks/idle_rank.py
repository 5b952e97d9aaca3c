"""A rank without a model, for `benchmarks.scheduler`: reads the arrays of each call and answers at once."""

import sys
from multiprocessing.connection import Connection

from pipeline.engine.parallel.plans import PlanMemory


def main(leader_fd: int, memory_fd: int) -> None:
    leader, memory = Connection(leader_fd), PlanMemory(memory_fd)
    leader.recv()
    leader.send(None)
    while True:
        try:
            _, arrays = memory.read(leader.recv_bytes())
        except EOFError:
            return
        leader.send(None if all(array is None or array.nbytes for array in arrays) else ("", "an array is empty"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
