"""The demo model's tokenizer: byte-level BPE with Mixtral's chat form."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import tokenizer_texts

VOCABULARY = 3072
BOS, EOS, USER, END_USER = "<s>", "</s>", "[INST]", "[/INST]"

# Mixtral's form: the system text stands at the start of the first user turn, each answer ends with </s>.
CHAT_TEMPLATE = """\
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + message['content'] + eos_token -}}
    {%- else -%}
        {{- raise_exception('Only system, user and assistant roles are supported') -}}
    {%- endif -%}
{%- endfor -%}
"""


def build_tokenizer(texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Trains the vocabulary on `texts`, or the authored ones; the result depends on nothing but these."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The tags swallow the blanks around them, so a message has the same tokens with and without the template.
    special = [
        AddedToken(BOS, special=True, normalized=False),
        AddedToken(EOS, special=True, normalized=False),
        AddedToken(USER, special=True, normalized=False, rstrip=True),
        AddedToken(END_USER, special=True, normalized=False, lstrip=True, rstrip=True),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts() if texts is None else texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def mark_id(tokenizer: PreTrainedTokenizerFast, mark: str) -> int:
    """The id of one of the marks of this file. Raises ValueError for a tokenizer that lacks it."""
    found = tokenizer.backend_tokenizer.token_to_id(mark)
    if found is None:
        raise ValueError(f"the tokenizer has no {mark}")
    return found
