from __future__ import annotations

import pytest

from vllm_core.errors import RequestError, TokenizerError
from vllm_core.loader import chat_template
from vllm_core.loader.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi <b>é</b>"}, {"role": "assistant", "content": "Hello "}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "é<"}}}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAME = {
    "chatml": CHATML,
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}\n{% endfor %}{% endif %}{{ messages[0].content }}",
    "trimmed": "{%- for m in messages %}\n  {% if loop.last %}[{{ m.content | trim }}]{% else %}"
    "{{ m.role }}{% endif %}\n{% endfor -%}\n x",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n ~ '/' ~ messages|length }}",
    "controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macro": "{% macro say(m, sep='-') %}{{ sep }}{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ say(m, sep='+') }}{% endfor %}",
    "dict": "{% set d = dict(a=1, b='x') %}{{ d.items() | list }}{{ documents is none }}{{ bos_token }}{{ range(3) | join }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content is defined }}{{ m.get('tool_calls') }}"
    "{{ m.content[::-1] }}{% endfor %}",
    "strings": "{{ messages[0].content.split(' ')[0] }}{{ '%s-%d' | format('a', 3) }}{{ 'ab' * 3 }}{{ 2 ** 5 }}{{ 'x' + 'y' }}",
}


@pytest.mark.parametrize("name", sorted(SAME))
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name, prompt):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = reference.render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=SAME[name], add_generation_prompt=prompt, bos_token="<s>"
    )
    got = ChatTemplate(SAME[name], on="t").render(MESSAGES, tools=TOOLS, add_generation_prompt=prompt, bos_token="<s>")
    assert got == expected[0]
    assert got


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m['content']", "m['content'] | trim")])
def test_final_message_is_continued_as_transformers_does(template):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    [expected], _ = reference.render_jinja_template([MESSAGES], chat_template=template, continue_final_message=True)
    assert ChatTemplate(template, on="t").render(MESSAGES, continue_final_message=True) == expected
    assert expected.rstrip().endswith("Hello")


def test_final_message_of_parts_is_continued():
    parts = [{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "Once"}]}]
    template = ChatTemplate("{{ messages[0].content[1].text }} end", on="t")
    assert template.render(parts, continue_final_message=True) == "Once"


def test_messages_are_not_changed():
    messages = [{"role": "assistant", "content": "x", "name": None}]
    ChatTemplate(CHATML, on="t").render(messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "x", "name": None}]


@pytest.mark.parametrize("source", ["{% for %}", "{{ ", "{% if x %}", "{% unknown %}", "{{ x | nofilter }}", "{" + "{(" * 2000])
def test_wrong_syntax_is_found_at_load(source, four_parts):
    with pytest.raises(TokenizerError, match="Chat template is broken") as caught:
        ChatTemplate(source, on="t")
    four_parts(caught.value)


def test_too_long_a_template_is_refused():
    with pytest.raises(TokenizerError, match="characters"):
        ChatTemplate(" " * (chat_template.MAX_SOURCE_CHARS + 1), on="t")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].content + 3 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_template_that_refuses_or_escapes_is_a_request_error(source, four_parts):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, on="t").render(MESSAGES)
    four_parts(caught.value)


def test_message_of_raise_exception_reaches_the_user():
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", on="t").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 1000000000 }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_huge_output_is_stopped(source):
    with pytest.raises(RequestError):
        ChatTemplate(source, on="t").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_work_is_stopped(monkeypatch, source):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    with pytest.raises(RequestError, match="TimeoutError"):
        ChatTemplate(source, on="t").render(MESSAGES)


def test_objects_with_methods_do_not_reach_a_template():
    with pytest.raises(RequestError, match="a value of type object"):
        ChatTemplate(CHATML, on="t").render([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("source", "messages"),
    [("{{ messages[0].role }}", MESSAGES), (CHATML, [{"role": "assistant"}]), (CHATML, [])],
)
def test_final_message_that_cannot_be_continued_is_a_request_error(source, messages):
    with pytest.raises(RequestError):
        ChatTemplate(source, on="t").render(messages, continue_final_message=True)
