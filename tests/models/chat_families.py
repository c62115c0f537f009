"""Chat templates of the families, shortened to what talks with and without tools need, and tokenizers for them."""

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
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and message.tool_calls %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
QWEN3 = (
    _QWEN3
    + """\
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
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
DEEPSEEK_R1 = """\
{%- set ns = namespace(is_tool=false, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system_prompt = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '\\n' if not loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""
DEEPSEEK_V31 = """\
{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{%- set ns = namespace(system_prompt='', is_last_user=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system_prompt = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_last_user = true %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.is_last_user = false %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
            {{- message['content'] if message['content'] is not none else '' }}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for tool in message['tool_calls'] %}
                {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
                {{- '' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- else %}
            {{- message['content'] + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_last_user %}
    {{- '<｜Assistant｜>' }}{{ '</think>' if not thinking else '<think>' }}
{%- endif %}"""
GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.' }}
{%- if reasoning_effort is defined %}{{- ' Reasoning: ' + reasoning_effort }}{%- endif %}
{{- '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {' }}
        {%- for name, fields in tool.function.parameters.properties.items() %}
            {{- name + ': ' + fields.type + ', ' }}
        {%- endfor %}
        {{- '}) => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content %}
            {{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '<|call|>' }}
        {%- set ns.last = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if ns.last is none %}{{- raise_exception('No call before it!') }}{%- endif %}
        {{- '<|start|>functions.' + ns.last + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
GLM4_MOE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{%- endif -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>{{ '\\n<think></think>' }}
{%- if m.content.strip() -%}{{ '\\n' + m.content.strip() }}{%- endif -%}
{%- for tc in m.tool_calls or [] %}
{{ '\\n<tool_call>' + tc.function.name }}
{%- for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
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
QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
        {%- for name, fields in tool.function.parameters.properties | items %}
            {{- '\\n<parameter>\\n<name>' + name + '</name>' }}
            {{- '\\n<type>' + fields.type | string + '</type>\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n<function=NAME>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
            {%- for name, value in tool_call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MISTRAL_V3 = """\
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id is not defined or tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
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


TEMPLATES = {
    **{name: FAMILIES[name].template for name in ("qwen3_moe", "deepseek_v31", "deepseek_r1", "glm4_moe", "gpt_oss")},
    "qwen3_moe instruct": QWEN3_CODER,
    "mixtral": MISTRAL_V3,
}
"""Templates that know tools."""
GENERAL = ("qwen2_moe", "phimoe", "deepseek_v2", "granite", "ernie", "lfm2", "gemma4")
"""Families whose templates know none, and whose calls nobody can read."""


def write_tools(folder: Path, name: str) -> None:
    """The family's tokenizer, and its template for talks with tools."""
    write_family(folder, name)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")


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
