"""Labels as token ids that can be told apart."""

import pytest

from pipeline.errors import ConfigError
from pipeline.tokenization.labels import encode_labels


class Letters:
    """A token for each letter."""

    end_token_id: int | None = 2

    def continuation(self, ids, text):
        return [ord(letter) for letter in text]


def test_labels_are_their_tokens():
    assert encode_labels(Letters(), [], ["a", "bc"]) == [(97,), (98, 99)]


def test_where_one_label_begins_another_the_end_belongs_to_each():
    assert encode_labels(Letters(), [], ["ab", "c", "a"]) == [(97, 98, 2), (99, 2), (97, 2)]
    endless = Letters()
    endless.end_token_id = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        encode_labels(endless, [], ["a", "ab"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [([], "at least one"), (["a", ""], "'' has no tokens"), (["a", "b", "a"], "'a' occurs twice")],
)
def test_labels_that_cannot_be_told_apart_are_refused(labels, message):
    with pytest.raises(ConfigError, match=message):
        encode_labels(Letters(), [], labels)
