"""A tokenizer that distinguishes a chat template's control tokens from the same characters in data.

The template's control tokens are renamed to secret aliases before encoding; anything under the plain name is text. So
one text can contain both kinds of `<|im_end|>`. Aliases contain a nonce of this process, so no data can contain them.
"""

import re
import secrets
import threading
from collections.abc import Mapping

import tokenizers


class AliasedTokenizer:
    """The literal tokenizer, extended by an alias for each control token.

    A single pass over the whole string places token borders exactly as transformers does. Built at first use: most jobs
    never need it.
    """

    def __init__(self, literal_json: str, control: Mapping[str, int]) -> None:
        """`literal_json` has the format of tokenizer.json, with every token of `control` (text to id) special."""
        self._json = literal_json
        self._control = control
        self._nonce = secrets.token_hex(12)
        self._names = {text: f"\U000f0000{self._nonce}.{index}\U000f0001" for index, text in enumerate(control)}
        self._tear = f"\U000f0000{self._nonce}.tear\U000f0001"
        self._lock = threading.Lock()
        self._backend: tokenizers.Tokenizer | None = None
        self._real: dict[int, int | None] = {}

    def aliased(self, text: str, control_re: re.Pattern[str]) -> str:
        """Replace each control token in `text` by its alias."""
        return control_re.sub(lambda match: self._names[match[0]], text)

    def torn(self, text: str, leaks_re: re.Pattern[str] | None) -> str:
        """Insert a mark into each match in `text`, so that the model part cannot merge it into one token."""
        return leaks_re.sub(lambda match: match[0][0] + self._tear + match[0][1:], text) if leaks_re else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode the result of `aliased` or `torn`. add_special_tokens: add BOS and EOS, if the tokenizer has them."""
        with self._lock:
            backend = self._backend or self._build()
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        real = (self._real.get(token, token) for token in ids)
        return [token for token in real if token is not None]

    def _build(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._json)
        backend.encode_special_tokens = True  # applies to plain names; aliases are not special, so they are parsed
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        for text, token_id in self._control.items():
            like = known[text]
            self._real[_add(backend, self._names[text], lstrip=like.lstrip, rstrip=like.rstrip)] = token_id
        self._real[_add(backend, self._tear)] = None
        self._backend = backend
        return backend


def _add(backend: tokenizers.Tokenizer, content: str, *, lstrip: bool = False, rstrip: bool = False) -> int:
    backend.add_tokens([tokenizers.AddedToken(content, lstrip=lstrip, rstrip=rstrip, normalized=False)])
    token_id = backend.token_to_id(content)
    assert token_id is not None
    return token_id
