"""Compiles specifications to row matchers with llguidance. Equal ones are compiled once and copied for each row.

llguidance (https://github.com/guidance-ai/llguidance) derives masks from an Earley parser over derivatives of regular
expressions; compiling a schema takes about a millisecond, a mask some microseconds.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.engine.grammar.json_schema import prepared
from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.errors import ConfigError, EnvironmentFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pipeline.tokenization.tokenizer import Tokenizer

MAX_COMPILED = 256  # cached grammars; those of running rows stay alive in addition
ANY_OBJECT = '{"type":"object"}'
# Strings and comments of a Lark grammar come first, because they may contain slashes.
_LARK_REGEX = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/')


def check_grammar(wanted: StructuredOutputs) -> None:
    """Compile without a tokenizer. Raises ConfigError if the grammar is malformed or uses an unsupported feature
    (`uniqueItems`, look-around, an unknown format), with the compiler's message, which names it."""
    llguidance = import_llguidance()
    has_failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_source(wanted), limits=_limits())
    if has_failed:
        raise ConfigError(f"sampling.structured_outputs.{wanted.kind}: {_first_line(messages)}")


class GrammarCompiler:
    """Grammar compiler of one model. `vocab_size`: width of its logits; the tokenizer may have fewer or more tokens."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-max(self.vocab_size, self._tokenizer.vocab_size) // 32)

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile the specification now. Raises ConfigError if that fails."""
        self._template(wanted)

    def matcher(self, wanted: StructuredOutputs, can_force: bool = False) -> RowMatcher:
        """Return a matcher at the start of a completion. Raises ConfigError."""
        return RowMatcher(self._template(wanted).deep_copy(), can_force, self._tokenizer.eos_token_ids)

    def _template(self, wanted: StructuredOutputs) -> "LLMatcher":
        found = self._compiled.get(wanted)
        if found is None:
            found = import_llguidance().LLMatcher(self._known_tokens(), _source(wanted), log_level=0, limits=_limits())
            if found.is_error():
                raise ConfigError(f"sampling.structured_outputs.{wanted.kind}: {_first_line([found.get_error()])}")
            self._compiled[wanted] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        return found

    def _known_tokens(self) -> "LLTokenizer":
        """Return the bytes of all tokens. EOS and the width are passed, because llguidance otherwise guesses them, and
        guessed the pad token of the embedded model."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            tokenizer = self._tokenizer
            eos = sorted(token for token in tokenizer.eos_token_ids if token < tokenizer.vocab_size)
            if not eos:
                raise ConfigError("sampling.structured_outputs: the checkpoint defines no end-of-sequence token")
            width = max(self.vocab_size, tokenizer.vocab_size)
            llguidance = import_llguidance()
            try:
                vocabulary = llguidance.LLTokenizer(tokenizer.literal_json, n_vocab=width, eos_token=eos)
            except ValueError as error:
                raise ConfigError(
                    f"sampling.structured_outputs: not supported with this checkpoint's kind of tokenizer ({error})"
                ) from None
            self._vocabulary = vocabulary
        return vocabulary


def import_llguidance() -> Any:
    """Return the module. Only structured outputs need it, so an engine starts without it.

    Raises EnvironmentFailed if it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise EnvironmentFailed(
            f"sampling.structured_outputs: needs the package llguidance, which cannot be imported ({error}); "
            "pip install llguidance"
        ) from None
    return llguidance


@lru_cache(maxsize=MAX_COMPILED)
def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tests whether a JSON Schema `pattern` is found in a name, with the semantics of the masks,
    in time linear in the name's length. Raises ConfigError."""
    llguidance = import_llguidance()
    source = _json_source(json.dumps({"type": "string", "pattern": pattern}))
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0, limits=_limits())
    if start.is_error():
        raise ConfigError(f"sampling.structured_outputs.json: {_first_line([start.get_error()])}")

    def matches(name: str) -> bool:
        matcher, text = start.deep_copy(), json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    return matches


def _limits() -> Any:
    return import_llguidance().LLParserLimits(verbose_errors=False)


def _source(wanted: StructuredOutputs) -> str:
    matcher = import_llguidance().LLMatcher
    if wanted.kind in ("json", "json_object"):
        return _json_source(json.dumps(prepared(wanted.text or ANY_OBJECT)), wanted.whitespace_pattern)
    if wanted.kind == "regex":
        return matcher.grammar_from_lark(f"start: /{_in_lark(wanted.text)}/")
    if wanted.kind == "choice":
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(wanted.text))
        return matcher.grammar_from_lark(f"start: {choices}")
    return matcher.grammar_from_lark(_LARK_REGEX.sub(_with_ascii_classes, wanted.text))


def _json_source(schema: str, whitespace_pattern: str | None = None) -> str:
    # These override options that a schema itself sets under x-guidance.
    options: Any = {"whitespace_flexible": whitespace_pattern is not None, "lenient": False}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern.replace(r"\s", r"[ \t\n\r]")  # whitespace of JSON
    try:
        return import_llguidance().LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:  # nested too deeply
        raise ConfigError(f"sampling.structured_outputs.json: {error}") from None


def _in_lark(regex: str) -> str:
    """Return the expression between the slashes of a Lark grammar. Classes are ECMAScript's, as in `pattern` of JSON
    Schema: `\\d` and `\\w` are ASCII, `\\s` is any whitespace."""
    return import_llguidance().regex_to_lark(regex, "dw")


def _with_ascii_classes(found: re.Match[str]) -> str:
    regex = found["regex"]
    return found[0] if regex is None else f"/{_in_lark(regex)}/"


def _first_line(messages: list[str]) -> str:
    """Return the compiler's message as one line."""
    lines = [line.strip() for line in "\n".join(messages).splitlines() if line.strip().strip("^|")]
    return "; ".join(dict.fromkeys(lines))[:400]
