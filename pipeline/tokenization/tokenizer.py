"""Text to token ids and back, for one checkpoint.

Owns loading the tokenizer of a model folder and the rule that text from data is never a control token:
prompts are encoded by a copy of the tokenizer that does not know its control tokens, so `<|im_end|>` inside a
report is the characters it is made of. BOS and EOS still come from the post-processor, as
`AutoTokenizer(text)` adds them. Rendering chats belongs to `chat.py`, decoding a growing sequence to
`detokenizer.py`.

A control token is an added token that is special, or that the chat template writes (`<think>`,
`<tool_call>`). Other added tokens (runs of blanks, HTML tags) are ordinary vocabulary and stay parsed.
"""

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

from pipeline.checkpoints.file_checks import checked_file
from pipeline.errors import ModelError
from pipeline.model.config import MAX_JSON_BYTES, read_json
from pipeline.tokenization.chat import ChatRenderer, ChatTemplateError, with_system
from pipeline.tokenization.token_bytes import TokenBytes

__all__ = ["ChatTemplateError", "Tokenizer"]

# Everything that can change which tokens a text becomes, or where generation ends.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

# The largest of today's are a quarter of this; any other file is held to the bound of a config.json.
_LARGE_FILES: dict[str, int] = dict.fromkeys(
    ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"), 128 << 20
)


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads; large methods release the GIL.

    eos_token_ids: ids that end a sequence: those of generation_config.json, config.json and the tokenizer
    together. vocab_size: one more than the largest token id. digest: sha256 over the tokenizer's files and
    eos_token_ids.
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
        """`backend` is taken over: its truncation and padding are switched off. See `from_folder`."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.eos_token_ids = eos_token_ids
        self.digest = digest
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._name = name
        self._parsing = backend  # knows control tokens: encodes rendered chats, decodes
        self._bytes = TokenBytes.of(backend)
        self._control = _control_tokens(backend, chat_template or "")
        literal_json = _literal_json(backend, self._control)
        self._literal = tokenizers.Tokenizer.from_str(literal_json)
        self._literal.encode_special_tokens = True  # that is: encode the text of special tokens as text
        self._aliased = _Aliased(literal_json, self._control)
        self._control_re = _any_of(self._control)
        self._leaks_re = _any_of(self._leaking_tokens())
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._renderer: ChatRenderer | None = None

    @classmethod
    def from_folder(cls, path: str) -> "Tokenizer":
        """Load the tokenizer of the checkpoint in folder `path`, from its files alone: no network, no foreign
        code.

        Raises ModelError when there is no usable tokenizer.json.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"{path}: expected a checkpoint folder with a tokenizer.json, found no such folder")
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"{path}: no tokenizer.json. Expected a Hugging Face checkpoint with a fast tokenizer; an "
                "older one is converted by AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        _check_files(folder)
        config = _read_json(folder / "config.json")
        try:
            loaded: Any = AutoTokenizer.from_pretrained(
                str(folder),
                config=_bare_config(config, _read_json(folder / "tokenizer_config.json")),
                local_files_only=True,
                trust_remote_code=False,
            )
            backend = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
        except Exception as error:  # tokenizers raises bare Exception for a malformed file
            raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error
        eos = _eos_token_ids(folder, config, loaded.eos_token_id)
        template = loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        special = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
        return cls(
            backend,
            name=path,
            eos_token_ids=eos,
            digest=_digest(folder, eos),
            chat_template=template,
            special_tokens=special,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def check_chat_template(self) -> str:
        """The template. Raises ModelError where the checkpoint has none."""
        if self._chat_template is None:
            raise ModelError(
                f"{self._name}: the checkpoint has no chat template (chat_template.jinja, or `chat_template` "
                "in tokenizer_config.json). Use prompt.template or prompt.column instead of messages, and no "
                "prompt.chat or --chat"
            )
        return self._chat_template

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text of each control token and its id."""
        return dict(self._control)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, every character of it text; BOS and EOS where the tokenizer adds
        them.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, over all cores; releases the GIL."""
        encoded = [encoding.ids for encoding in self._literal.encode_batch_fast(list(texts))]
        if self._leaks_re is not None:
            for row, text in enumerate(texts):
                if self._leaks_re.search(text):
                    torn = self._aliased.torn(text, self._leaks_re)
                    encoded[row] = self._aliased.encode(torn, add_special_tokens=True)
        return encoded

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> list[int]:
        """Token ids of a conversation rendered by the checkpoint's chat template.

        `system` becomes the first message of a conversation that does not start with a system message of its
        own. The tokens are those of transformers' `apply_chat_template`, except that control-token text in
        any string of `messages` or in `system` is encoded as text. Keys whose value is None are left out, as
        there. `now` is what a template that asks for the date is told; without it, such a template is refused.
        Raises ChatTemplateError when the template refuses the messages or passes its limits, ModelError when the
        checkpoint has no template or one that does not parse.
        """
        if self._renderer is None:
            self._renderer = ChatRenderer(self.check_chat_template(), name=self._name)
        chat = with_system(messages, system)
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._renderer.render(chat, variables, literal=self._control_re, now=now)
        if isinstance(rendered, str):
            return self._parsing.encode(rendered, add_special_tokens=False).ids
        assert self._control_re is not None
        parts = [
            self._aliased.torn(text, self._leaks_re) if literal else self._aliased.aliased(text, self._control_re)
            for text, literal in rendered
        ]
        return self._aliased.encode("".join(parts), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out and blanks are left as they are."""
        if self._bytes is None:
            return self._parsing.decode(list(ids), skip_special_tokens=True)
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")

    def differs_from(self, other: "Tokenizer") -> str | None:
        """A token whose id is another one there, told in words; None where each id means the same text in both."""
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
        """Control tokens that the model part makes out of plain text (an SPM vocabulary holds `</s>` as a
        piece).
        """
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


class _Aliased:
    """The literal tokenizer that also knows each control token under a secret name, so that one text can hold
    both kinds of `<|im_end|>`.

    The chat template's own control tokens are renamed to their aliases before encoding; what is left under
    the plain name is text. One pass over the whole string keeps every token border where transformers puts
    it. The names hold a nonce of this process, so that no data can contain one. Built at first use: most jobs
    never need it.
    """

    def __init__(self, literal_json: str, control: Mapping[str, int]) -> None:
        self._json = literal_json
        self._control = control
        self._nonce = secrets.token_hex(12)
        self._names = {text: f"\U000f0000{self._nonce}.{index}\U000f0001" for index, text in enumerate(control)}
        self._tear = f"\U000f0000{self._nonce}.tear\U000f0001"
        self._lock = threading.Lock()
        self._backend: tokenizers.Tokenizer | None = None
        self._real: dict[int, int | None] = {}

    def aliased(self, text: str, control_re: re.Pattern[str]) -> str:
        """`text` with each control token under its alias."""
        return control_re.sub(lambda match: self._names[match[0]], text)

    def torn(self, text: str, leaks_re: re.Pattern[str] | None) -> str:
        """`text` with a mark inside each match that keeps the model part from making one token of it."""
        return leaks_re.sub(lambda match: match[0][0] + self._tear + match[0][1:], text) if leaks_re else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            backend = self._backend or self._build()
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        real = (self._real.get(token, token) for token in ids)
        return [token for token in real if token is not None]

    def _build(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._json)
        backend.encode_special_tokens = True  # the plain names; the aliases are not special, so they are parsed
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


def _literal_json(backend: tokenizers.Tokenizer, control: Mapping[str, int]) -> str:
    """The tokenizer with every control token special, so that `encode_special_tokens` covers each of them."""
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
    """Matches the longest of the texts at the leftmost place, as the tokenizer's own search does."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _check_files(folder: Path) -> None:
    """Nothing that transformers may look at is a link to elsewhere, a device or larger than such a file is."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            try:
                checked_file(file, _LARGE_FILES.get(file.name, MAX_JSON_BYTES))
            except FileNotFoundError:
                raise ModelError(f"{file}: a link to a file that does not exist") from None


def _bare_config(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> PreTrainedConfig:
    """What of config.json chooses a tokenizer's class, and nothing that transformers would build lists from.

    A family's own config class is needed only where tokenizer_config.json names no class: to import it takes as long
    as torch does, since it brings the compiler and much else with it.
    """
    model_type, tokenizer_class = config.get("model_type"), config.get("tokenizer_class")
    bare = PreTrainedConfig()
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        if isinstance(tokenizer_config.get("tokenizer_class"), str) and "auto_map" not in tokenizer_config:
            bare.model_type = model_type  # pyright: ignore[reportAttributeAccessIssue] - on this instance alone
        else:
            bare = CONFIG_MAPPING[model_type]()
    if isinstance(tokenizer_class, str):
        bare.tokenizer_class = tokenizer_class
    return bare


def _eos_token_ids(folder: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    text_config = config.get("text_config")
    found: list[Any] = [
        tokenizer_eos,
        _read_json(folder / "generation_config.json").get("eos_token_id"),
    ]
    found.append(config.get("eos_token_id"))
    if isinstance(text_config, dict):
        found.append(text_config.get("eos_token_id"))
    ids: set[int] = set()
    for value in found:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                ids.add(token_id)
            elif token_id is not None and token_id != -1:
                raise ModelError(f"{folder}: eos_token_id {token_id!r:.200} is not a token id")
    return frozenset(ids)


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _digest(folder: Path, eos_token_ids: frozenset[int]) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        file = folder / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)}:".encode())
            digest.update(content)
    digest.update(repr(sorted(eos_token_ids)).encode())
    return digest.hexdigest()
