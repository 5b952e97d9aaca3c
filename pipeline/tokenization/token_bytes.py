"""What each token of a byte-level vocabulary is in bytes, so that a text is one join of them.

Byte-level vocabularies (GPT-2's scheme: Llama 3, Qwen) spell every byte as one printable character. Decoding means to
look up tokens, spell their characters as bytes again and read those as UTF-8; the `tokenizers` library does it anew in
each call. Here a token is spelled once. Other kinds of decoders join their tokens by rules of their own: no table.
"""

import tokenizers
from tokenizers import decoders


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, empty for special tokens and ids without a token; filled as tokens are met.

    `b"".join(map(of.__getitem__, ids)).decode("utf-8", "replace")` is what the library's
    `decode(ids, skip_special_tokens=True)` gives.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend, self._byte_of = backend, _byte_of_character()
        self._special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "TokenBytes | None":
        """The table of a byte-level tokenizer; None for any other."""
        return cls(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def __missing__(self, token_id: int) -> bytes:
        spelled = self[token_id] = self._spell(self._backend.id_to_token(token_id))
        return spelled

    def _spell(self, token: str | None) -> bytes:
        if token is None or token in self._special:
            return b""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token is its own text where a character of it spells no byte
            return token.encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling (`bytes_to_unicode`, Radford et al. 2019): printable Latin-1 stands for itself, the other bytes
    in their order for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
