"""Labels as distinct token ids."""

import pytest

from pipeline.errors import ConfigError
from pipeline.tokenization.labels import encode_labels


class Letters:
    """Tokenizer with one token per letter."""

    end_token_id: int | None = 2

    def continuation(self, ids, text):
        return [ord(letter) for letter in text]


def test_labels_become_their_tokens():
    assert encode_labels(Letters(), [], ["a", "bc"]) == [(97,), (98, 99)]


def test_each_label_has_the_end_token_if_one_is_a_prefix_of_another():
    assert encode_labels(Letters(), [], ["ab", "c", "a"]) == [(97, 98, 2), (99, 2), (97, 2)]
    endless = Letters()
    endless.end_token_id = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        encode_labels(endless, [], ["a", "ab"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [([], "at least one"), (["a", ""], "'' has no tokens"), (["a", "b", "a"], "'a' occurs twice")],
)
def test_indistinguishable_labels_are_refused(labels, message):
    with pytest.raises(ConfigError, match=message):
        encode_labels(Letters(), [], labels)
