"""Byte-level BPE tokenizer of target and draft: its training and special tokens.

Bytes are the base, so any text can be encoded. Digits are single tokens, so unseen numbers are copied digit by digit.
"""

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.demo.reports import FORMS, MISLEADING_FILLERS, PLAIN_FILLERS, make_report
from pipeline.demo.words import SYLLABLES

PAD, BOS, EOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, IM_START, IM_END)
VOCAB_SIZE = 1024
MAX_TOKENS = 1024

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(num_reports: int = 2000) -> PreTrainedTokenizerFast:
    """Train a tokenizer on training reports and summaries. Takes seconds and is deterministic.

    The post-processor adds BOS before every text. The chat template adds BOS too, so encode chat text without added
    special tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(num_reports), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _texts(num_reports: int) -> Iterator[str]:
    """Yield the training texts: bare facts, and single syllables often enough that they are merged first."""
    rng = Random(0)
    for index in range(num_reports):
        report = make_report("train", index, fillers=False)
        yield f"{report.prompt} {report.summary}"
        for _ in range(40):
            yield f" {rng.choice(SYLLABLES).capitalize()}\n{rng.choice(SYLLABLES)}\n{rng.choice(SYLLABLES)}"
    cues = " ".join(form.format("") for forms in FORMS["terse"].values() for form in forms)
    fillers = " ".join((*PLAIN_FILLERS, *MISLEADING_FILLERS)).replace("{", "").replace("}", "")
    for _ in range(num_reports // 20):
        yield f"system\nuser\nassistant\n {cues}"
        yield fillers
