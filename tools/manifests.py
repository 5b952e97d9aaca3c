"""`python -m tools.manifests [--check]`: writes the examples of infra/kuberay, or says which are stale."""

import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from pipeline.cli.main import cli

ROOT = Path(__file__).parents[1]
PLACE = "infra/kuberay"
_CPU, _NIGHTLY = f"--config {PLACE}/cluster-cpu.yaml", f"--config {PLACE}/nightly.yaml --schedule '5 2 * * *'"
COMMANDS = {
    "once.k8s.yaml": f"jobs/summarize.yaml {_CPU}",
    "gpu.k8s.yaml": "jobs/summarize.yaml --config configs/h100.yaml "
    f"--config {PLACE}/cluster-gpu.yaml --set input.path=/work/jobs/data",
    "nightly.k8s.yaml": f"jobs/summarize.yaml {_CPU} {_NIGHTLY} --time-zone Europe/Berlin",
    "nightly-cronjob.k8s.yaml": f"jobs/summarize.yaml {_CPU} {_NIGHTLY} --time-zone Europe/Berlin --operator 1.5",
}


def files() -> dict[Path, str]:
    """Every example, with what it has to hold now."""
    made = {}
    for name, command in COMMANDS.items():
        words, argv = ["render", *shlex.split(command), "--output", f"{PLACE}/{name}"], sys.argv
        sys.argv = ["pipeline", *words]  # what the head of the file says
        try:
            done = CliRunner().invoke(cli, words[:-2], catch_exceptions=False)
        finally:
            sys.argv = argv
        if done.exit_code:
            raise RuntimeError(f"{command}: {done.output}")
        made[ROOT / PLACE / name] = done.stdout
    return made


def stale() -> list[str]:
    """The examples that are not as `pipeline render` writes them."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if found := stale():
            sys.exit(f"stale: {', '.join(found)}; run `python -m tools.manifests`")
    else:
        for path, text in files().items():
            path.write_text(text, encoding="utf-8")
