"""Conversion of text to token ids and back, for one checkpoint.

Text from data is never a control token: prompts are encoded by a copy of the tokenizer that does not know its control
tokens, so `<|im_end|>` inside a report is encoded as its characters. The post-processor still adds BOS and EOS, as in
`AutoTokenizer(text)`. `tokenizer_files.py` reads model folders, `chat.py` renders chats, `detokenizer.py` decodes
growing sequences.

A control token is an added token that is special, or that the chat template writes (`<think>`, `<tool_call>`). Other
added tokens (runs of blanks, HTML tags) are ordinary vocabulary and are parsed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from pipeline.checkpoints.chat_template import ADVICE
from pipeline.errors import ConfigError, ModelError
from pipeline.tokenization.chat import ChatRenderer
from pipeline.tokenization.chat_messages import check_answers, check_calls, is_continued, with_system
from pipeline.tokenization.control_aliases import AliasedTokenizer
from pipeline.tokenization.tokenizer_files import read_tokenizer_files

_LABEL_LENGTH = 64
_CONTEXT_TOKENS = 8  # of a prompt, used to encode what follows it: pre-tokenizers look at fewer


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe; expensive methods release the GIL.

    eos_token_ids: ids that end a sequence, from generation_config.json, config.json and the tokenizer. vocab_size: the
    largest token id + 1. digest: sha256 over the tokenizer's files and eos_token_ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_token_ids: frozenset[int],
        digest: str,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Take ownership of `backend`: truncation and padding are switched off. See `from_folder`."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.eos_token_ids = eos_token_ids
        self.digest = digest
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._name = name
        self._parsing = backend  # knows control tokens; encodes rendered chats and decodes
        self._bytes = _TokenBytes.from_backend(backend)
        self._control = _control_tokens(backend, chat_template or "")  # id by text
        self._control_ids = frozenset(self._control.values())
        self._literal_json = literal_json = _literal_json(backend, self._control)
        self._literal = tokenizers.Tokenizer.from_str(literal_json)
        self._literal.encode_special_tokens = True  # encode the text of special tokens as text
        self._aliased = AliasedTokenizer(literal_json, self._control)
        self._control_re = _any_of(self._control)
        self._leaks_re = _any_of(self._leaking_tokens())
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._renderer: ChatRenderer | None = None
        self._continued = lru_cache(maxsize=4096)(self._continue)

    @classmethod
    def from_folder(cls, path: str, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of the checkpoint in folder `path`. `chat_template` replaces the checkpoint's.

        Raises ModelError if there is no usable tokenizer.
        """
        files = read_tokenizer_files(Path(path))
        return cls(
            files.backend,
            name=path,
            eos_token_ids=files.eos_token_ids,
            digest=files.digest,
            chat_template=files.chat_template if chat_template is None else chat_template,
            special_tokens=files.special_tokens,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def check_chat_template(self) -> str:
        """Return the template. Raises ModelError if the checkpoint has none."""
        if self._chat_template is None:
            raise ModelError(
                f"{self._name}: the checkpoint has no chat template (chat_template.jinja, or `chat_template` "
                f"in tokenizer_config.json). {ADVICE}"
            )
        return self._chat_template

    @property
    def end_token_id(self) -> int | None:
        """Token that ends a text: the tokenizer's EOS, with which chat checkpoints end a turn, else the smallest of
        eos_token_ids; None without any."""
        own = self._control.get(str(self._special_tokens.get("eos_token")))
        return own if own in self.eos_token_ids else min(self.eos_token_ids, default=None)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text and id of each token added to the vocabulary, special or not."""
        return {token.content: token_id for token_id, token in self._parsing.get_added_tokens_decoder().items()}

    def token_id(self, text: str) -> int | None:
        """Return the single token of this text, added or encoded; None if the text is several tokens."""
        added = self.added_tokens.get(text)
        ids = [added] if added is not None else self._encode_bare(text)
        return ids[0] if len(ids) == 1 else None

    @property
    def control_texts(self) -> Sequence[str]:
        """Text of each control token."""
        return tuple(self._control)

    @property
    def literal_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, with every control token special: none of them is text."""
        return self._literal_json

    def encode(self, text: str) -> list[int]:
        """Encode a plain prompt, all of it as text; BOS and EOS are added if the tokenizer adds them.

        Raises ConfigError for a text with a lone surrogate, which no tokenizer accepts.
        """
        _check_unicode(text)
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Apply `encode` to each text, on all cores; releases the GIL."""
        encoded = [encoding.ids for encoding in self._literal.encode_batch_fast(list(texts))]
        if self._leaks_re is not None:
            for row, text in enumerate(texts):
                if self._leaks_re.search(text):
                    torn = self._aliased.torn(text, self._leaks_re)
                    encoded[row] = self._aliased.encode(torn, add_special_tokens=True)
        return encoded

    def encode_template(self, pieces: Sequence[str]) -> list[int]:
        """Encode a template's literals and, between them, values.

        Control tokens are parsed only in literals; values are text, also where they touch a literal. BOS and EOS are
        added if the tokenizer adds them, but no second BOS if the text begins with one.
        """
        plain = list(pieces)
        if self._control_re is not None:
            plain[::2] = [self._aliased.aliased(literal, self._control_re) for literal in pieces[::2]]
        ids = self._aliased.encode(self._aliased.torn("".join(plain), self._leaks_re), add_special_tokens=True)
        is_twice = len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._control_ids
        added = self._literal.encode("", add_special_tokens=True).ids
        return ids[1:] if is_twice and added[:1] == ids[:1] else ids

    def continuation(self, ids: Sequence[int], text: str) -> list[int]:
        """Encode `text` as it follows the prompt `ids`, all of it as text; the prompt's tokens do not change.

        After a blank, a word has other tokens than at the beginning of a text, so the prompt's last tokens are encoded
        with it. If its first characters would merge with the prompt's last ones, and after a control token, it is
        encoded by itself. Raises ConfigError for a text with a lone surrogate.
        """
        _check_unicode(text)
        last = tuple(ids[-_CONTEXT_TOKENS:])
        is_label = len(text) <= _LABEL_LENGTH  # cached: a job's prompts end alike, and its labels repeat
        return list(self._continued(last, text) if is_label else self._continue(last, text))

    def _continue(self, last: tuple[int, ...], text: str) -> list[int]:
        controls = [index for index, token in enumerate(last) if token in self._control_ids]
        for start in range(controls[-1] + 1 if controls else 0, len(last)):
            context = list(last[start:])
            together = self._encode_bare(self.decode(context) + text)
            if together[: len(context)] == context:
                return together[len(context) :]
        return self._encode_bare(text)

    def _encode_bare(self, text: str) -> list[int]:
        """Encode a text without BOS and EOS."""
        if self._leaks_re is not None and self._leaks_re.search(text):
            return self._aliased.encode(self._aliased.torn(text, self._leaks_re), add_special_tokens=False)
        return self._literal.encode(text, add_special_tokens=False).ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        now: datetime | None = None,
    ) -> list[int]:
        """Encode a conversation rendered by the checkpoint's chat template.

        `system` becomes the first message unless the conversation starts with a system message. The tokens are those of
        transformers' `apply_chat_template`, except that control-token text in any string of `messages` or in `system`
        is encoded as text. Keys whose value is None are left out. With `continue_final_message`, a chat that ends with
        the assistant's turn ends in the text of that turn, which the model continues, without a generation prompt. now:
        the date for templates that need it; without it, those are rejected. Raises ChatTemplateError if the template
        rejects the messages, omits part of them or exceeds its limits, ModelError if the checkpoint has no template or
        one that does not parse.
        """
        rendered = self._rendered(messages, system, add_generation_prompt, template_kwargs, continue_final_message, now)
        if isinstance(rendered, str):
            return self._parsing.encode(rendered, add_special_tokens=False).ids
        assert self._control_re is not None
        parts = [
            self._aliased.torn(text, self._leaks_re) if literal else self._aliased.aliased(text, self._control_re)
            for text, literal in rendered
        ]
        return self._aliased.encode("".join(parts), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Return the text that `encode_chat` encodes, for display: control tokens look like the same text in data."""
        rendered = self._rendered(messages, system, add_generation_prompt, template_kwargs, continue_final_message, now)
        return rendered if isinstance(rendered, str) else "".join(text for text, _ in rendered)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
        continue_final_message: bool,
        now: datetime | None,
    ) -> str | list[tuple[str, bool]]:
        if self._renderer is None:
            self._renderer = ChatRenderer(self.check_chat_template(), name=self._name)
        continues = continue_final_message and is_continued(messages)
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt and not continues,
        }
        template = self.check_chat_template()
        check_calls(messages, template)
        chat = with_system(messages, system)
        rendered = self._renderer.render(chat, variables, self._control_re, now, continues)
        check_answers(messages, template, rendered if isinstance(rendered, str) else "".join(t for t, _ in rendered))
        return rendered

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and with all blanks."""
        if self._bytes is None:
            return self._parsing.decode(list(ids), skip_special_tokens=True)
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")

    def differs_from(self, other: "Tokenizer") -> str | None:
        """Describe the first token whose id differs between two tokenizers; None if all ids mean the same text."""
        own, theirs = (each._parsing.get_vocab(with_added_tokens=True) for each in (self, other))
        for token in sorted({*own, *theirs}, key=lambda token: own.get(token, theirs.get(token, 0))):
            if own.get(token) != theirs.get(token):
                return f"token {token!r} has the id {own.get(token, 'none')} here and {theirs.get(token, 'none')} there"
        return None

    def close(self) -> None:
        """End the process that renders chat templates, if one runs. The tokenizer stays usable."""
        if self._renderer is not None:
            self._renderer.close()

    def _leaking_tokens(self) -> dict[str, int]:
        """Return control tokens that the model part makes from plain text (an SPM vocabulary contains `</s>`)."""
        unknown = getattr(self._literal.model, "unk_token", None)
        leaking = {}
        for text, token_id in self._control.items():
            if text == unknown or len(text) < 2 or self._literal.model.token_to_id(text) is None:
                continue
            if any(
                token_id in self._literal.encode(around, add_special_tokens=False).ids
                for around in (text, f" {text}", f"a{text}a", f"\n{text}\n")
            ):
                leaking[text] = token_id
        return leaking


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary; empty for special tokens and ids without a token.

    Byte-level vocabularies (GPT-2's scheme: Llama 3, Qwen) represent every byte by one printable character. The
    `tokenizers` library looks that up in each call; here each token is converted once, at its first use.

    `b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")` equals the library's
    `decode(ids, skip_special_tokens=True)`.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend, self._byte_of = backend, _byte_of_character()
        self._special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer) -> "_TokenBytes | None":
        """Return the table of a byte-level tokenizer; None for any other."""
        return cls(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def __missing__(self, token_id: int) -> bytes:
        spelled = self[token_id] = self._spell(self._backend.id_to_token(token_id))
        return spelled

    def _spell(self, token: str | None) -> bytes:
        if token is None or token in self._special:
            return b""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token with a character that represents no byte is its own text
            return token.encode()


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's mapping (`bytes_to_unicode`, Radford et al. 2019): printable Latin-1 maps to itself, the other
    bytes in order to the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _literal_json(backend: tokenizers.Tokenizer, control: Mapping[str, int]) -> str:
    """Serialize the tokenizer with every control token special, so that `encode_special_tokens` covers all of them."""
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or token["content"] in control
    return json.dumps(spec)


def _control_tokens(backend: tokenizers.Tokenizer, chat_template: str) -> dict[str, int]:
    return {
        token.content: token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.content and (token.special or (token.content in chat_template and not token.content.isspace()))
    }


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str] | None:
    """Match the longest of the texts at the leftmost position, like the tokenizer's own search."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"lone surrogate at character {error.start} of the text {text!a:.80}: it is not valid Unicode; decode "
            'bytes with errors="replace"'
        ) from None
