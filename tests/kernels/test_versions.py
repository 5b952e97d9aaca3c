"""Compiled kernels on disk are those of the present sources, also of sources in other files."""

import ast
import importlib.util
from pathlib import Path

import pytest

from pipeline.kernels.cpu import versions
from pipeline.kernels.cpu.versions import version_of

FOLDER = Path(versions.__file__).parent
CACHED = sorted(p.stem for p in FOLDER.glob("*.py") if "@kernel(" in p.read_text() or "cache=True)" in p.read_text())
NO_CODE = {"versions", "threads"}  # what says how a kernel is compiled is looked at below


def sources_of(name: str) -> set[Path]:
    """The files of compiled functions and constants that a module's kernels are made of, its own apart."""
    found: set[Path] = set()
    left = [FOLDER / f"{name}.py"]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("pipeline.kernels."):
                path = FOLDER.parent / (module.removeprefix("pipeline.kernels.").replace(".", "/") + ".py")
                if path not in found and path.stem not in NO_CODE:
                    found.add(path)
                    left.append(path)
    return found - {FOLDER / f"{name}.py"}


def names_of(name: str) -> dict[str, str]:
    """Of the kernels of a module, loaded anew, that are kept on disk: the names that numba keeps them under."""
    spec = importlib.util.spec_from_file_location(f"again_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels = {n: f for n, f in vars(module).items() if getattr(getattr(f, "stats", None), "cache_path", None)}
    return {n: f.py_func.__qualname__ for n, f in kernels.items() if f.py_func.__module__ == spec.name}


def test_all_files_with_kernels_are_looked_at() -> None:
    assert {"paged", "elementwise", "compiled_linear"} <= set(CACHED)
    assert FOLDER / "processor.py" in sources_of("paged"), "of those that it imports, too"


@pytest.mark.parametrize("name", sorted(set(CACHED) - NO_CODE))
def test_a_kernel_has_another_name_when_another_file_that_it_is_made_of_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read_bytes = names_of(name), Path.read_bytes
    assert before
    assert names_of(name) == before
    for source in sources_of(name):
        monkeypatch.setattr(
            Path,
            "read_bytes",
            lambda path, source=source: read_bytes(path) + (b"#" if path.resolve() == source else b""),
        )
        version_of.cache_clear()
        after = names_of(name)
        assert all(after[kernel] != before[kernel] for kernel in before), f"{name} without {source.name}"
        monkeypatch.undo()
    version_of.cache_clear()
