"""Kill many publications: `python -m tests.job.publish --kills 20`."""

import argparse
import tempfile
from pathlib import Path

from tests.job.publish.kills import Publisher, kill_on_delta, kill_on_hub, two_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of publications to each kind of target")
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as name:
        folder, publisher = Path(name), Publisher()
        old, new = two_states(folder)
        for kind, struck in (
            ("Hub", kill_on_hub(publisher, old, new, kills)),
            ("Delta", kill_on_delta(publisher, old, new, kills, folder)),
        ):
            print(f"{kind}: {struck.total()} kills, each row once: {dict(struck)}")


if __name__ == "__main__":
    main()
