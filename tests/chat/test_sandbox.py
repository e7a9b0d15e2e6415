import re

import pytest

from armillary.chat.sandbox import compile_template, render
from armillary.errors import UserError

VARIABLES = {"messages": [{"role": "user", "content": "hello"}]}


def rendered(source):
    return render(compile_template(source), VARIABLES)


def refused(source, *words):
    with pytest.raises(UserError) as caught:
        rendered(source)
    message = str(caught.value)
    assert message.startswith("chat template: ")
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_lines_of_statements_leave_nothing():
    """cases.md 102: trim_blocks and lstrip_blocks are on in the reference."""
    source = "{% set a = 1 %}\n  {% if a %}\nyes\n  {% endif %}\n{# note #}\n{{ a }}\n\n"
    assert rendered(source) == "yes\n1\n"


def test_a_loop_can_be_left():
    assert (
        rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )


def test_the_tag_generation_is_a_block():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}b{{ x }}"
    assert rendered(source) == "a2b1"


def test_functions_of_the_reference_are_there():
    assert re.fullmatch(r"\d{4}", rendered("{{ strftime_now('%Y') }}"))
    assert (
        rendered("{{ dict(a=1) }}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}")
        == "{'a': 1}2"
    )
    assert rendered("{{ [1, 2]|tojson(indent=1) }}") == "[\n 1,\n 2\n]"
    assert rendered("{{ ['a', 1]|join('-') }}{{ 'b' ~ none ~ 2 }}{{ 'x%s' % 3 }}") == "a-1bNone2x3"


def test_a_template_can_refuse():
    refused(
        "{{ 1 }}\n{{ raise_exception('roles\nmust alternate') }}", "line 2", "roles must alternate"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ (1).to_bytes(9, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ lipsum() }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_python_is_out_of_reach(source):
    assert re.search("is refused|is undefined|no loader", refused(source))


DOUBLING = (
    "{{% set n = namespace(s='ab') %}}{{% for i in range(99) %}}{{% set n.s = {} %}}{{% endfor %}}"
)
NESTING = (
    "{{% set n = namespace(s=[1]) %}}{{% for i in range(99) %}}{{% set n.s = {} %}}{{% endfor %}}"
    "{{{{ n.s }}}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in 'x' * 90000 %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{{ range(90000)|list }}{% endfor %}",
        "{% for i in range(90000) %}" + "{% if 0 %}{% endif %}" * 20_000 + "{% endfor %}",
        "{% for i in range(90000) %}" + "y" * 1000 + "{% endfor %}",
        "{% set x %}{% for i in range(90000) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**10**10**10 }}",
        "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        *map(
            DOUBLING.format,
            [
                "n.s + n.s",
                "n.s ~ n.s",
                "[n.s, n.s]|join",
                "['', '', '']|join(n.s)",
                "n.s.join('abc')",
                "n.s.replace('', n.s)",
                "n.s|replace('a', n.s)",
                "'%s%s' % (n.s, n.s)",
                "'%s%s'|format(n.s, n.s)",
                "'{0}{0}'.format(n.s)",
                "('a\n' * 99)|indent(n.s)",
                "[n.s, n.s]|tojson",
                "[n.s, n.s]|string",
            ],
        ),
        "{% set x = ('ab' * 2000000) %}{{ x }}{{ x }}",
        *map(
            NESTING.format,
            ["[n.s, n.s]", "{'a': n.s, 'b': n.s}", "(n.s, n.s)", "dict(a=n.s, b=n.s)"],
        ),
        "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|indent(10**9, true) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * (1 << 21),
    ],
)
def test_what_a_template_costs_is_bounded(source):
    """cases.md 102: each would take hours, or all memory."""
    assert re.search("more than|at most|too deep|not known", refused(source))


def test_a_budget_is_a_renderings_own():
    template = compile_template("{% for i in range(90000) %}{{ i }}{% endfor %}")
    for _ in range(6):  # together more than one budget
        assert render(template, {}).endswith("89999")


def test_long_chats_fit():
    """A thousand messages of a thousand characters, in a template that gathers its text."""
    messages = [{"role": "user", "content": "x" * 1000}] * 1000
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}"
        "{% if m.role in ['user', 'tool'] %}{% set n.text = m.content|trim %}{% endif %}"
        "<|{{ m.role }}|>{{ n.text ~ '\n' }}{% endfor %}"
    )
    assert len(render(compile_template(source), {"messages": messages})) == 1000 * 1009


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", ["line 2", "Expected an expression"]),
        ("{{ 'a'|nofilter }}", ["line 1", "nofilter"]),
        ("\n\n{{ messages[0].foo.bar }}", ["line 3", "foo"]),
        ("{{ 1 + 'a' }}", ["line 1", "TypeError"]),
        ("{% for %}", ["line 1"]),
    ],
)
def test_faults_name_their_line(source, words):
    refused(source, *words)


def test_a_template_is_a_string():
    with pytest.raises(UserError, match="must be a string, not dict"):
        compile_template({"default": "x"})
