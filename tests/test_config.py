"""A configuration survives both formats, and says what is wrong with one that describes nothing."""

import copy
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RotaryConfig,
    RouterConfig,
    gated_width,
    one_line_errors,
)
from armillary.errors import ConfigError, UserError
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
)

# --- Both formats --------------------------------------------------------------------------------

POSITIVE = st.floats(1e-7, 1e6)
PROBABILITIES = st.floats(0, 0.9)
SIZES = st.integers(1, 100_000)


@st.composite
def norms(draw):
    if draw(st.booleans()):
        return NormConfig(kind="layer", eps=draw(POSITIVE), bias=draw(st.booleans()))
    return NormConfig(
        eps=draw(POSITIVE),
        offset=draw(st.sampled_from([0.0, 1.0])),
        cast_before_weight=draw(st.booleans()),
    )


@st.composite
def rotaries(draw, d_rotary):
    factor, window = draw(st.floats(0.5, 64)), draw(st.integers(2, 9999))
    divisors = st.lists(st.floats(0.5, 9), min_size=d_rotary // 2, max_size=d_rotary // 2).map(
        tuple
    )
    optional = st.none() | st.floats(0.5, 2)
    rules = [
        st.just(Unscaled()),
        st.just(PositionInterpolation(factor)),
        st.just(Llama3(factor, window, 1.0, draw(st.floats(1.5, 9)))),
        st.builds(
            YaRN,
            st.just(factor),
            st.just(window),
            truncate=st.booleans(),
            explicit_attention_factor=optional,
            mscale=optional,
            mscale_all_dim=optional,
        ),
        st.builds(LongRoPE, divisors, divisors, st.just(factor), st.just(window), optional),
    ]
    if d_rotary > 2:
        rules += [st.just(NTK(factor)), st.just(DynamicNTK(factor, window))]
    return RotaryConfig(
        d_rotary=d_rotary,
        base=draw(st.floats(2, 1e7)),
        layout=draw(st.sampled_from(["half_split", "interleaved"])),
        scaling=draw(st.one_of(rules)),
    )


@st.composite
def dense(draw):
    gated = draw(st.booleans())
    activations = ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid", "identity"]
    return FeedForwardConfig(
        kind="glu" if gated else "mlp",
        d_ff=draw(SIZES),
        activation=draw(st.sampled_from(activations)),
        bias=draw(st.booleans()),
        fused=gated and draw(st.booleans()),
        limit=draw(st.none() | POSITIVE) if gated else None,
        up_offset=draw(st.sampled_from([0.0, 1.0])) if gated else 0.0,
        dropout=draw(PROBABILITIES),
    )


@st.composite
def mixtures(draw):
    groups, each = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, groups))
    shared = draw(st.none() | dense())
    return MixtureConfig(
        n_experts=groups * each,
        top_k=draw(st.integers(1, top_groups * each)),
        expert=draw(dense()),
        router=RouterConfig(
            score=draw(st.sampled_from(["softmax", "sigmoid"])),
            normalise=draw(st.booleans()),
            scale=draw(POSITIVE),
            n_groups=groups,
            top_groups=top_groups,
            bias=draw(st.booleans()),
            selection_bias=draw(st.booleans()),
        ),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
    )


@st.composite
def layers(draw):
    n_kv_heads, d_head = draw(st.integers(1, 4)), draw(st.integers(2, 20))
    placement, residual = draw(
        st.sampled_from(
            [
                ("pre", "sequential"),
                ("post", "sequential"),
                ("sandwich", "parallel"),
                ("pre", "parallel_shared_norm"),
            ]
        )
    )
    return LayerConfig(
        attention=AttentionConfig(
            n_heads=n_kv_heads * draw(st.integers(1, 4)),
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            rotary=draw(st.none() | rotaries(2 * draw(st.integers(1, d_head // 2)))),
            qkv_bias=draw(st.booleans()),
            out_bias=draw(st.booleans()),
            qk_norm=draw(st.none() | norms()),
            window=draw(st.none() | SIZES),
            soft_cap=draw(st.none() | POSITIVE),
            scale=draw(st.none() | POSITIVE),
            dropout=draw(PROBABILITIES),
        ),
        feedforward=draw(dense() | mixtures()),
        norm=draw(norms()),
        norm_placement=placement,
        residual=residual,
        dropout=draw(PROBABILITIES),
    )


@st.composite
def decoders(draw):
    return DecoderConfig(
        vocab_size=draw(SIZES),
        d_model=2 * draw(SIZES),
        max_positions=draw(SIZES),
        layers=tuple(
            layer
            for layer in draw(st.lists(layers(), min_size=1, max_size=3))
            for _ in range(draw(st.integers(1, 3)))
        ),
        final_norm=draw(st.none() | norms()),
        position_table=draw(st.sampled_from([None, "sinusoidal", "learned"])),
        tie_head=draw(st.booleans()),
        head_bias=draw(st.booleans()),
        embedding_scale=draw(POSITIVE),
        final_soft_cap=draw(st.none() | POSITIVE),
        input_dropout=draw(PROBABILITIES),
    )


@given(decoders())
def test_a_configuration_comes_back_from_json_and_yaml_as_it_was(config):
    assert DecoderConfig.from_json(config.to_json()) == config
    assert DecoderConfig.from_yaml(config.to_yaml()) == config
    assert DecoderConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_a_file_is_read_by_the_ending_of_its_name(tmp_path, suffix):
    config = DecoderConfig.from_dict(entries())
    path = tmp_path / f"small.{suffix}"
    path.write_text(config.to_json() if suffix == "json" else config.to_yaml(), encoding="utf-8")
    assert DecoderConfig.load(path) == config


def test_every_key_is_written():
    """A reader of the plain dict, such as the specification, needs no defaults."""
    written = DecoderConfig.from_dict(entries()).to_dict()
    assert set(written) == set(DecoderConfig.model_fields)
    layer = written["layers"][0]
    assert set(layer) == {*LayerConfig.model_fields, "repeat"}
    assert set(layer["attention"]) == set(AttentionConfig.model_fields)
    assert set(layer["attention"]["rotary"]) == set(RotaryConfig.model_fields)
    assert layer["attention"]["rotary"]["scaling"]["kind"] == "yarn"


def test_yaml_numbers_may_be_written_as_in_json():
    """YAML 1.1 takes 1e-5 for text; nobody who writes it means text."""
    text = json.dumps(entries()).replace('"eps": 0.001', '"eps": 1e-5')
    assert "1e-5" in text
    assert DecoderConfig.from_yaml(text).final_norm.eps == 1e-5


def entries():
    """The plain dict of a small decoder: layers 0 to 2 are one entry, layer 3 another."""
    turning = {"d_rotary": 10, "scaling": {"kind": "yarn", "factor": 4.0, "original_window": 64}}
    heads = {"n_heads": 6, "n_kv_heads": 2, "d_head": 10}
    return {
        "vocab_size": 61,
        "d_model": 40,
        "max_positions": 256,
        "layers": [
            {
                "repeat": 3,
                "attention": heads | {"rotary": turning},
                "feedforward": {"d_ff": 24},
            },
            {
                "attention": heads | {"window": 8},
                "feedforward": {"kind": "mlp", "d_ff": 36, "activation": "relu"},
            },
        ],
        "final_norm": {"eps": 0.001},
    }


# --- Repeated layers -----------------------------------------------------------------------------


def test_an_entry_with_repeat_stands_for_that_many_layers():
    config = DecoderConfig.from_dict(entries())
    assert config.n_layers == 4
    assert [layer.attention.window for layer in config.layers] == [None, None, None, 8]
    assert config.layers[0] == config.layers[2]


def test_runs_of_equal_layers_are_written_once():
    config = DecoderConfig.from_dict(entries())
    assert [layer.get("repeat", 1) for layer in config.to_dict()["layers"]] == [3, 1]
    a, b = config.layers[0], config.layers[3]
    mixed = config.model_copy(update={"layers": (a, a, b, a)})
    assert [layer.get("repeat", 1) for layer in mixed.to_dict()["layers"]] == [2, 1, 1]
    assert DecoderConfig.from_dict(mixed.to_dict()) == mixed


def test_the_entries_that_were_given_are_left_as_they_are():
    given_entries = entries()
    DecoderConfig.from_dict(given_entries)
    assert given_entries == entries()


@pytest.mark.parametrize("repeat", [0, -1, 10_001, 2.0, "2", True, None])
def test_an_impossible_repeat_is_refused(repeat):
    with pytest.raises(ConfigError, match=r"layers\.0\.repeat must be a whole number from 1 to"):
        refusing(lambda e: e["layers"][0].update(repeat=repeat))


# --- What is refused, and how --------------------------------------------------------------------


def refusing(change):
    """Change the small decoder's entries, and read them as a file called small.yaml."""
    changed = copy.deepcopy(entries())
    change(changed)
    DecoderConfig.from_dict(changed, "small.yaml")


def heads_of(entries):
    return entries["layers"][0]["attention"]


def set_heads(**values):
    return lambda e: heads_of(e).update(values)


def set_rotary(**values):
    return lambda e: heads_of(e)["rotary"].update(values)


def set_rule(**values):
    return lambda e: heads_of(e)["rotary"]["scaling"].update(values)


def set_layer(**values):
    return lambda e: e["layers"][0].update(values)


def set_mixture(**values):
    return set_layer(
        feedforward={"kind": "moe", "n_experts": 6, "top_k": 2, "expert": {"d_ff": 8}} | values
    )


FIRST = r"layers\.0\."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_heads(n_head=4), FIRST + r"attention: unknown key 'n_head' \(did you mean 'n_heads'"),
        (lambda e: e.update({"vocab-size": 4}), "unknown key 'vocab-size' .*'vocab_size'"),
        (lambda e: e.update(n_heads=4), r"unknown key 'n_heads' \(it belongs under 'attention'\)"),
        (lambda e: e.update(eps=1e-5), r"unknown key 'eps' \(it belongs under 'norm'\)"),
        (set_heads(factor=2.0), r"attention: unknown key 'factor' \(it belongs under 'scaling'\)"),
        (set_heads(d_model=8), r"unknown key 'd_model' \(it belongs at the top level\)"),
        (set_rule(facto=2.0), r"rotary\.scaling: unknown key 'facto' \(did you mean 'factor'\?\)"),
        (set_layer(repeats=2), r"layers\.0: unknown key 'repeats' \(did you mean 'repeat'\?\)"),
        (
            set_mixture(router={"skore": "sigmoid"}),
            FIRST + r"feedforward\.router: unknown key 'skore' \(did you mean 'score'\?\)",
        ),
        (
            set_mixture(expert={"d_ff": 8, "d_fff": 8}),
            FIRST + r"feedforward\.expert: unknown key 'd_fff' \(did you mean 'd_ff'\?\)",
        ),
        (
            set_layer(feedforward={"d_ff": 8, "top_k": 2}),
            r"unknown key 'top_k' \(it belongs under a 'feedforward' of kind 'moe'\)",
        ),
        (set_mixture(d_ff=8), r"feedforward: unknown key 'd_ff' \(it belongs under 'feedforward'"),
        (lambda e: e.update(max_lenght=512), r"unknown key 'max_lenght' \(the nearest is '"),
    ],
)
def test_an_unknown_key_names_the_nearest_or_its_place(change, message):
    """Case 30."""
    with pytest.raises(ConfigError, match=rf"^small\.yaml: .*{message}"):
        refusing(change)


def test_a_misspelt_key_is_told_before_the_key_that_is_missing_for_it():
    def misspell(entries):
        entries["vocab_siz"] = entries.pop("vocab_size")

    with pytest.raises(ConfigError, match="'vocab_siz' .*'vocab_size'.*; and 1 more problem$"):
        refusing(misspell)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_heads(n_heads="6"), FIRST + "attention.n_heads must be a valid integer, found '6'"),
        (set_heads(n_heads=3.5), FIRST + "attention.n_heads must be a valid integer, found 3.5"),
        (set_heads(n_heads=6.0), FIRST + "attention.n_heads must be a valid integer, found 6.0"),
        (set_heads(n_heads=True), FIRST + "attention.n_heads must be a valid integer, found True"),
        (set_heads(qkv_bias=1), "qkv_bias must be a valid boolean, found 1"),
        (set_heads(scale="0.1"), "scale must be a valid number, found '0.1'"),
        (set_heads(dropout=True), "dropout must be a valid number, found True"),
        (set_rotary(base="3e-4"), "rotary.base must be a valid number, found '3e-4'"),
        (set_rule(factor="4"), r"rotary\.scaling\.factor must be a valid number, found '4'"),
        (set_rule(original_window=4.5), "original_window must be a valid integer, found 4.5"),
        (lambda e: e.update(layers=5), "layers must be a valid array, found 5"),
        (lambda e: e["layers"].append(7), r"layers\.2 must be an object, found 7"),
        (lambda e: e.update(d_model=None), "d_model must be a valid integer, found None"),
        (lambda e: e.update(d_model=[40]), "d_model must be a valid integer, found list"),
    ],
)
def test_types_are_strict(change, message):
    with pytest.raises(ConfigError, match=rf"^small\.yaml: .*{message}$"):
        refusing(change)


def test_a_whole_number_counts_where_a_fraction_is_allowed():
    changed = entries()
    changed["embedding_scale"] = 6
    assert DecoderConfig.from_dict(changed).embedding_scale == 6.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_heads(n_kv_heads=4), "n_heads 6 is no multiple of n_kv_heads 4"),
        (set_rotary(d_rotary=12), "d_rotary 12 is more than a head's width d_head 10"),
        (set_rotary(d_rotary=7), "d_rotary is 7; channels turn in pairs, so make it even"),
        (set_rotary(d_rotary=10**12), "d_rotary must be less than or equal to 1000000"),
        (set_rotary(base=1.0), "base must be greater than 1, found 1.0"),
        (set_heads(window=0), "window must be greater than or equal to 1, found 0"),
        (set_heads(soft_cap=0.0), "soft_cap must be greater than 0, found 0.0"),
        (set_heads(dropout=1.0), "dropout must be less than 1, found 1.0"),
        (lambda e: e.update(vocab_size=0), "vocab_size must be greater than or equal to 1"),
        (lambda e: e.update(layers=[]), "layers must have at least 1 entry"),
        (
            lambda e: e.update(position_table="sinusoidal", d_model=41),
            "a sinusoidal table needs an even d_model, not 41",
        ),
        (
            lambda e: e["final_norm"].update(eps=float("nan")),
            r"final_norm\.eps must be a finite number, found nan",
        ),
        (lambda e: e["final_norm"].update(bias=True), "final_norm: an rms norm has no bias"),
        (
            lambda e: e["final_norm"].update(kind="layer", offset=1.0),
            "a layer norm takes no offset, found 1.0",
        ),
        (
            set_layer(residual="both"),
            "residual must be 'sequential', 'parallel' or .*, found 'both'",
        ),
        (
            set_layer(residual="parallel_shared_norm", norm_placement="post"),
            "norm_placement must be pre, not post",
        ),
        (
            lambda e: e["layers"][1]["feedforward"].update(fused=True),
            r"layers\.1\.feedforward: an mlp has no gate to fuse",
        ),
        (
            lambda e: e["layers"][1]["feedforward"].update(limit=7.0),
            r"layers\.1\.feedforward: limit and up_offset are of a gated unit",
        ),
        (
            set_layer(feedforward={"kind": "mow", "d_ff": 8}),
            FIRST + r"feedforward\.kind 'mow' is not known; known are 'glu', 'mlp', 'moe'",
        ),
        (set_mixture(top_k=7), FIRST + "feedforward: top_k 7 of 6 n_experts"),
        (set_rule(kind="yrn"), r"scaling\.kind 'yrn' is not known; known are 'default', 'linear'"),
        (set_rule(factor=-1.0), r"rotary\.scaling: YaRN: factor is -1.0; it must be a positive"),
        (
            set_rotary(scaling={"kind": "linear"}),
            r"attention\.rotary\.scaling\.factor is missing",
        ),
        (set_rotary(scaling={"factor": 2.0}), r"rotary\.scaling\.kind is missing"),
        (
            set_rotary(scaling={"kind": "ntk", "factor": 1e300}),
            "too large for a number; lower the factor",
        ),
        (
            set_rotary(scaling={"kind": "linear", "factor": 1e-320}),
            "the scaling makes frequencies too large for a number",
        ),
        (
            set_rotary(
                scaling={
                    "kind": "longrope",
                    "factor": 4.0,
                    "original_window": 64,
                    "short_factor": [1.0, 2.0],
                    "long_factor": [1.0, 2.0],
                }
            ),
            "2 factors for 5 channel pairs",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(change, message):
    with pytest.raises(ConfigError, match=rf"^small\.yaml: [^\n]*{message}[^\n]*$"):
        refusing(change)


def test_a_mistake_in_a_repeated_layer_is_told_once_under_its_number_in_the_file():
    """Layer 3 of the decoder is entry 1 of the file; entry 0 stands for three."""
    with pytest.raises(ConfigError, match=r"^small\.yaml: layers\.0\.attention\.n_heads [^;]*$"):
        refusing(set_heads(n_heads="6"))
    with pytest.raises(ConfigError, match=r"^small\.yaml: layers\.1\.feedforward\.d_ff [^;]*$"):
        refusing(lambda e: e["layers"][1]["feedforward"].update(d_ff="36"))


def test_a_mistake_is_not_counted_again_for_the_part_around_it():
    """That no layer is left which could be read is not a second mistake."""

    def spoil_the_only_layer(entries):
        del entries["layers"][1]
        heads_of(entries).update(n_heads="6")

    with pytest.raises(ConfigError, match=r"^small\.yaml: layers\.0\.attention\.n_heads [^;]*$"):
        refusing(spoil_the_only_layer)


def test_several_mistakes_are_counted():
    def spoil(entries):
        entries.update(vocab_size=0, d_model=-1, max_positions=0)

    with pytest.raises(ConfigError, match=r"vocab_size .* found 0; and 2 more problems$"):
        refusing(spoil)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a configuration is a mapping of names to values"),
        ('{"d_model": 8, "d_model": 9}', "key 'd_model' stands there twice"),
        ('{"layers": [{"repeat": 2, "repeat": 3}]}', "key 'repeat' stands there twice"),
    ],
)
def test_what_is_no_json_mapping_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=rf"^small\.json: [^\n]*{message}[^\n]*$"):
        DecoderConfig.from_json(text, "small.json")


# Each line stands for nine of the one before: 9^9 values in the end.
BOMB = "a: &l0 [x]\n" + "".join(f"a{i}: &l{i} [{f'*l{i - 1}, ' * 9}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a configuration is a mapping of names to values"),
        ("layers: [", "not YAML"),
        ("[" * 2000, "not YAML"),
        ("d_model: 2026-13-45", "not YAML: month must be in 1..12"),
        ("d_model: 8\nd_model: 9", "key 'd_model' is there twice"),
        ("1: 2", "a configuration is a mapping of names to values"),
        ("a: &a [*a]", "not plain names and values"),
        (BOMB, "not YAML: it has more than 200000 values"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
        ("d_model: " + "9" * 5000, "not YAML"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=rf"^small\.yaml: [^\n]*{message}[^\n]*$"):
        DecoderConfig.from_yaml(text, "small.yaml")


def test_yaml_aliases_may_name_a_layer_once():
    """Also as often as a large model has layers, each with some thirty values."""
    layer = entries()["layers"][0]
    text = yaml.safe_dump({**entries(), "layers": [layer] * 1000})
    assert text.count("*") == 999
    assert DecoderConfig.from_yaml(text).n_layers == 1000 * layer.get("repeat", 1)


def test_a_file_that_cannot_be_read_is_one_line_with_its_name_once(tmp_path):
    cases = {
        "absent.yaml": (None, "cannot be read: No such file or directory"),
        "latin.yaml": (b"d_model: \xff", "byte 9 is no valid UTF-8"),
        "large.yaml": (b"#" * (1 << 20) + b"\n", "has 1048577 bytes; at most 1048576 are read"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            DecoderConfig.load(path)
        assert str(caught.value) == f"{path}: {message}"


def test_a_yaml_date_is_a_wrong_type_like_any_other():
    text = yaml.safe_dump(entries()).replace("d_model: 40", "d_model: 2026-11-11")
    with pytest.raises(ConfigError, match="d_model must be a valid integer, found '2026-11-11'"):
        DecoderConfig.from_yaml(text)


def test_yaml_may_merge_and_then_override():
    """A key given again after a merge is what merging is for, not a key given twice."""
    text = yaml.safe_dump(entries())
    merging = text.replace("eps: 0.001", "<<: {eps: 1.0, kind: layer}\n  eps: 0.25")
    assert merging != text
    assert DecoderConfig.from_yaml(merging).final_norm == NormConfig(kind="layer", eps=0.25)


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "small.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"small\.toml: .* ends in \.json, \.yaml or \.yml"):
        DecoderConfig.load(tmp_path / "small.toml")


def test_a_configuration_cannot_be_changed_in_place():
    config = DecoderConfig.from_dict(entries())
    with pytest.raises(ValueError, match="frozen"):
        config.d_model = 8


def test_one_line_errors_turn_a_direct_construction_into_a_users_error():
    """For readers of other files: hidden 64 on 8 heads, 3 of them key/value heads."""
    impossible = pytest.raises(UserError, match=r"^config\.json: n_heads 8 is no multiple .* 3$")
    with impossible, one_line_errors("config.json"):
        AttentionConfig(n_heads=8, n_kv_heads=3, d_head=8)
    unknown = pytest.raises(UserError, match=r"^config\.json: unknown key 'n_head' .*'n_heads'")
    with unknown, one_line_errors("config.json"):
        AttentionConfig(n_heads=8, n_kv_heads=2, d_head=8, n_head=8)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"n_kv_heads": 4}, "AttentionConfig: n_heads 6 is no multiple of n_kv_heads 4"),
        ({"d_head": 8}, "AttentionConfig: d_rotary 10 is more than a head's width d_head 8"),
        ({"windw": 4}, "AttentionConfig: unknown key 'windw' .did you mean 'window'"),
        ({"window": 0}, "AttentionConfig: window must be greater than or equal to 1, found 0"),
    ],
)
def test_a_changed_copy_is_checked_as_a_new_one_is(update, message):
    attention = AttentionConfig(
        n_heads=6, n_kv_heads=2, d_head=10, rotary=RotaryConfig(d_rotary=10)
    )
    changed = attention.model_copy(update={"window": 4})
    assert (changed.window, changed.rotary) == (4, attention.rotary)
    assert attention.model_copy() == attention
    with pytest.raises(ConfigError, match=message):
        attention.model_copy(update=update)


# --- Builders and budgets ------------------------------------------------------------------------


def test_the_uniform_stack_fills_in_what_is_left_out():
    config = DecoderConfig.uniform(
        vocab_size=61, d_model=48, n_layers=3, n_heads=6, max_positions=64
    )
    layer = config.layers[0]
    assert config.n_layers == 3
    assert (layer.attention.n_kv_heads, layer.attention.d_head) == (6, 8)
    assert layer.attention.rotary == RotaryConfig(d_rotary=8)
    assert layer.attention.score_scale == 8**-0.5
    assert layer.feedforward == FeedForwardConfig(d_ff=128)  # 2 · 4 · 48 / 3
    assert config.final_norm == layer.norm == NormConfig()
    assert config.position_table is None


def test_the_uniform_stack_takes_what_is_given():
    rule = Llama3(8.0, 64)
    config = DecoderConfig.uniform(
        vocab_size=61,
        d_model=40,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_head=10,
        d_ff=24,
        max_positions=512,
        rope_base=5e5,
        rope_scaling=rule,
        rope_layout="interleaved",
        eps=1e-6,
        tie_head=True,
    )
    attention = config.layers[1].attention
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head) == (6, 2, 10)
    assert attention.rotary == RotaryConfig(
        d_rotary=10, base=5e5, layout="interleaved", scaling=rule
    )
    assert config.layers[1].feedforward.d_ff == 24
    assert config.final_norm.eps == config.layers[0].norm.eps == 1e-6
    assert config.tie_head


def test_the_baseline_has_the_parts_of_2017():
    config = DecoderConfig.baseline_2017(
        vocab_size=61, d_model=40, n_layers=2, n_heads=5, max_positions=64, dropout=0.1
    )
    layer = config.layers[0]
    assert config.position_table == "sinusoidal"
    assert layer.attention.rotary is None
    assert layer.attention.qkv_bias
    assert layer.attention.out_bias
    assert layer.norm == config.final_norm == NormConfig(kind="layer", bias=True)
    assert layer.feedforward == FeedForwardConfig(
        kind="mlp", d_ff=160, activation="relu", bias=True
    )
    assert config.input_dropout == layer.dropout == layer.attention.dropout == 0.1


@pytest.mark.parametrize(
    ("builder", "sizes", "message"),
    [
        ("uniform", {"n_heads": 6}, "d_model 40 is no multiple of n_heads 6"),
        ("uniform", {"n_heads": 0}, "d_model 40 is no multiple of n_heads 0"),
        ("baseline_2017", {"n_heads": 6}, "d_model 40 is no multiple of n_heads 6"),
        ("uniform", {"n_kv_heads": 3}, "n_heads 5 is no multiple of n_kv_heads 3"),
        ("uniform", {"n_layers": 0}, "layers must have at least 1 entry"),
        ("uniform", {"vocab_size": 0}, "vocab_size must be greater than or equal to 1, found 0"),
        ("uniform", {"d_head": 7}, "d_rotary is 7"),
        ("baseline_2017", {"dropout": 1.5}, "dropout must be less than 1, found 1.5"),
    ],
)
def test_builders_refuse_impossible_sizes_in_one_line(builder, sizes, message):
    usual = {"vocab_size": 61, "d_model": 40, "n_layers": 2, "n_heads": 5, "max_positions": 64}
    with pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$"):
        getattr(DecoderConfig, builder)(**(usual | sizes))


@pytest.mark.parametrize(
    ("d_ff", "multiple", "width"),
    [(24, 1, 16), (24, 8, 16), (24, 32, 32), (25, 1, 17), (4096, 256, 2816), (1, 1, 1)],
)
def test_a_gated_width_has_the_budget_of_a_plain_one_rounded_up(d_ff, multiple, width):
    assert gated_width(d_ff, multiple) == width


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_a_gated_width_is_the_smallest_multiple_that_keeps_the_budget(d_ff, multiple):
    """spec §6: 3·d·f against 2·d·d_ff; 24 and 16 both give 384 at d = 8."""
    width = gated_width(d_ff, multiple)
    assert width % multiple == 0
    assert 3 * (width - multiple) < 2 * d_ff <= 3 * width
    assert 3 * 8 * gated_width(24) == 2 * 8 * 24 == 384


@pytest.mark.parametrize(("d_ff", "multiple"), [(0, 1), (24, 0), (-3, 8)])
def test_a_width_below_one_is_refused(d_ff, multiple):
    with pytest.raises(ValueError, match=f"d_ff {d_ff} and multiple {multiple}"):
        gated_width(d_ff, multiple)
