"""Edits of published entries; applied to the work tree, and printed for HEAD's text."""
import sys, subprocess
def rep(s, *pairs):
    for a,b in pairs:
        assert s.count(a)==1,(a,s.count(a)); s=s.replace(a,b)
    return s
E={}
E['mixtral']=lambda s: rep(s,
('def _entry(name: str, sizes: Sizes, repo: str, chat: str | None) -> CatalogEntry:\n    return CatalogEntry(name, sizes, f"mistralai/{repo}", licence="Apache-2.0", gated=True, chat=chat)',
 'def _entry(name: str, sizes: Sizes, repo: str, released: str, chat: str | None = _INST) -> CatalogEntry:\n    return CatalogEntry(\n        name, sizes, f"mistralai/{repo}", licence="Apache-2.0", gated=True, chat=chat, released=released\n    )'),
('"Mixtral-8x7B-Instruct-v0.1", _INST)','"Mixtral-8x7B-Instruct-v0.1", "2023-12")'),
('"Mixtral-8x22B-Instruct-v0.1", _INST)','"Mixtral-8x22B-Instruct-v0.1", "2024-04")'),
('"Mixtral-8x7B-v0.1", None)','"Mixtral-8x7B-v0.1", "2023-12", None)'))
E['olmoe']=lambda s: rep(s,
('''    published=(
        CatalogEntry(
            "olmoe-1b-7b-instruct",
            _1B_7B,
            "allenai/OLMoE-1B-7B-0924-Instruct",
            licence="Apache-2.0",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template",
        ),
    ),
''','''    published=tuple(
        CatalogEntry(
            name,
            _1B_7B,
            f"allenai/{repo}",
            licence="Apache-2.0",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template",
            released=released,
        )
        for name, repo, released in (
            ("olmoe-1b-7b-instruct", "OLMoE-1B-7B-0924-Instruct", "2024-09"),
            ("olmoe-1b-7b-0125-instruct", "OLMoE-1B-7B-0125-Instruct", "2025-01"),
        )
    ),
'''))
E['qwen']=lambda s: rep(s,
('''_CHATML = "<|im_start|> turns, from its own chat template"

_THINKS = f"{_CHATML}; it thinks first"


def _entry(name: str, sizes: Sizes, repo: str, chat: str = _CHATML, licence: str = "Apache-2.0") -> CatalogEntry:
    return CatalogEntry(name, sizes, f"Qwen/{repo}", licence=licence, gated=False, chat=chat)
''','''_CHATML = "<|im_start|> turns, from its own chat template"


def _entry(
    name: str, sizes: Sizes, repo: str, released: str, *, thinks: bool = False, **others: str
) -> CatalogEntry:
    chat = f"{_CHATML}; it thinks first" if thinks else _CHATML
    given = {"licence": "Apache-2.0", "chat": chat, "released": released, **others}
    return CatalogEntry(name, sizes, f"Qwen/{repo}", gated=False, thinks=thinks, **given)
'''),
('"Qwen1.5-MoE-A2.7B-Chat", licence="Tongyi Qianwen licence")','"Qwen1.5-MoE-A2.7B-Chat", "2024-03", licence="Tongyi Qianwen licence")'),
('"Qwen2-57B-A14B-Instruct")','"Qwen2-57B-A14B-Instruct", "2024-06")'),
('"Qwen3-30B-A3B", _THINKS)','"Qwen3-30B-A3B", "2025-04", thinks=True)'),
('"Qwen3-30B-A3B-Instruct-2507")','"Qwen3-30B-A3B-Instruct-2507", "2025-07")'),
('''        _entry(
            "qwen3-30b-a3b-thinking-2507", _30B_A3B_2507, "Qwen3-30B-A3B-Thinking-2507", f"{_CHATML}; it thinks first"
        ),
''','''        _entry("qwen3-30b-a3b-thinking-2507", _30B_A3B_2507, "Qwen3-30B-A3B-Thinking-2507", "2025-07", thinks=True),
'''),
('''_entry("qwen3-coder-30b-a3b-instruct", _30B_A3B_2507, "Qwen3-Coder-30B-A3B-Instruct"),''','''_entry(
            "qwen3-coder-30b-a3b-instruct", _30B_A3B_2507, "Qwen3-Coder-30B-A3B-Instruct", "2025-07", made_for="code"
        ),'''))
E['phimoe']=lambda s: rep(s,('''from its own chat template",
        ),''','''from its own chat template",
            released="2024-08",
        ),'''))
E['granite']=lambda s: rep(s,('''    published=(
        CatalogEntry(
            "granite-3.1-3b-a800m-instruct",
            _sizes(32, 1536, 40, 24),
            "ibm-granite/granite-3.1-3b-a800m-instruct",
            licence="Apache-2.0",
            gated=False,
            chat="<|start_of_role|> turns, from its own chat template",
        ),
    ),''','''    published=tuple(
        CatalogEntry(
            name,
            sizes,
            f"ibm-granite/{name}",
            licence="Apache-2.0",
            gated=False,
            chat="<|start_of_role|> turns, from its own chat template",
            released="2024-12",
        )
        for name, sizes in (
            ("granite-3.1-1b-a400m-instruct", _sizes(24, 1024, 32, 16)),
            ("granite-3.1-3b-a800m-instruct", _sizes(32, 1536, 40, 24)),
        )
    ),'''))
E['deepseek']=lambda s: rep(s,('''            chat="User: and Assistant: turns, from its own chat template",
        )
        for name, repo in (
            ("deepseek-v2-lite-chat", "DeepSeek-V2-Lite-Chat"),
            ("deepseek-coder-v2-lite-instruct", "DeepSeek-Coder-V2-Lite-Instruct"),
        )''','''            chat="User: and Assistant: turns, from its own chat template",
            released=released,
            made_for=made_for,
        )
        for name, repo, released, made_for in (
            ("deepseek-v2-lite-chat", "DeepSeek-V2-Lite-Chat", "2024-05", ""),
            ("deepseek-coder-v2-lite-instruct", "DeepSeek-Coder-V2-Lite-Instruct", "2024-06", "code"),
        )'''),
('''it thinks first",
        ),''','''it thinks first",
            released="2026-01",
            thinks=True,
        ),'''))
E['glm']=lambda s: rep(s,('''it thinks first",
        ),''','''it thinks first",
            released="2025-07",
            thinks=True,
        ),'''))
E['ernie']=lambda s: rep(s,('''    published=(
        CatalogEntry(
            "ernie-4.5-21b-a3b",
            _21B_A3B,
            "baidu/ERNIE-4.5-21B-A3B-PT",
            licence="Apache-2.0",
            gated=False,
            chat="User: and Assistant: turns, from its own chat template",
        ),
    ),''','''    published=(
        CatalogEntry(
            "ernie-4.5-21b-a3b",
            _21B_A3B,
            "baidu/ERNIE-4.5-21B-A3B-PT",
            licence="Apache-2.0",
            gated=False,
            chat=_TURNS,
            released="2025-06",
        ),
        CatalogEntry(
            "ernie-4.5-21b-a3b-thinking",
            _21B_A3B,
            "baidu/ERNIE-4.5-21B-A3B-Thinking",
            licence="Apache-2.0",
            gated=False,
            chat=f"{_TURNS}; it thinks first",
            released="2025-09",
            thinks=True,
        ),
    ),'''),('''

def _dense_layers(''','''
_TURNS = "User: and Assistant: turns, from its own chat template"


def _dense_layers('''))
if __name__=='__main__':
    for name,f in E.items():
        p=f'models/families/{name}.py'
        s=open(p).read(); open(p,'w').write(f(s))
