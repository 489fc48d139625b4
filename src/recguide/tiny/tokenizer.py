"""The embedded model's tokenizer: a byte-level BPE trained on its own tasks, digits one by one, ChatML template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .tasks import FAMILIES, make_task, prose_passages

VOCABULARY = 2048
PAD, BOS, START, END, MASK = "<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<mask>"
SPECIAL_TOKENS = (PAD, BOS, START, END, MASK, "<think>", "</think>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def corpus(tasks_per_family: int) -> Iterator[str]:
    """Training text of the tokenizer: prompts and answers of every family, then some prose and code."""
    for family in FAMILIES:
        for index in range(tasks_per_family):
            task = make_task(family, "wide", index)
            yield task.prompt
            yield task.answer
    yield from islice(prose_passages(), tasks_per_family // 4)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the BPE on `texts`; returns a tokenizer that can be saved and loaded by `AutoTokenizer`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+|\n+ *| ?[^\sA-Za-z\d]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START, "<think>", "</think>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
