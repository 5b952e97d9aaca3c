"""Tokenizers small enough to train in a test, one for each kind of behaviour."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The pump in hall 7 was stopped at 14:05; nobody was hurt.",
    "user assistant system message content think, tool call",
    "Zürich, naïve café, Ελληνικά, русский, 你好世界, こんにちは, 🎉🎊👩‍👩‍👧, ｅｎｄ",
    "    indented   text\n\n\twith tabs\r\n",
] * 3

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and '</think>' in message.content %}"
    "{{ message.content.split('</think>')[-1] | trim }}{% else %}{{ message.content | trim }}{% endif %}"
    "{% if message.extra %}{{ message.extra | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


def byte_level(vocab_size: int = 420) -> Tokenizer:
    """Train a byte-level tokenizer like Llama 3's: BOS by the post-processor, special and other added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXTS, trainer)
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<table>", "\n\n\n")])
    bpe.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bpe.token_to_id("<|bos|>"))]
    )
    return bpe


def sentencepiece_like() -> Tokenizer:
    """Make a tokenizer like Llama 2's: pieces with a blank mark, byte fallback. Merges can build `</s>` from text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(TEXTS).replace(" ", "▁")) - set("你好世界🎉🎊") | set("</s>▁ab"))
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("▁", "a"), ("t", "e"), ("▁", "t")]
    pieces += letters + [left + right for left, right in merges if left + right != "</s>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return bpe


def save(folder: Path, backend: Tokenizer, *, chat_template: str | None = None, eos: str, bos: str) -> str:
    """Write a checkpoint folder without weights, and return its path."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": backend.token_to_id(eos)}))
    return str(folder)


def save_byte_level(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> str:
    return save(folder, byte_level(), chat_template=chat_template, bos="<|bos|>", eos="<|eos|>")
