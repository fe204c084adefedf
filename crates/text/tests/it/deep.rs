//! Nested templates: an error or a text, and never a stack overflow.

use serde_json::json;
use text::{ChatTemplate, Error, Prompt, SpecialTokens};

fn render(source: &str) -> Result<String, Error> {
    let template = ChatTemplate::new(source, SpecialTokens::default())?;
    template.render(&Prompt { messages: json!([]), ..Prompt::default() })
}

/// Renders sources of different sizes, from few pieces to more than the limit.
fn grown(source: impl Fn(usize) -> String) {
    for pieces in [200, 2_000, 4_000, 20_000, 130_000] {
        if let Err(why) = render(&source(pieces)) {
            let why = why.to_string();
            assert!(why.len() < 1000 && why.matches("\nhint: ").count() == 1, "{why}");
        }
    }
}

#[test]
fn long_chains_of_operators_are_bounded() {
    for (start, piece, end) in [
        ("{{ 1", "+1", " }}"),
        ("{{ x", "+1", " }}"),
        ("{{ x", "~x", " }}"),
        ("{{ 2", "**1", " }}"),
        ("{{ x", " and x", " }}"),
        ("{{ x", " or x", " }}"),
        ("{{ 1", "<2", " }}"),
        ("{{ x", "|d", " }}"),
        ("{{ x", ".a", " }}"),
        ("{{ x", "[0]", " }}"),
        ("{{ x", "()", " }}"),
        ("{{ x", " is x", " }}"),
        ("{{ ", "-", "1 }}"),
        ("{{ ", "not ", "x }}"),
        ("{{ ", "(", ""),
        ("{{ ", "[", ""),
        ("{{ ", "{1:", ""),
        ("{{ x", " if x", " }}"),
        ("{{ x", " if x else x", " }}"),
        ("{% if x %}", "{% elif x %}", "{% endif %}"),
        ("", "{% if x %}", ""),
        ("", "{% for x in y %}", ""),
        ("{% set ", "(", ""),
        ("{% set x", ".a", " = 1 %}"),
        ("{% for ", "(", ""),
        ("{% set x = 1", ",1", " %}"),
        ("{% macro m(a", ",a", ") %}{% endmacro %}"),
    ] {
        grown(|pieces| format!("{start}{}{end}", piece.repeat(pieces)));
    }
    grown(|n| format!("{{{{ {}1{} }}}}", "(".repeat(n / 2), ")".repeat(n / 2)));
    grown(|n| format!("{{{{ {}1{} }}}}", "[".repeat(n / 2), "]".repeat(n / 2)));
    assert_eq!(render(&format!("{{{{ 1{} }}}}", "+1".repeat(1000))).expect("short"), "1001");
}

/// A namespace is the only mutable value, so only it could contain itself.
#[test]
fn no_value_holds_itself() {
    for (sets, name) in [
        ("{% set ns = namespace() %}{% set ns.a = ns %}", "ns"),
        ("{% set ns = namespace() %}{% set ns.a = [ns] %}", "ns"),
        ("{% set ns = namespace() %}{% set ns.a = {'b': (1, ns)} %}", "ns"),
        ("{% set ns = namespace() %}{%- set ns.a, b = ns, 1 -%}", "ns"),
        ("{% set ns = namespace() %}{% set (b, (ns.a)) = 1, ns %}", "ns"),
        ("{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}", "a"),
        ("{% set a = namespace() %}{% set a.b = [a]|map('list') %}", "a"),
        ("{% set a = namespace() %}{% set a.b | default([a]) %}{% endset %}", "a"),
        ("{% set a = namespace() %}{% macro m() %}{% set a.b = a %}{% endmacro %}{{ m() }}", "a"),
        ("{% set a = namespace() %}{% for x in [1] %}{% set a.l = loop %}{% endfor %}", "a"),
    ] {
        for print in ["N", "N | tojson", "N | string", "N ~ ''", "[N] | join"] {
            let source = format!("{sets}{{{{ {} }}}}", print.replace('N', name));
            match render(&source) {
                Ok(text) => assert!(text.len() < 100, "{source}: {text}"),
                Err(why) => {
                    assert!(why.to_string().contains("is not supported"), "{source}: {why}")
                }
            }
        }
    }
    let plain =
        "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.x = 1, [2] %}{{ b }}";
    assert_eq!(render(plain).expect("b may hold a"), "{'a': {'x': (1, [2])}}");
}

#[test]
fn deep_values_are_bounded() {
    let loops = |body: &str| {
        format!(
            "{{% set ns = namespace(a=[]) %}}{{% for i in range(20) %}}{{% for i in range(100) %}}\
             {body}{{% endfor %}}{{% endfor %}}"
        )
    };
    let recursive = |call: &str, value: &str| {
        format!(
            "{{% macro m(x, n) %}}{{% if n %}}{{{{ {call} }}}}{{% else %}}{{{{ {value} }}}}{{% endif %}}{{% endmacro %}}{{{{ m([], 90) }}}}"
        )
    };
    let batches = "x".to_owned() + &"|batch(1)".repeat(1_500);
    for print in ["x", "x | tojson", "x | string", "x ~ ''", "[x, x] | join"] {
        let of = |name: &str| format!("{{{{ {} }}}}", print.replace('x', name));
        for body in [
            "{% set ns.a = [ns.a] %}",
            "{% set ns.a = {'a': ns.a} %}",
            "{% set ns.a = (ns.a, 1) %}",
            "{%- set ns.a = ns.a | batch(1) -%}",
            "{% set ns.a = ns.a[0:] %}",
            "{% set ns.a = [ns.a[0:]] %}",
            "{% set ns.a = [1] + ns.a %}",
            "{% set ns.a = ns.a | chain([1]) %}",
            "{% set ns.a = ns.a | reverse %}",
            "{% set ns.a = ns.a * 1 %}",
            "{% set ns.a = {'a': ns.a} | items %}",
            "{% set ns = namespace(a=ns) %}",
        ] {
            let quick = match render(&(loops(body) + &of("ns.a"))) {
                Ok(text) => text.len() < 20_000,
                Err(why) => why.to_string().contains("deeper than 256"),
            };
            assert!(quick, "{body} {print}");
        }
        for source in [
            recursive("m([x], n - 1)", print),
            recursive(&format!("m({batches}, n - 1)"), print),
            format!("{{% set x = [] %}}{}{}", "{%set x=[x]%}".repeat(9_000), of("x")),
            format!("{{% set x = [] %}}{}{}", "{%set x=[[[[[[x]]]]]]%}".repeat(5_000), of("x")),
            format!("{{% set x = [] %}}{}{}", "{%set x=namespace(a=x)%}".repeat(5_000), of("x")),
            format!("{{% set x = [] %}}{}{}", "{%set x=x[0:]%}".repeat(1_000), of("x")),
            format!("{{% set x = [] %}}{{% set x = {batches} %}}{}", of("x")),
            format!(
                "{{% for a in [1] recursive %}}{{% set x = {batches} %}}{}{{{{ loop([1]) }}}}{{% endfor %}}",
                of("x")
            ),
            format!(
                "{{% for x in [1] recursive %}}{}{{{{ loop({batches}) }}}}{{% endfor %}}",
                of("x")
            ),
        ] {
            render(&source).map(|text| text.len()).map_err(|why| why.to_string()).ok();
        }
    }
}

/// Text of a value that contains the same list twice at each level.
#[test]
fn long_texts_are_bounded() {
    let twice =
        "{% set x = 'abcdefgh' %}".to_owned() + &"{% set x = [x, x] %}".repeat(60) + "{{ x }}";
    let why = render(&twice).expect_err("2^60 texts").to_string();
    assert!(why.contains("take more than 67108864 steps"), "{why}");
}

/// The checks do not change the results of valid templates.
#[test]
fn checks_do_not_show() {
    for (source, text) in [
        (
            "a\n  {%- set ns = namespace(x=1) -%}\n  {%- set ns.x = ns.x + 1 -%}\n b{{ ns.x }}",
            "ab2",
        ),
        (
            "{% macro m(a, b=[1, 2]) %}\n  {{ a }}{{ b }}\n{% endmacro %}\n{{ m(1) }}|{{ m(b=2, a=3) }}",
            "  1[1, 2]\n|  32\n",
        ),
        ("{% macro m(a) -%}\n  {{ a is defined }}\n{%- endmacro %}{{ m() }}", "False"),
        (
            "{% macro m() %}{{ caller(1, b=2) }}{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}",
            "12",
        ),
        ("{% for k, v in {'a': [1]}.items() recursive %}\n{{ k }}{{ v }}\n{% endfor %}", "a[1]\n"),
        (
            "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }},{% endfor %}",
            "1,2,3,,,",
        ),
        ("{% for x in range(4) if x is odd %}{{ loop.index }}{{ x }}{% endfor %}", "1123"),
        ("{% for x in ([1] if true else [2]) %}{{ x }}{% else %}none{% endfor %}", "1"),
        ("{% set x %}{% set y = 1 %}{{ y }}{% endset %}{{ x }}", "1"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{%- generation -%}\n b\n{%-endgeneration-%}\n c", "bc"),
        (
            "{% raw %}{% generation %}{% set ns.x = 1 %}{% endraw %}",
            "{% generation %}{% set ns.x = 1 %}",
        ),
        ("{% set generation = 1 %}{{ generation }}{{ add_generation_prompt }}", "1False"),
        ("{{ '{% generation %}' }}{# {% generation %} #}", "{% generation %}"),
    ] {
        assert_eq!(render(source).expect(source), text, "{source}");
    }
    for source in
        ["{% generations %}", "{%", "{% generation", "{% set ns.x = %}", "{% endgeneration %}"]
    {
        let why = render(source).expect_err(source);
        assert!(matches!(why, Error::Template { .. }), "{why}");
    }
    for source in [
        "{% include 'default' %}",
        "{% extends 'default' %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ] {
        let why = render(source).expect_err(source).to_string();
        assert!(why.contains("is not supported"), "{why}");
    }
}
