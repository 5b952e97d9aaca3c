"""`docs/architecture.md` is true: its folders, its files, the path of a token, and where families are named."""

import ast
import re
import sys
from pathlib import Path
from types import FrameType

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.model.families import FAMILIES, WRAPPERS
from tests.engine.ahead import run_ahead

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
PAGE = ROOT / "docs" / "architecture.md"


def test_the_page_is_short_and_names_every_folder_and_no_other_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 200
    named = set(re.findall(r"`([\w/]+)/`", page.partition("## Folders")[2]))
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/**/*.py")}
    missing = [name for name in packages if not any(name == one or name.startswith(f"{one}/") for one in named)]
    parents = {one.rpartition("/")[0] for one in named}
    assert not set(missing) - parents
    named |= set(re.findall(r"`([\w/]+\.py)`", page))
    assert not [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()]


def test_only_the_model_folder_names_families() -> None:
    """Benchmarks may: they make checkpoints of a family, and convert them for other engines."""
    families = {*FAMILIES, *WRAPPERS}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "model"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in families
    ]
    assert found == []


def files_of_a_token(ahead: bool = False, **options: object) -> set[str]:
    """Return the files of `pipeline/` whose functions run during `Engine.generate`, with compiled kernels as one.
    `ahead`: schedule one step ahead of the tokens, as for a GPU. The policy turns drafts on itself: all steps take the
    same time on its fake clock, and three earlier rows made drafts win."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            name = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
            is_kernel = name.startswith(("kernels/", "engine/drafts/lookup/compiled"))
            found.add("kernels/" if is_kernel else name)

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    report = "The pump was replaced on Monday. The pump was replaced on Monday. The pump was"
    with Engine(EngineConfig("demo", max_num_seqs=2, num_threads=1, **options)) as engine:  # type: ignore[arg-type]
        engine.warm_up()
        if engine.spec_decoder is not None:
            engine.spec_decoder.policy = MeasuredDrafts(6, clock=lambda: 10**6 * engine.stats.num_steps)
            engine.generate([report] * 3, SamplingParams(max_tokens=96, ignore_eos=True))
            assert engine.stats.num_draft_steps > 10
        if ahead:
            run_ahead(engine)
        sys.setprofile(note)
        try:
            engine.generate([report], params)
        finally:
            sys.setprofile(None)
    return found


def test_the_listed_paths_of_a_token_are_true() -> None:
    """Each other path lists only the files that it adds to the plain one."""
    page = PAGE.read_text(encoding="utf-8")
    plain: set[str] = set()
    for heading, options in (
        ("Without drafts", {"speculation": "off"}),
        ("With drafts", {"speculation": "auto"}),
        ("One step ahead", {"speculation": "off", "ahead": True}),
    ):
        listed = re.search(rf"\*\*{heading}\*\*(.*?)\n\n", page, re.DOTALL)
        assert listed is not None
        ran = files_of_a_token(**options)  # type: ignore[arg-type]
        assert set(re.findall(r"`([\w/]+(?:\.py|/))`", listed[1])) - {"engine/sampling/"} == ran - plain, heading
        plain = plain or ran
