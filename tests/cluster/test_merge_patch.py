"""Merge patches: RFC 7386's own examples, and lists of named objects."""

import copy

from pipeline.cluster.merge_patch import merged

# RFC 7386, appendix A: target, patch, result
RFC = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]
NAMED = [
    # one is changed, one is added, the others are unchanged
    ([{"name": "a", "x": 1}, {"name": "b", "x": 2}],
     [{"name": "b", "x": None, "y": 3}, {"name": "c", "z": {"n": None}}],
     [{"name": "a", "x": 1}, {"name": "b", "y": 3}, {"name": "c", "z": {}}]),
    # two mounts of one new volume are both kept
    ([{"name": "a"}], [{"name": "v", "p": 1}, {"name": "v", "p": 2}],
     [{"name": "a"}, {"name": "v", "p": 1}, {"name": "v", "p": 2}]),
    ([{"groupName": "g", "n": 1}], [{"groupName": "g", "n": 2}], [{"groupName": "g", "n": 2}]),
    # without names on both sides a list is replaced
    ([{"key": "a"}], [{"name": "b"}], [{"name": "b"}]),
    ([{"name": "a"}], [{"key": "b"}], [{"key": "b"}]),
    ([{"name": "a"}], [], []),
]  # fmt: skip


def test_patches():
    for target, patch, result in RFC + NAMED:
        before = copy.deepcopy((target, patch))
        assert merged(target, patch) == result, patch
        assert (target, patch) == before
