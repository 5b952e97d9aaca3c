"""Job files as text: accepted and refused YAML, and the line of every value."""

import time

import pytest

from pipeline.config.jobfile import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    JobFileError,
    merge,
    parse,
    parse_value,
    read,
)


def refusal(text: str) -> str:
    with pytest.raises(JobFileError) as caught:
        parse(text, "job.yaml")
    return str(caught.value)


def test_scalars_follow_yaml_1_2():
    data = parse(
        "a: off\nb: No\nc: true\nd: null\ne: 1e-3\nf: 010\ng: 12:30\nh: 100_000\ni: 2024-01-01\nj: '5'\n"
        "k: -.5\nl: .inf\nm:\nn: 1.\no: yes\np: 0x10\n",
        "job.yaml",
    ).data
    assert data == {
        "a": "off", "b": "No", "c": True, "d": None, "e": 0.001, "f": 10, "g": "12:30", "h": 100_000,
        "i": "2024-01-01", "j": "5", "k": -0.5, "l": float("inf"), "m": None, "n": 1.0, "o": "yes",
        "p": "0x10",
    }  # fmt: skip
    assert parse("on: 1\nnull: 2\n5: 3\n", "job.yaml").data == {"on": 1, "null": 2, "5": 3}, "keys are text"
    digits = "9" * 5000  # int() refuses it
    assert parse(f"a: {digits}", "job.yaml").data == {"a": digits}


def test_every_value_knows_its_line():
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "job.yaml")
    assert document.location(("a", "b")) == "job.yaml:2"
    assert document.location(("a", "c", 1)) == "job.yaml:5"
    assert document.location(("a", "missing")) == "job.yaml:1"
    assert document.location(("elsewhere",)) == "job.yaml"


def test_duplicate_keys_are_all_named():
    message = refusal("a: 1\nb: {x: 1, x: 2}\na: 3\n")
    assert "job.yaml:3: a: written twice (first at job.yaml:1)" in message
    assert "job.yaml:2: b.x: written twice (first at job.yaml:2)" in message


def test_python_objects_are_refused_and_never_created(tmp_path):
    marker = tmp_path / "made"
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:os"):
        assert "job.yaml:1: a: tags such as" in refusal(f"a: !!python/{tag} ['touch {marker}']\n")
    assert not marker.exists()


@pytest.mark.parametrize(("text", "expected"), [
    ("a: &x [1]\nb: 1\n", "job.yaml:1: a: anchors and aliases"),
    ("a: *x\n", "anchors and aliases"),
    ("a: !!python/object/apply:os.system [echo]\n", "job.yaml:1: a: tags such as"),
    ("!!map\na: 1\n", "tags such as"),
    ("a: !x 5\n", "tags such as"),
    ("? [a, b]\n: 1\n", "a key must be plain text"),
    ("a: 1\n---\nb: 2\n", "a second document"),
    ("- a\n- b\n", "expected `key: value` lines"),
    ("just text\n", "expected `key: value` lines"),
    ("a: [1, 2\n", "not valid YAML"),
    ("a: b: c\n", "Quote text that"),
    ("a: 1\n\tb: 2\n", "job.yaml:2: not valid YAML"),
    ("a:\n  b: 1\n c: 2\n", "Indent keys of one section equally"),
    ("a: 1\n  b: 2\n", "Indent keys of one section equally"),
    ("a: \x07\n", "not valid YAML"),
])  # fmt: skip
def test_refused(text: str, expected: str):
    assert expected in refusal(text)


def test_depth_is_capped_before_anything_recurses():
    assert "nested deeper" in refusal("a: " + "[" * 50_000)
    deep = "a: " + "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1)
    parse(deep, "job.yaml")


def test_an_alias_bomb_costs_nothing():
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    start = time.perf_counter()
    assert "anchors and aliases" in refusal(bomb)
    assert time.perf_counter() - start < 20


def test_too_many_values():
    assert "more than" in refusal("a: [" + "1," * 30_000 + "1]")


def test_files_that_are_empty_have_a_bom_or_cannot_be_read(tmp_path):
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    (tmp_path / "empty.yaml").write_bytes(b"")
    assert read(tmp_path / "empty.yaml").data == {}
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read(tmp_path / "marked.yaml").data == {"name": "x"}
    for path, expected in [
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "cannot be read"),
        (big, "larger than"),
        (latin, "not UTF-8"),
    ]:
        with pytest.raises(JobFileError, match=expected):
            read(path)


def test_merging_is_key_by_key_and_keeps_lines():
    under = parse("a: {x: 1, y: [1, 2]}\nb: 1\n", "under.yaml")
    over = parse("\n\na:\n  y: [3]\nc: 2\n", "over.yaml")
    merged = merge(under, over)
    assert merged.data == {"a": {"x": 1, "y": [3]}, "b": 1, "c": 2}
    assert merged.location(("a", "x")) == "under.yaml:1"
    assert merged.location(("a", "y", 0)) == "over.yaml:4"
    assert ("a", "y", 1) not in merged.origins
    assert under.data == {"a": {"x": 1, "y": [1, 2]}, "b": 1}, "merging must not change what it was given"


def test_a_scalar_over_a_mapping_replaces_it():
    merged = merge(parse("a: {column: b}\n", "under"), parse("a: 5\n", "over"))
    assert merged.data == {"a": 5}
    assert ("a", "column") not in merged.origins


def test_values_of_the_command_line():
    assert parse_value(" 5 ", "--set") == 5
    assert parse_value("[a, 2]", "--set") == ["a", 2]
    assert parse_value("{column: budget}", "--set") == {"column": "budget"}
    assert parse_value("a: b", "--set") == "a: b"
    with pytest.raises(JobFileError, match=r"--set x:1: .*not valid YAML"):
        parse_value("[1, 2", "--set x")
