"""Chat templates: the same text as from transformers, and errors that name the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tinkerflow.api.chat.template import load_template
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.deployments.tiny_model import make_tiny

TEMPLATES = {
    "macros": (
        "{%- macro tool(t) %}{{ t | tojson(indent=2) }}{% endmacro -%}\n"
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}\n{{ m.content }}\n  {% endif %}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}[{{ m['role'] }}]{{ m.content | trim }}{{ eos_token }}"
        "{% endfor %}"
        "{% if tools is not none %}{% for t in tools %}{{ tool(t) }}{% endfor %}{% endif %}"
        "{% if add_generation_prompt %}>{% if enable_thinking is false %}quiet{% endif %}"
        "{% endif %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}"
    ),
    "calls": (
        "{% for m in messages %}{{ m.content or '' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
        "{% endfor %}{% endif %}{% endfor %}"
    ),
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>é</b>. "},
    {"role": "user", "content": " Hi & 'you'\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "é<"}}}],
    },
    {"role": "tool", "content": "3"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <", "parameters": {"type": "object"}}}]


def folder_with(tmp_path: Path, template: Any, in_file: bool = False) -> Path:
    folder = make_tiny(tmp_path / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "chat_template": None if in_file else template,
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if in_file:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("in_file", [False, True])
def test_rendered_text_equals_that_of_transformers(
    tmp_path: Path, name: str, tools: list[dict[str, Any]], options: dict[str, Any], in_file: bool
) -> None:
    folder = folder_with(tmp_path, TEMPLATES[name], in_file)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder)).apply_chat_template(
        MESSAGES, tools=tools or None, add_generation_prompt=True, tokenize=False, **options
    )
    template = load_template(folder, "tiny")
    assert template is not None
    assert template.render(MESSAGES, tools, options) == theirs


def test_model_may_have_a_separate_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = load_template(folder_with(tmp_path, named), "tiny")
    assert template is not None
    assert (template.render([], [], {}), template.render([], TOOLS, {})) == ("plain", "tools")


def test_folder_without_a_template_loads_none(tmp_path: Path) -> None:
    assert load_template(folder_with(tmp_path, None), "tiny") is None
    assert load_template(tmp_path / "nowhere", "tiny") is None


def test_broken_template_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ServerError, match=r"tokenizer_config\.json cannot be read"):
        load_template(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template of tiny rejects them: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template of tiny fails with them: TypeError"),
        (
            "{{ messages.__class__.__mro__[1].__subclasses__() }}",
            "chat template of tiny rejects them: access to attribute",
        ),
        ("{% for %}", "chat template of tiny rejects them: "),
    ],
)
def test_template_error_is_a_user_error(tmp_path: Path, template: str, says: str) -> None:
    found = load_template(folder_with(tmp_path, template), "tiny")
    assert found is not None
    with pytest.raises(UserError, match=says):
        found.render(MESSAGES, [], {})


def test_options_do_not_replace_the_request(tmp_path: Path) -> None:
    found = load_template(folder_with(tmp_path, "x"), "tiny")
    assert found is not None
    with pytest.raises(UserError, match=r"chat_template_kwargs\['messages'\] is \[\]: must be left out"):
        found.render(MESSAGES, [], {"messages": []})


def test_an_option_may_have_any_name(tmp_path: Path) -> None:
    found = load_template(folder_with(tmp_path, "{{ mode }}"), "tiny")
    assert found is not None
    assert found.render(MESSAGES, [], {"self": 1, "not a name": 2, "mode": "fast"}) == "fast"
