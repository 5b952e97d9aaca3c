"""Write `benchmarks/compiled-kernels.md`: registers, memory and instructions of the Triton kernels, with limits.

python -m tools.compiled_kernels              # write it; takes minutes with an empty Triton cache
python -m tools.compiled_kernels --check      # exit with 1 if a kernel exceeds its limits

To check another version of Triton, run `pip install --target F --no-deps triton==V`, then
`PYTHONPATH=F python -m tools.compiled_kernels --check`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "compiled-kernels.md"
TARGETS = "sm_80", "sm_89", "sm_90", "sm_100"
COLUMNS = (
    "kernel", "registers", "spilled", "shared", "warps", "blocks", "at least", "instructions", "at most", "shuffles",
    "barriers", "waits", "products",
)  # fmt: skip
MARGIN = 1.5  # versions of Triton differ by up to this factor, mostly in byte-wise copies
ENOUGH_BLOCKS = 4  # more blocks on a multiprocessor change little
MAX_SPILLED = 8  # bytes
HEAD = """# Compiled GPU kernels

Written by `python -m tools.compiled_kernels` with Triton {triton}. Compiled without a GPU, so nothing here was timed.
Sizes are those of Llama-3-8B in bfloat16, unless a kernel's name says otherwise. `--check` compiles all
kernels and fails if one spills more than {spilled} bytes, has fewer blocks than "at least" or more instructions than
"at most", also with other versions of Triton. The tests compile a sample for sm_80, sm_89 and sm_90.

- registers, spilled (bytes): per thread. shared: bytes per block. blocks: number that fit a multiprocessor at once.
- instructions: of PTX, in the largest loop, as are shuffles, barriers, waits (for wgmma) and products (the kind of
  instruction that multiplies tiles). An inner loop is counted once. The int4 loop processes 256 inputs.

Checked by hand with Triton 3.6.0, 3.7.1 and 3.9.0: see [the findings](gpu-audit.md).
"""


def compiled(target: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the line of `tests.kernels.triton.compiling` for each kernel, except controls that must fail."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compiling", target]
    done = subprocess.run(command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True, check=True)
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return [line for line in lines if not line["name"].startswith("control")]


def row_of(line: Mapping[str, Any]) -> list[str]:
    kinds = {"wgmma": "wgmma", "mma.sync": "mma", "tcgen05": "tcgen05"}
    products = {short for full, short in kinds.items() if any(product.startswith(full) for product in line["products"])}
    max_instructions = -(-int(MARGIN * line["instructions"]) // 10) * 10
    cells = (
        line["name"], line["registers"], line["spill_bytes"], line["shared_bytes"], line["warps"], line["blocks"],
        min(line["blocks"], ENOUGH_BLOCKS), line["instructions"], max_instructions, line["shuffles"],
        line["barriers"], line["waits"], ", ".join(sorted(products)),
    )  # fmt: skip
    return [str(cell) for cell in cells]


def limits(page: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return target -> kernel -> (min blocks, max instructions), as parsed from the page."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    target = ""
    for line in page.splitlines():
        if line.startswith("## "):
            target = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if target and len(cells) == len(COLUMNS) and cells[1].isdigit():
            found.setdefault(target, {})[cells[0]] = int(cells[6]), int(cells[8])
    return found


def past_limits(line: Mapping[str, Any], limit: tuple[int, int]) -> list[str]:
    """Return the limits that a kernel exceeds."""
    blocks, instructions = limit
    found = []
    if line["spill_bytes"] > MAX_SPILLED:
        found.append(f"{line['spill_bytes']} bytes spilled")
    if line["blocks"] < blocks:
        found.append(f"{line['blocks']} blocks per multiprocessor, expected at least {blocks}")
    if instructions and line["instructions"] > instructions:  # 0: no loop found
        found.append(f"{line['instructions']} instructions in the loop, expected up to {instructions}")
    return found


def main(arguments: list[str]) -> int:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lines = {target: compiled(target, environment) for target in TARGETS}
    if arguments == ["--check"]:
        known, failed = limits(PAGE.read_text(encoding="utf-8")), 0
        for target, of_target in lines.items():
            for line in of_target:
                for problem in past_limits(line, known[target][line["name"]]):
                    failed = 1
                    print(f"{target} {line['name']}: {problem}")
        return failed
    parts = [HEAD.format(triton=version("triton"), spilled=MAX_SPILLED)]
    for target, of_target in lines.items():
        table = [COLUMNS, ["---"] * len(COLUMNS), *map(row_of, of_target)]
        parts.append(f"## {target}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
