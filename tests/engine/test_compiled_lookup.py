"""Compiled lookup on disk is that of the present sources, those of other files too."""

import ast
import importlib.util
from pathlib import Path

import pytest

from pipeline.engine.drafts.lookup import compiled_lookup
from pipeline.engine.drafts.lookup.compiled import select_lookup
from pipeline.kernels.cpu.compile.versions import version_of

FOLDER = Path(compiled_lookup.__file__).parent
ROOM = "pipeline.engine.drafts.lookup."


def sources_of(name: str) -> set[Path]:
    """The files of this folder whose functions and constants a module uses, its own apart."""
    found: set[Path] = set()
    left = [FOLDER / f"{name}.py"]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(ROOM):
                path = FOLDER / f"{module.removeprefix(ROOM)}.py"
                if path not in found:
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


@pytest.mark.parametrize(
    ("name", "kernels"), [("compiled_lookup", {"look_up", "index_runs"}), ("compiled_copies", {"learn", "draft"})]
)
def test_a_kernel_has_another_name_when_another_file_that_it_is_made_of_changes(
    name: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read_bytes = names_of(name), Path.read_bytes
    assert set(before) == kernels
    sources = sources_of(name)
    assert {path.stem for path in sources} >= {"suffix_index", "corpus"}
    for source in sources:
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


def test_without_numba_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_lookup() is not None
    monkeypatch.setattr("pipeline.engine.drafts.lookup.compiled.find_spec", lambda name: None)
    assert select_lookup() is None
