"""Chat templates of the families, shortened to what a chat without tools needs, and a tokenizer with their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tool_call>\\n{"name": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
QWEN3 = (
    _QWEN3
    + """\
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)
QWEN3_THINKING = _QWEN3 + "    {{- '<think>\\n' }}\n{%- endif %}"
QWEN3_INSTRUCT = _QWEN3 + "{%- endif %}"
PHIMOE = (
    "{% for message in messages %}{% if message['content'] %}"
    "{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + '\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK_V2 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DEEPSEEK_R1 = (
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
DEEPSEEK_V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}"
    "{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] -%}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}"
    "{{'<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{'<｜Assistant｜>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}"
    "{%- endif %}{% endif %}"
)
GPT_OSS = """\
{%- if reasoning_effort is not defined %}
    {%- set reasoning_effort = "medium" %}
{%- endif %}
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Current date: " + strftime_now("%Y-%m") + "\\n\\nReasoning: " + reasoning_effort + "\\n\\n" }}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>" }}
{%- if messages[0].role == "system" %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content + "\\n\\n<|end|>" }}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>analysis<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
        {%- endif %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- elif "thinking" in message %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""
GLM4_MOE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value></tool_call>
{%- endif -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = m.content %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}
<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
GRANITE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' +"
    " message['content'] + '<|end_of_text|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
ERNIE = (
    "{{- '<|begin_of_sentence|>' -}}{%- for message in messages -%}{%- if message['role'] == 'system' -%}"
    "{{- message['content'] + '\\n' -}}{%- elif message['role'] == 'user' -%}"
    "{{- 'User: ' + message['content'] + '\\n' -}}{%- elif message['role'] == 'assistant' -%}"
    "{{- 'Assistant: ' + message['content'] + '<|end_of_sentence|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
)
LFM2 = (
    "{{- bos_token -}}{%- set keep_past_thinking = keep_past_thinking | default(false) -%}"
    "{%- set ns = namespace(last_assistant_index=-1) -%}{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{%- set ns.last_assistant_index = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- set content = message['content'] -%}{%- if message['role'] == 'assistant' and not keep_past_thinking"
    " and loop.index0 != ns.last_assistant_index -%}{%- if '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1] | trim -%}{%- endif -%}{%- endif -%}"
    "{{- content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
GEMMA4 = (  # it thinks only if it is asked to, by a switch that is off; else its thinking is closed before it begins
    "{{- bos_token -}}{%- if (enable_thinking is defined and enable_thinking) or messages[0]['role'] == 'system' -%}"
    "{{- '<|turn>system\\n' -}}{%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\\n' -}}"
    "{%- endif -%}{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] | trim -}}{%- endif -%}"
    "{{- '<turn|>\\n' -}}{%- endif -%}{%- for message in messages -%}{%- if message['role'] != 'system' -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{- '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- if not enable_thinking | default(false) -%}"
    "{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}{%- endif -%}"
)
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}{% endfor %}"
)
_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_BARS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<think>", "</think>"),
)


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """A template; special tokens, and added ones that are not; eos and bos; and what is to be found out.

    Attributes:
        ends: tokens that end a turn. thinking: see `chat_format.Thinking`. opens: the prompt opens the thinking.
    """

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    eos: str
    ends: frozenset[str]
    bos: str | None = None
    thinking: str = "never"
    opens: bool = False
    config_eos: tuple[str, ...] = ()


def _chatml(template: str, thinking: str, *, opens: bool = False) -> ChatFamily:
    ends = frozenset({"<|im_end|>", "<|endoftext|>"})
    plain = _QWEN_PLAIN if thinking != "never" else ()
    more = {"config_eos": ("<|im_end|>", "<|endoftext|>"), "thinking": thinking, "opens": opens}
    return ChatFamily(template, _QWEN, plain, "<|im_end|>", ends, **more)  # pyright: ignore[reportArgumentType]


FAMILIES = {
    "qwen2_moe": _chatml(CHATML, "never"),
    "qwen3_moe": _chatml(QWEN3, "optional"),
    "qwen3_moe thinking": _chatml(QWEN3_THINKING, "always", opens=True),
    "qwen3_moe instruct": _chatml(QWEN3_INSTRUCT, "always"),
    "phimoe": ChatFamily(
        PHIMOE,
        ("<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"),
        (),
        "<|endoftext|>",
        frozenset({"<|endoftext|>", "<|end|>"}),
    ),
    "deepseek_v2": ChatFamily(DEEPSEEK_V2, _DEEPSEEK[:2], (), _DEEPSEEK[1], frozenset({_DEEPSEEK[1]}), _DEEPSEEK[0]),
    "deepseek_r1": ChatFamily(
        *(DEEPSEEK_R1, _DEEPSEEK, _BARS, _DEEPSEEK[1], frozenset({_DEEPSEEK[1]}), _DEEPSEEK[0]),
        thinking="always",
        opens=True,
    ),
    "deepseek_v31": ChatFamily(
        *(DEEPSEEK_V31, _DEEPSEEK, _BARS, _DEEPSEEK[1], frozenset({_DEEPSEEK[1]}), _DEEPSEEK[0]), thinking="optional"
    ),
    "gpt_oss": ChatFamily(
        GPT_OSS,
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        (),
        "<|return|>",
        frozenset({"<|return|>", "<|call|>"}),
        thinking="less",
    ),
    "glm4_moe": ChatFamily(
        GLM4_MOE,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_QWEN_PLAIN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        "<|endoftext|>",
        frozenset({"<|endoftext|>", "<|user|>", "<|observation|>"}),
        thinking="optional",
    ),
    "granite": ChatFamily(
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        (),
        "<|end_of_text|>",
        frozenset({"<|end_of_text|>"}),
    ),
    "ernie": ChatFamily(
        ERNIE,
        ("<|begin_of_sentence|>", "<|end_of_sentence|>", "</s>"),
        (),
        "</s>",
        frozenset({"</s>", "<|end_of_sentence|>"}),
    ),
    "lfm2": ChatFamily(
        LFM2,
        ("<|startoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>"),
        "<|im_end|>",
        frozenset({"<|im_end|>"}),
        "<|startoftext|>",
        thinking="always",
    ),
    "gemma4": ChatFamily(
        GEMMA4,
        ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"),
        (),
        "<turn|>",
        frozenset({"<turn|>"}),
        "<bos>",
        thinking="optional",
    ),
    "mixtral": ChatFamily(
        MIXTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), (), "</s>", frozenset({"</s>"}), "<s>"
    ),
}


def write_family(folder: Path, name: str) -> ChatFamily:
    """A tokenizer with one token per byte and the family's tokens, and its template; in files as they are published."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "bos_token": family.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    ids = [tokenizer.token_to_id(token) for token in family.config_eos]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ids else {}))
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": tokenizer.get_vocab_size()}))
    return family
