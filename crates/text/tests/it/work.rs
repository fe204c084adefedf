//! Expensive templates: an error or a text within some seconds.

use serde_json::{Value, json};
use text::{ChatTemplate, Message, Prompt, SpecialTokens};

use crate::fuzz::{hinted, timed};

fn ends(source: &str, messages: Value) {
    let source = source.to_owned();
    timed(move || {
        if let Some(template) = hinted(ChatTemplate::new(&source, SpecialTokens::default())) {
            hinted(template.render(&Prompt { messages, ..Prompt::default() }));
        }
    });
}

/// Filters and operators on `a` and `b`. The two are equal and contain 2^100 values, because each list contains another
/// list twice.
#[test]
fn shared_values_are_bounded() {
    let twice = |name: &str, each: &str| {
        let set = |value: &str| format!("{{% set {name} = {} %}}", value.replace('X', name));
        set("[1]") + &set(each).repeat(100)
    };
    let values = |each| twice("a", each) + &twice("b", each);
    for each in ["{'k': X, 'l': X}", "(X, X)"] {
        for body in ["{{ a == b }}", "{{ [a, b] | unique }}", "{{ a | pprint }}"] {
            ends(&(values(each) + body), json!([]));
        }
    }
    let lists = values("[X, X]");
    for body in [
        "{{ a != b }}",
        "{{ a < b }}",
        "{{ a == b == a }}",
        "{{ a in [b] }}",
        "{{ a not in b }}",
        "{{ a in 'text' }}",
        "{{ a in {'k': b} }}",
        "{{ a is eq b }}",
        "{{ a is in [b] }}",
        "{{ [a] | select('eq', b) }}",
        "{{ [a, b] | sort }}",
        "{{ [a, b] | max }}",
        "{{ [[a, b]] | map('unique') }}",
        "{{ [{'k': a}, {'k': b}] | groupby('k') }}",
        "{{ {'x': a, 'y': b} | dictsort(by='value') }}",
        "{{ {a: 1} }}",
        "{{ {1: 2}[a] }}",
        "{{ {1: 2}.get(a) }}",
        "{{ [a].count(b) }}",
        "{{ a }}",
        "{{ a | string }}",
        "{{ a | pprint }}",
        "{{ a | tojson(indent=2) }}",
        "{{ a ~ b }}",
        "{{ [a, b] | join }}",
        "{{ ','.join([a, b]) }}",
        "{{ '%s' | format(a) }}",
        "{{ '{}'.format(a) }}",
        "{% set x %}{{ a }}{% endset %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(a) }}",
        "{% autoescape true %}{{ a }}{% endautoescape %}",
        "{{ debug() }}",
        "{{ raise_exception(a) }}",
        "{{ a + b == b + a }}",
        "{{ a[:1] == b[:1] }}",
        "{{ a | sum(start=b) }}",
        "{% for x in a recursive %}{{ loop(x) if x is iterable }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.b = a %}",
        "{% for i in [1, 2] %}{{ loop.changed([a]) }}{% endfor %}",
    ] {
        ends(&(lists.clone() + body), json!([]));
    }
}

/// Long values, and values that one filter or operator makes long.
#[test]
fn large_values_are_bounded() {
    for body in [
        "{{ s * 100 }}",
        "{{ (1,) * 100000000 }}",
        "{{ [1] * 100000000 }}",
        "{{ [s] * 100000 }}",
        "{{ ([s] * 100000) | join }}",
        "{{ s | replace('a', s) }}",
        "{{ s.replace('', s) }}",
        "{{ m | join(s) }}",
        "{{ s.join(m) }}",
        "{{ ('\n' * 1000) | indent(100000000) }}",
        "{{ s | indent(width=1000000000000) }}",
        "{{ [1] | batch(1000000000, 0) }}",
        "{{ [1] | slice(1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '{:.1000000000f}'.format(1.0) }}",
        "{{ ('{0}' * 100000).format(s) }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{{ m | tojson(indent=100000) }}",
        "{{ s.split('a') | length }}",
        "{{ s | list | length }}",
        "{{ s.strip(s) }}",
        "{{ [1.5e300] * 1000000 }}",
        "{{ m | map('round', 1000) | list }}",
        "{{ m | map('default', s) | join }}",
        "{{ m | select('in', m) | list }}",
        "{{ m | map('replace', '1', s) | list }}",
        "{{ ([{}] * 1000000) | map(attribute=s) | list }}",
        "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
        "{{ ([s] * 1000) | sum(start='') | length }}",
        "{{ strftime_now(s) }}",
        "{{ raise_exception(s) }}",
    ] {
        let texts = "{% set s = 'ab' * 5000000 %}{% set m = range(100000) | list %}";
        ends(&(texts.to_owned() + body), json!([]));
    }
}

/// Loops that work on a long value, or make one longer, in every iteration.
#[test]
fn long_loops_are_bounded() {
    for body in [
        "{% set ns.s = ns.s ~ ns.s %}",
        "{% set ns.s = [ns.s] | join(ns.s) %}",
        "{% set ns.s = ns.s | replace('a', 'aa') %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l + [s * 100] %}",
        "{{ s | length }}",
        "{{ s[-1] }}",
        "{{ s[1:] | length }}",
        "{{ 'x' in s }}",
        "{{ s.startswith(s) }}",
        "{{ s is upper }}",
        "{% for c in s %}{% break %}{% endfor %}",
        "{{ {'k': 1}[s] }}",
        "{{ m[::-1] | first }}",
        "{{ range(100000)[99999] }}",
        "{{ range(100000) | last }}",
        "{{ m[99999:] }}",
        "{{ m == m + [] }}",
        "{{ [1] in m }}",
        "{{ m | unique | length }}",
        "{{ namespace(**{'k': 1}) }}",
        "{{ {'k': 1} | dictsort }}",
        "{{ (1,) * 100000 }}",
        "{% macro f() %}{{ i }}{{ j }}{% endmacro %}",
        "{{ g(i) }}",
        "{{ g(m) }}",
        "{% set x %}{{ s }}{% endset %}",
    ] {
        let start = "{% set s = 'a' * 100000 %}{% set m = range(100000) | list %}{% set ns = namespace(s='ab', l=[1]) %}\
                     {% macro g(x) %}{{ x | length if x is iterable }}{% endmacro %}";
        ends(&format!("{start}{}", loops(body)), json!([]));
    }
}

fn loops(body: &str) -> String {
    format!(
        "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"
    )
}

/// Long text, names, literals and blocks in the source itself.
#[test]
fn long_sources_are_bounded() {
    let text = "text ".repeat(20_000);
    let name = "x".repeat(100_000);
    let block = |at| format!("{{% block a{at} %}}{{% endblock %}}");
    for source in [
        loops(&text),
        loops(&format!("{{% set x %}}{text}{{% endset %}}")),
        loops(&format!("{{% if a.{name} %}}{{% endif %}}")),
        loops(&format!("{{{{ '{name}'[-1] }}}}")),
        loops(&format!("{{% if a['{name}'] %}}{{% endif %}}")),
        loops(&format!("{{% set x = [i, {}] %}}", "1,".repeat(4000))),
        (0..4000).map(block).collect::<String>()
            + "{% macro m() %}{% endmacro %}"
            + &loops("{{ m() }}"),
        "{{ [1] * 100000000 == [1] * 100000000 }}".to_owned(),
        format!("{{{{ [{}] | length }}}}", "(1,) * 100000000,".repeat(500)),
        format!("{{{{ [{}] | length }}}}", "100000000 * 'a',".repeat(500)),
    ] {
        ends(&source, json!([]));
    }
}

/// Nested loops over many messages.
#[test]
fn long_conversations_are_bounded() {
    let call = json!({ "function": { "name": "f", "arguments": { "a": [1, 2, 3] } } });
    let message = json!({ "role": "user", "content": "word ".repeat(100), "tool_calls": [call] });
    let messages = json!(vec![message; 3000]);
    for body in [
        "{% for n in messages %}{% if n == m %}{% endif %}{% endfor %}",
        "{{ m in messages }}",
        "{{ messages | tojson }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ messages | unique | length }}",
        "{% set ns.l = ns.l + [m] %}",
        "{% set ns.s = ns.s + m.content %}",
    ] {
        let start = "{% set ns = namespace(l=[], s='') %}";
        let source = format!("{start}{{% for m in messages %}}{body}{{% endfor %}}");
        ends(&source, messages.clone());
    }
}

/// Conversations of many messages render, even if a template visits all messages for each message.
#[test]
fn long_conversations_render() {
    let messages: Vec<_> =
        (0..1000).map(|at| Message::new(["user", "assistant"][at % 2], at.to_string())).collect();
    for body in [
        "{{ messages[-1].content }}{{ messages[loop.index0:] | length }}{{ messages | length }}",
        "{% set ns.l = ns.l + [m] %}",
        "{% set ns.s = ns.s + m.content %}",
        "{% for n in messages if n.role == 'user' %}{% if n.content == m.content %}{{ n.role }}{% endif %}{% endfor %}",
        "{{ messages[loop.index0 - 1] == m }}{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
    ] {
        let source = format!(
            "{{% set ns = namespace(l=[], s='') %}}{{% for m in messages %}}{body}{{% endfor %}}"
        );
        let template = ChatTemplate::new(&source, SpecialTokens::default()).expect(body);
        template.render(&Prompt::of(&messages)).expect(body);
    }
}

/// Operators, filters and jumps give the same results as in jinja2.
#[test]
fn checks_of_values_do_not_show() {
    for (source, text) in [
        ("{{ 2 * 3 }}{{ 2 * 3 ** 2 }}{{ 1 / 2 * 4 }}{{ -2 * -3 }}{{ 1.5 * 2 }}", "6182.063.0"),
        (
            "{{ 'ab' * 2 }}{{ 2 * 'ab' }}{{ [1] * 2 }}{{ (1,) * 2 }}{{ [1, 2][:1] * 2 }}",
            "abababab[1, 1](1, 1)[1, 1]",
        ),
        (
            "{% macro m(a, b=0) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(1, *[2]) }}{{ m(**{'a': 3}) }}",
            "121230",
        ),
        (
            "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 in [1] in [[1]] }}{{ [1] == [1] != 2 }}",
            "TrueFalseTrueTrue",
        ),
        ("{{ 'b' if 'a' == ('a' if true else 'b') else 'c' }}{{ [1][0 if true else 'a'] }}", "b1"),
        (
            "{{ [1, 2, 3][1:] }}{{ (1, 2, 3)[1:] }}{{ 'abc'[::-1] }}{{ [1] + [2] + [3] }}{{ [3, 1] | sort | reverse | list }}",
            "[2, 3](2, 3)cba[1, 2, 3][3, 1]",
        ),
        (
            "{{ {'a': 1}.items() | list }}{{ {'a': 1} | items | list }}{{ {'a': 1}.keys() | list }}",
            "[('a', 1)][('a', 1)]['a']",
        ),
        (
            "{% for a, b in [[1, 2]] | map('list') %}{{ a }}{{ b }}{% endfor %}{% for a in {'k': 1} %}{{ a }}{% endfor %}",
            "12k",
        ),
        (
            "{% for g in [{'k': 1}, {'k': 2}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
            "1121",
        ),
        (
            "{{ '%05.1f' | format(2.25) }}{{ '{:>3}'.format(1) }}{{ 'a-b'.split('-') }}{{ ' a '.strip() }}",
            "002.2  1['a', 'b']a",
        ),
        (
            "{{ [1, 2, 3] | select('gt', 1) | list }}{{ ['a'] | map('upper') | join }}{{ [1, 2].count(1) }}",
            "[2, 3]A1",
        ),
        (
            "{% autoescape true %}<{{ '<' }}{{ '<' | safe }}{{ ['<'] }}{{ none }}{% endautoescape %}",
            "<&lt;<[&#x27;&lt;&#x27;]None",
        ),
        (
            "{% for i in range(3) %}{% with %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endwith %}{% endfor %}{{ i is defined }}",
            "02False",
        ),
        (
            "{% for i in range(3) %}{% with %}{% set x %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endset %}{{ x }}{% endwith %}{% endfor %}.",
            "0.",
        ),
        (
            "{% for i in range(3) %}{% for j in range(3) %}{% with %}{% if j == 1 %}{% break %}{% endif %}{{ i }}{{ j }}{% endwith %}{% endfor %},{% endfor %}",
            "00,10,20,",
        ),
        (
            "{% for i in range(2) %}{% autoescape true %}{% if i %}{% break %}{% endif %}{% endautoescape %}{% endfor %}{{ '<' }}",
            "<",
        ),
    ] {
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect(source);
        assert_eq!(template.render(&Prompt::of(&[])).expect(source), text, "{source}");
    }
}
