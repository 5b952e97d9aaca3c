"""Compiled kernels on disk are those of the present sources, also of sources in other files."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from pipeline.kernels.cpu.compile.versions import sources_of, version_of

KERNELS = Path(__file__).parents[3] / "pipeline/kernels"
LOOKUP = KERNELS.parent / "engine/drafts/lookup"
MARKS = re.compile(r"^@kernel\(|^    return kernel\(\)\(|\(cache=True\)", re.MULTILINE)
FILES = (*KERNELS.rglob("*.py"), *LOOKUP.glob("*.py"))
CACHED = sorted(path for path in FILES if MARKS.search(path.read_text()))


def imports_of(file: Path) -> set[Path]:
    """Return the files of this package that a module's kernels depend on, its own included, by Python's parser."""
    found, left = {file}, [file]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("pipeline.kernels", "pipeline.engine.drafts.lookup")
            ):
                module_path = KERNELS.parents[1] / str(node.module).replace(".", "/")
                named = [module_path / f"{alias.name}.py" for alias in node.names]
                new = {path for path in (module_path.with_suffix(".py"), *named) if path.is_file()} - found
                found |= new
                left += new
    return found


def names_of(file: Path) -> dict[str, str]:
    """Load a module anew and return the names under which numba keeps its kernels on disk."""
    spec = importlib.util.spec_from_file_location(f"again_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = vars(module) | {kind: module.linear_kernel(kind) for kind in getattr(module, "KINDS", ())}
    kernels = {n: f for n, f in found.items() if getattr(getattr(f, "stats", None), "cache_path", None)}
    return {n: f.py_func.__qualname__ for n, f in kernels.items() if f.py_func.__module__ == spec.name}


def test_all_files_with_kernels_are_tested() -> None:
    assert {"compiled_copies", "decode_kernel", "elementwise", "linear_kernel"} <= {file.stem for file in CACHED}
    assert KERNELS / "cpu/compile/processor.py" in sources_of(KERNELS / "cpu/attention/decode_kernel.py")
    assert LOOKUP / "compiled_lookup.py" in sources_of(LOOKUP / "compiled_copies.py")


@pytest.mark.parametrize("file", CACHED, ids=lambda file: file.stem)
def test_a_kernel_has_another_name_when_an_imported_file_changes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read_bytes = names_of(file), Path.read_bytes
    assert before
    assert names_of(file) == before
    for source in imports_of(file) - {file, KERNELS / "cpu/compile/versions.py"}:
        monkeypatch.setattr(
            Path,
            "read_bytes",
            lambda path, source=source: read_bytes(path) + (b"#" if path.resolve() == source else b""),
        )
        version_of.cache_clear()
        after = names_of(file)
        assert all(after[kernel] != before[kernel] for kernel in before), f"{file.name} without {source.name}"
        monkeypatch.undo()
    version_of.cache_clear()
