"""The specification itself: worked values, invariants, and the cache against the whole pass.

Nothing here comes from the library but configurations: numbers are worked by hand, by closed form,
or by a second, slower way.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from armillary import reference
from armillary.config import DecoderConfig
from support.models import ORIGINAL_WINDOW, SCALINGS, VARIANTS
from support.random_weights import parameter_shapes, random_weights

EXACT = 1e-12


def one_head(vector):
    """A vector as (B, h, T, d_h) of one row, head and token."""
    return np.asarray(vector, dtype=np.float64)[None, None, None, :]


def turned(vector, position, theta, layout="interleaved"):
    angles = position * np.asarray(theta, dtype=np.float64)[None, None, :]
    return reference.rotate(one_head(vector), angles, layout)[0, 0, 0]


def drawn_tokens(rows, length, seed=1):
    return np.random.default_rng(seed).integers(0, 61, (rows, length))


# --- §2 Rotary positions -------------------------------------------------------------------------


def test_two_dimensions_turned_by_quarters():
    q, k, theta = (1, 2), (2, 1), [math.pi / 2]
    np.testing.assert_allclose(turned(q, 1, theta), (-2, 1), atol=EXACT)
    np.testing.assert_allclose(turned(k, 2, theta), (-2, -1), atol=EXACT)
    for m, n in ((1, 2), (4, 5)):
        q_turned, k_turned = turned(q, m, theta), turned(k, n, theta)
        assert q_turned @ k_turned == pytest.approx(3, abs=EXACT)
        assert q_turned @ k_turned / math.sqrt(2) == pytest.approx(2.1213, abs=5e-5)
        assert q_turned @ q_turned == pytest.approx(5, abs=EXACT)
        assert k_turned @ k_turned == pytest.approx(5, abs=EXACT)
    assert np.dot(q, k) == 4


FOUR = {"base": 10000.0, "d_rotary": 4, "scaling": {"kind": "default"}}


def test_four_dimensions_in_adjacent_pairs():
    theta = reference.rotary_frequencies(FOUR, 1)
    np.testing.assert_allclose(theta, [1, 0.01], rtol=1e-15)
    q, k = (1, 2, 3, 4), (2, 1, 0, 1)
    q_turned, k_turned = turned(q, 1, theta), turned(k, 3, theta)
    np.testing.assert_allclose(q_turned, (-1.142640, 1.922076, 2.959851, 4.029800), atol=5e-7)
    np.testing.assert_allclose(k_turned, (-2.121105, -0.707752, -0.029996, 0.999550), atol=5e-7)
    assert q_turned @ k_turned == pytest.approx(5.002509, abs=5e-7)
    assert q_turned @ k_turned / 2 == pytest.approx(2.501254, abs=5e-7)
    assert np.dot(q, turned(k, 2, theta)) == pytest.approx(q_turned @ k_turned, abs=EXACT)


def test_half_split_needs_permuted_channels():
    theta = reference.rotary_frequencies(FOUR, 1)
    q, k, order = np.array((1, 2, 3, 4)), np.array((2, 1, 0, 1)), [0, 2, 1, 3]

    def product(q, k):
        return turned(q, 1, theta, "half_split") @ turned(k, 3, theta, "half_split")

    assert product(q, k) == pytest.approx(10.662288, abs=5e-7)
    assert product(q[order], k[order]) == pytest.approx(5.002509, abs=5e-7)


VECTORS = arrays.arrays(np.float64, 6, elements=st.floats(-1, 1))
POSITIONS = st.integers(0, 200)
LAYOUTS = st.sampled_from(["interleaved", "half_split"])
THETA_6 = 100.0 ** (-2 * np.arange(3) / 6)


@given(VECTORS, st.integers(-1000, 100_000), LAYOUTS)
def test_rotation_keeps_length(q, m, layout):
    assert np.linalg.norm(turned(q, m, THETA_6, layout)) == pytest.approx(
        np.linalg.norm(q), abs=EXACT
    )


@given(VECTORS, VECTORS, POSITIONS, POSITIONS, st.integers(-200, 200), LAYOUTS)
def test_a_shift_of_both_positions_leaves_the_product(q, k, m, n, shift, layout):
    def product(m, n):
        return turned(q, m, THETA_6, layout) @ turned(k, n, THETA_6, layout)

    assert product(m + shift, n + shift) == pytest.approx(product(m, n), abs=EXACT)
    assert product(m, m) == pytest.approx(q @ k, abs=EXACT)


@pytest.mark.parametrize("start", [0, 7, 1000])
def test_scores_depend_on_the_distance_alone_and_on_the_content(start):
    """Case 9."""
    q, k, other = np.random.default_rng(0).standard_normal((3, 6))

    def product(key):
        return turned(q, start, THETA_6, "half_split") @ turned(
            key, start + 3, THETA_6, "half_split"
        )

    at_zero = turned(q, 0, THETA_6, "half_split") @ turned(k, 3, THETA_6, "half_split")
    assert product(k) == pytest.approx(at_zero, abs=EXACT)
    assert abs(product(k) - product(other)) > 0.1


@pytest.mark.parametrize("position", [1, 600, 3000])
def test_partial_rotation_pairs_and_turns_by_the_rotary_width(position):
    """Case 15: head width 96, 24 rotary channels."""
    x = np.random.default_rng(0).standard_normal(96)
    rotary = {"base": 10000.0, "d_rotary": 24, "scaling": {"kind": "default"}}
    theta = reference.rotary_frequencies(rotary, 1)
    y = turned(x, position, theta, "half_split")
    np.testing.assert_array_equal(y[24:], x[24:])
    for i in range(12):
        angle = position * 10000.0 ** (-2 * i / 24)
        pair = complex(x[i], x[i + 12]) * complex(math.cos(angle), math.sin(angle))
        assert (y[i], y[i + 12]) == pytest.approx((pair.real, pair.imag), abs=1e-11)


def test_neighbouring_positions_stay_apart_far_out():
    """Cases 3 and 4."""
    theta = 10000.0 ** (-2 * np.arange(32) / 64)
    cosines = np.cos(np.arange(65536, 65600)[:, None] * theta)
    assert len(np.unique(cosines, axis=0)) == 64


def test_the_attention_factor_multiplies_rotated_channels_only():
    x = np.arange(1.0, 7.0)
    angles = np.zeros((1, 1, 2))
    y = reference.rotate(one_head(x), angles, "half_split", attention_factor=3.0)[0, 0, 0]
    np.testing.assert_array_equal(y, [3, 6, 9, 12, 5, 6])


def test_angles_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"angles of shape \(3, 1, 2\) for tokens of shape \(1, 3"):
        reference.rotate(np.zeros((1, 2, 3, 4)), np.zeros((3, 1, 2)), "half_split")


def test_linear_interpolation_shrinks_positions():
    """§4: with L = 2048, L' = 4096, position 3000 turns as 1500 did."""
    scaled = {"base": 1e4, "d_rotary": 6, "scaling": {"kind": "linear", "factor": 2.0}}
    plain = scaled | {"scaling": {"kind": "default"}}
    np.testing.assert_allclose(
        3000 * reference.rotary_frequencies(scaled, 1),
        1500 * reference.rotary_frequencies(plain, 1),
        rtol=1e-14,
    )


# --- §5 Normalisation ----------------------------------------------------------------------------


def test_norms_of_one_and_three():
    x, ones, tiny = np.array([1.0, 3.0]), np.ones(2), 1e-300
    np.testing.assert_allclose(reference.rms_norm(x, ones, tiny), [0.447214, 1.341641], atol=5e-7)
    np.testing.assert_allclose(
        reference.rms_norm(x + 1, ones, tiny), np.array([2, 4]) / math.sqrt(10), atol=EXACT
    )
    np.testing.assert_allclose(reference.layer_norm(x, ones, tiny), [-1, 1], atol=EXACT)
    np.testing.assert_allclose(
        reference.rms_norm(7 * x, ones, tiny), reference.rms_norm(x, ones, tiny), atol=EXACT
    )


def test_eps_stands_inside_the_root():
    """Case 69: outside it would give 0.909."""
    x = np.full(4, 1e-4)
    np.testing.assert_allclose(reference.rms_norm(x, np.ones(4), 1e-5), 0.0316, atol=5e-5)
    np.testing.assert_array_equal(reference.rms_norm(np.zeros(4), np.ones(4), 1e-5), 0)
    np.testing.assert_array_equal(reference.layer_norm(np.full(4, 9.0), np.ones(4), 1e-5), 0)


def test_offset_and_bias_are_added_where_they_belong():
    x, weight = np.array([1.0, 3.0]), np.array([0.5, -0.25])
    np.testing.assert_allclose(
        reference.rms_norm(x, weight, 1e-300, offset=1.0),
        np.array([1.5, 0.75]) * x / math.sqrt(5),
        atol=EXACT,
    )
    np.testing.assert_allclose(
        reference.layer_norm(x, weight, 1e-300, np.array([10.0, 20.0])), [9.5, 19.75], atol=EXACT
    )


# --- §6 Feed-forward -----------------------------------------------------------------------------


def test_swiglu_of_one_and_two():
    x = np.array([[1.0, 2.0]])
    gate, up = np.array([[1.0, 0], [-1, 0]]), np.array([[2.0, 0], [1, 1]])  # (out, in)
    np.testing.assert_allclose(
        reference.activate(x @ gate.T, "silu"), [[0.731059, -0.268941]], atol=5e-7
    )
    for fused in (False, True):
        config = {"kind": "glu", "activation": "silu", "fused": fused, "bias": False}
        config |= {"limit": None, "up_offset": 0.0}
        weights = {"f.gate.weight": gate, "f.up.weight": up, "f.down.weight": np.eye(2)}
        if fused:
            weights["f.gate_up.weight"] = np.concatenate([gate, up])
            del weights["f.gate.weight"], weights["f.up.weight"]
        result = reference.feed_forward(config, weights, "f", x)
        np.testing.assert_allclose(result, [[1.462117, -0.806824]], atol=5e-7)


@pytest.mark.parametrize(
    ("activation", "at_one", "at_minus_two"),
    [
        ("identity", 1, -2),
        ("relu", 1, 0),
        ("sigmoid", 0.7310585786, 0.1192029220),
        ("silu", 0.7310585786, -0.2384058440),
        ("gelu", 0.8413447461, -0.0455002639),
        ("gelu_tanh", 0.8411919906, -0.0454023059),
    ],
)
def test_activations_have_their_known_values(activation, at_one, at_minus_two):
    found = reference.activate(np.array([1.0, -2.0]), activation)
    np.testing.assert_allclose(found, [at_one, at_minus_two], atol=5e-11)


def test_large_inputs_overflow_nowhere():
    with np.errstate(all="raise", under="ignore"):
        for activation in ("sigmoid", "silu", "gelu", "gelu_tanh"):
            far = reference.activate(np.array([-1e4, 1e4]), activation)
            np.testing.assert_allclose(far, [0, 1 if activation == "sigmoid" else 1e4])


# --- §7 Shapes and parameters --------------------------------------------------------------------


def one_layer():
    return DecoderConfig.uniform(
        vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=16, max_positions=16
    ).to_dict()


def test_one_layer_has_the_shapes_of_its_table():
    config = one_layer()
    layer, weights = config["layers"][0], random_weights(config)
    x = np.random.default_rng(0).standard_normal((2, 3, 8))
    angles, may_read = np.zeros((2, 3, 2)), np.ones((2, 3, 3), dtype=bool)
    result, (k, v) = reference.self_attention(
        layer["attention"],
        weights,
        "layers.0.attention",
        x,
        angles=angles,
        may_read=may_read,
        cached=None,
    )
    assert (result.shape, k.shape, v.shape) == ((2, 3, 8), (2, 2, 3, 4), (2, 2, 3, 4))
    fed = reference.feed_forward(layer["feedforward"], weights, "layers.0.feedforward", x)
    assert fed.shape == (2, 3, 8)
    y, _ = reference.decoder_layer(
        layer, weights, "layers.0", x, angles=angles, may_read=may_read, cached=None
    )
    assert y.shape == (2, 3, 8)
    assert reference.forward(config, weights, drawn_tokens(2, 3) % 11).shape == (2, 3, 11)


def test_one_layer_has_656_parameters():
    shapes = dict(parameter_shapes(one_layer()))
    assert (
        sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
        == 656
    )


def test_an_entry_that_repeats_is_that_many_layers():
    config = VARIANTS["plain"].to_dict()
    assert config["layers"][0]["repeat"] == 2
    written_out = config | {"layers": [config["layers"][0] | {"repeat": 1}] * 2}
    weights, tokens = random_weights(config), drawn_tokens(2, 5)
    np.testing.assert_array_equal(
        reference.forward(config, weights, tokens), reference.forward(written_out, weights, tokens)
    )


# --- §8 Position tables --------------------------------------------------------------------------


def test_the_sinusoidal_table_holds_sines_and_cosines_of_one_angle():
    table = reference.sinusoidal_table(np.array([[0, 1, 50_000]]), 6)
    assert table.shape == (1, 3, 6)
    np.testing.assert_array_equal(table[0, 0], [0, 1, 0, 1, 0, 1])
    for row, position in enumerate((0, 1, 50_000)):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            wanted = (math.sin(angle), math.cos(angle))
            assert tuple(table[0, row, 2 * i : 2 * i + 2]) == pytest.approx(wanted, abs=1e-11)


def test_tables_are_added_after_the_embedding_is_scaled():
    config = VARIANTS["sinusoidal"].to_dict() | {"embedding_scale": 5.0}
    weights, tokens = random_weights(config), np.array([[3, 4]])
    x = reference.embed(config, weights, tokens, np.array([[0, 1]]))
    wanted = 5 * weights["embedding.weight"][[3, 4]] + reference.sinusoidal_table(
        np.array([0, 1]), 40
    )
    np.testing.assert_allclose(x[0], wanted, atol=EXACT)


@pytest.mark.parametrize("positions", [[63, 64], [-1, 0]])
def test_a_learned_table_has_nothing_beyond_its_size(positions):
    config = VARIANTS["learned"].to_dict()
    with pytest.raises(ValueError, match="the learned table has 64"):
        reference.forward(config, random_weights(config), [[1, 2]], positions=positions)


# --- Attention -----------------------------------------------------------------------------------


def test_each_key_value_head_serves_consecutive_query_heads():
    """Case 61: tiled instead of grouped, the heads would alternate."""
    v = np.stack([np.full((5, 4), 1.0), np.full((5, 4), 2.0)])[None]
    q, k = np.random.default_rng(0).standard_normal((2, 1, 8, 5, 4))
    result = reference.attention(q, k[:, :2], v, np.tri(5, dtype=bool)[None])
    np.testing.assert_allclose(result[0, :4], 1, atol=EXACT)
    np.testing.assert_allclose(result[0, 4:], 2, atol=EXACT)


def test_attention_is_the_sum_written_out():
    """One score at a time, in plain numbers."""
    generator = np.random.default_rng(0)
    q = generator.standard_normal((1, 6, 3, 10))
    k, v = generator.standard_normal((2, 1, 2, 5, 10))
    may_read = np.tri(3, 5, 2, dtype=bool)[None]
    found = reference.attention(q, k, v, may_read, scale=0.7, soft_cap=1.3)
    for head in range(6):
        for t in range(3):
            weights = []
            for s in range(t + 3):
                score = 0.7 * sum(q[0, head, t, c] * k[0, head // 3, s, c] for c in range(10))
                weights.append(math.exp(1.3 * math.tanh(score / 1.3)))
            wanted = sum(w * v[0, head // 3, s] for s, w in enumerate(weights)) / sum(weights)
            np.testing.assert_allclose(found[0, head, t], wanted, atol=EXACT)


def test_a_query_that_may_read_nothing_gives_zeros():
    """Case 47."""
    generator = np.random.default_rng(0)
    q, k, v = generator.standard_normal((3, 1, 2, 4, 4))
    may_read = np.tri(4, dtype=bool)[None].copy()
    may_read[0, 0] = False
    with np.errstate(all="raise"):
        result = reference.attention(q, k, v, may_read)
    np.testing.assert_array_equal(result[0, :, 0], 0)
    assert (result[0, :, 1:] != 0).all()


def test_scores_of_any_size_overflow_nowhere():
    q, k, v = np.full((1, 1, 2, 4), 1e3), np.full((1, 1, 2, 4), 1e3), np.ones((1, 1, 2, 4))
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(reference.attention(q, k, v, np.tri(2, dtype=bool)[None]), 1)


def test_self_attention_is_its_steps_written_out():
    """Biases, then the norm of each head, then the rotation by complex numbers, with its factor."""
    config = VARIANTS["rope yarn"].to_dict()["layers"][0]["attention"] | {
        "qkv_bias": True,
        "out_bias": True,
        "qk_norm": {"kind": "rms", "eps": 1e-3, "offset": 0.0, "bias": False},
    }
    weights = random_weights(
        VARIANTS["plain"].to_dict()
        | {"layers": [VARIANTS["plain"].to_dict()["layers"][0] | {"attention": config}]}
    )
    x = np.random.default_rng(0).standard_normal((1, 3, 40))
    theta = reference.rotary_frequencies(config["rotary"], 3)

    def weight(name):
        return weights[f"layers.0.attention.{name}"]

    def head(which, number, t):
        rows = slice(10 * number, 10 * number + 10)
        y = weight(f"{which}.weight")[rows] @ x[0, t] + weight(f"{which}.bias")[rows]
        if which == "v":
            return y
        y = y / math.sqrt(sum(y**2) / 10 + 1e-3) * weight(f"{which}_norm.weight")
        factor = 1 + 0.1 * math.log(4)
        pairs = [complex(y[i], y[i + 5]) * np.exp(1j * t * theta[i]) * factor for i in range(5)]
        return np.array([pair.real for pair in pairs] + [pair.imag for pair in pairs])

    found, _ = reference.self_attention(
        config,
        weights,
        "layers.0.attention",
        x,
        angles=np.arange(3)[None, :, None] * theta,
        may_read=np.tri(3, dtype=bool)[None],
        cached=None,
    )
    for t in range(3):
        joined = []
        for number in range(6):
            q = head("q", number, t)
            scores = [math.exp(q @ head("k", number // 3, s) / math.sqrt(10)) for s in range(t + 1)]
            read = sum(score * head("v", number // 3, s) for s, score in enumerate(scores))
            joined.append(read / sum(scores))
        wanted = weight("out.weight") @ np.concatenate(joined) + weight("out.bias")
        np.testing.assert_allclose(found[0, t], wanted, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("T", "S"), [(1, 8), (3, 8), (8, 8)])
def test_windows_are_aligned_to_the_lower_right(T, S):
    """Case 49: the last query reads the last slot and the two before it."""
    causal = np.tri(T, S, S - T, dtype=bool)[None]
    may_read = reference.within_window(causal, 3)
    for t in range(T):
        last = S - T + t
        assert list(np.flatnonzero(may_read[0, t])) == list(range(max(0, last - 2), last + 1))


# --- §3 The cache against the whole pass ---------------------------------------------------------

LENGTH = 13
SPLITS = {
    "ones": [1] * LENGTH,
    "3 + 1 + 4": [3, 1, 4, 1, 4],
    "prompt, then ones": [7, 1, 1, 1, 1, 1, 1],
    "1 + 4 + 3 + 5": [1, 4, 3, 5],
    "across the window in one": [5, 8],
}


def in_chunks(config, weights, tokens, sizes, mask=None, **arguments):
    """The end of each chunk, and its logits."""
    cache, end = reference.Cache(), 0
    for size in sizes:
        part = slice(end, end + size)
        chunk_mask = None if mask is None else mask[:, part]
        logits = reference.forward(
            config, weights, tokens[:, part], mask=chunk_mask, cache=cache, **arguments
        )
        end += size
        yield end, logits


def is_length_dependent(config):
    rules = [layer["attention"]["rotary"] for layer in config["layers"]]
    return any(rule and rule["scaling"]["kind"] in {"dynamic", "longrope"} for rule in rules)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_through_the_cache_give_the_whole_pass(name, split):
    """Also cases 39 and 42. A rule that depends on the length has a whole pass of its own for each.

    The windows of 8 of the dynamic rules are crossed; the second row is padded on the left.
    """
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, LENGTH)
    mask = np.ones((2, LENGTH), dtype=bool)
    mask[1, :3] = False
    whole = reference.forward(config, weights, tokens, mask=mask)
    for end, logits in in_chunks(config, weights, tokens, split, mask):
        if is_length_dependent(config):
            whole = reference.forward(config, weights, tokens[:, :end], mask=mask[:, :end])
        start = end - logits.shape[1]
        real = mask[:, start:end]
        np.testing.assert_allclose(logits[real], whole[:, start:end][real], atol=EXACT, rtol=0)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from(["plain", "window", "rope dynamic", "rope longrope", "mixed layers"]),
    st.integers(0, 6),
)
def test_any_split_gives_the_whole_pass(sizes, name, padding):
    config, total = VARIANTS[name].to_dict(), sum(sizes)
    weights, tokens = random_weights(config), drawn_tokens(2, total)
    mask = np.ones((2, total), dtype=bool)
    mask[0, :padding] = False
    *_, (_, logits) = in_chunks(config, weights, tokens, sizes, mask)
    whole = reference.forward(config, weights, tokens, mask=mask)
    real = mask[:, total - sizes[-1] :]
    np.testing.assert_allclose(
        logits[real], whole[:, total - sizes[-1] :][real], atol=EXACT, rtol=0
    )


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_keys_kept_under_old_frequencies_would_be_wrong(name, monkeypatch):
    """The comparison above must notice a cache that is not rebuilt (case 39)."""
    monkeypatch.setattr(
        reference.Cache, "still_valid", lambda self, frequencies: len(self.keys_values) > 0
    )
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, LENGTH)
    *_, (_, logits) = in_chunks(config, weights, tokens, [ORIGINAL_WINDOW - 1, 6])
    whole = reference.forward(config, weights, tokens)
    assert np.abs(logits - whole[:, -6:]).max() > 1e-2


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_turning_the_cached_keys_alone_would_be_wrong(name):
    """It is exact in the first layer and not below it, which is why the tokens are kept."""
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, LENGTH)
    early, late = reference.Cache(), reference.Cache()
    reference.forward(config, weights, tokens[:, :8], cache=early)
    reference.forward(config, weights, tokens, cache=late)

    def turned_anew(layer):
        change = late.frequencies[layer] - early.frequencies[layer]
        angles = np.arange(8)[None, :, None] * change[:, None, :]
        return reference.rotate(early.keys_values[layer][0], angles, "half_split")

    def gap(layer):
        return np.abs(turned_anew(layer) - late.keys_values[layer][0][:, :, :8]).max()

    assert gap(0) < EXACT
    assert gap(1) > 1e-2


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_a_fixed_length_keeps_one_set_of_frequencies(name):
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, LENGTH)
    whole = reference.forward(config, weights, tokens, rotary_length=20)
    parts = [p for _, p in in_chunks(config, weights, tokens, [3, 1, 9], rotary_length=20)]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=EXACT, rtol=0)
    per_row = reference.forward(config, weights, tokens, rotary_length=[20, 4])
    np.testing.assert_array_equal(per_row[0], whole[0])
    assert np.abs(per_row[1] - whole[1]).max() > 1e-2
    free = reference.forward(config, weights, tokens)
    assert (np.abs(free - whole).max() > 1e-2) == (name == "rope dynamic")  # 13 and 20 are long


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_a_text_is_as_long_as_its_last_position_plus_one(name):
    """As many tokens as the original window are within it; one more is not (case 41)."""
    config = VARIANTS[name].to_dict()
    cache = reference.Cache()
    weights, tokens = random_weights(config), drawn_tokens(1, ORIGINAL_WINDOW + 1)
    reference.forward(config, weights, tokens[:, :-1], cache=cache)
    rotary = config["layers"][0]["attention"]["rotary"]
    within, beyond = (reference.rotary_frequencies(rotary, length) for length in (1, 9))
    np.testing.assert_array_equal(cache.frequencies[0][0], within)
    reference.forward(config, weights, tokens[:, -1:], cache=cache)
    np.testing.assert_array_equal(cache.frequencies[0][0], beyond)
    assert np.abs(within - beyond).max() > 1e-3


def test_each_row_has_the_frequencies_of_its_own_length():
    """A short text beside a long one is computed as if alone (and case 125)."""
    config = VARIANTS["rope dynamic"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, LENGTH)
    mask = np.ones((2, LENGTH), dtype=bool)
    mask[0, :8] = False
    both = reference.forward(config, weights, tokens, mask=mask)
    alone = reference.forward(config, weights, tokens[:1, 8:])
    np.testing.assert_allclose(both[:1, 8:], alone, atol=EXACT, rtol=0)


def test_cached_keys_are_rotated_once_and_values_never():
    """Case 10, and what the cache holds."""
    config = VARIANTS["plain"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, 5)
    stepped, whole = reference.Cache(), reference.Cache()
    for t in range(5):
        reference.forward(config, weights, tokens[:, t : t + 1], cache=stepped)
    reference.forward(config, weights, tokens, cache=whole)
    for (k, v), (k_whole, v_whole) in zip(stepped.keys_values, whole.keys_values, strict=True):
        assert k.shape == v.shape == (2, 2, 5, 10)
        np.testing.assert_allclose(k, k_whole, atol=EXACT)
        np.testing.assert_allclose(v, v_whole, atol=EXACT)
    shifted = reference.Cache()
    reference.forward(config, weights, tokens, cache=shifted, positions=np.arange(5) + 9)
    np.testing.assert_array_equal(shifted.keys_values[0][1], whole.keys_values[0][1])
    assert np.abs(shifted.keys_values[0][0] - whole.keys_values[0][0]).max() > 0.1


def test_a_cache_of_another_configuration_is_refused():
    cache = reference.Cache()
    plain, window = VARIANTS["plain"].to_dict(), VARIANTS["window"].to_dict()
    weights = random_weights(plain)
    reference.forward(plain, weights, [[1, 2]], cache=cache)
    with pytest.raises(ValueError, match="filled under another configuration"):
        reference.forward(window, weights, [[3]], cache=cache)


# --- Positions, masks and documents --------------------------------------------------------------


def test_who_reads_whom_and_at_which_position_pair_by_pair():
    """Two rows and two calls, with padding, documents and a mask of pairs, against the rules."""
    generator = np.random.default_rng(3)
    real = generator.random((2, 5)) < 0.7
    documents = np.array([[0, 0, 1, 1, 0, 1, 0], [4, 4, 4, 4, 4, 4, 4]])
    pairs = generator.random((2, 2, 7)) < 0.6
    first = reference.extend(
        reference.no_slots(2),
        np.zeros((2, 5), int),
        positions=None,
        mask=real,
        documents=documents[:, :5],
    )
    both = reference.extend(
        first, np.zeros((2, 2), int), positions=None, mask=pairs, documents=documents[:, 5:]
    )
    real = np.concatenate([real, np.ones((2, 2), dtype=bool)], axis=1)
    for row in range(2):
        for token in range(7):
            kin = [
                slot
                for slot in range(7)
                if real[row, slot] and documents[row, slot] == documents[row, token]
            ]
            readable = [
                slot for slot in kin if slot <= token and (token < 5 or pairs[row, token - 5, slot])
            ]
            assert list(np.flatnonzero(both.may_read[row, token])) == readable
            before = [slot for slot in kin if slot < token]
            assert both.positions[row, token] == (len(before) if real[row, token] else 0)


@pytest.mark.parametrize("name", ["plain", "window", "learned", "sinusoidal", "rope dynamic"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_real_tokens(name, side):
    """Case 54: the position of a token is the count of real ones before it."""
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, 9)
    mask = np.ones((2, 9), dtype=np.int64)
    gap = slice(0, 4) if side == "left" else slice(5, 9)
    mask[0, gap] = 0
    both = reference.forward(config, weights, tokens, mask=mask)
    assert np.isfinite(both).all()
    alone = reference.forward(config, weights, tokens[:1, mask[0] == 1])
    np.testing.assert_allclose(both[:1, mask[0] == 1], alone, atol=EXACT, rtol=0)


def test_padding_in_the_middle_is_neither_read_nor_counted():
    config = VARIANTS["plain"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 9)
    mask = np.array([[1, 1, 0, 0, 1, 1, 0, 1, 1]])
    padded = reference.forward(config, weights, tokens, mask=mask)[mask == 1]
    alone = reference.forward(config, weights, tokens[:, mask[0] == 1])[0]
    np.testing.assert_allclose(padded, alone, atol=EXACT, rtol=0)


def test_the_position_of_padding_does_not_lengthen_a_row():
    config = VARIANTS["rope dynamic"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 6)
    mask, positions = np.array([[0, 1, 1, 1, 1, 1]]), np.array([[999, 0, 1, 2, 3, 4]])
    padded = reference.forward(config, weights, tokens, mask=mask, positions=positions)
    alone = reference.forward(config, weights, tokens[:, 1:])
    np.testing.assert_allclose(padded[:, 1:], alone, atol=EXACT, rtol=0)


def test_masks_of_pairs_are_combined_with_the_causal_rule():
    config = VARIANTS["plain"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, 6)
    all_pairs = np.ones((2, 6, 6), dtype=bool)
    plain = reference.forward(config, weights, tokens)
    for mask in (all_pairs, all_pairs[:, None], all_pairs.astype(int), np.tril(all_pairs)):
        np.testing.assert_array_equal(reference.forward(config, weights, tokens, mask=mask), plain)
    first_hidden = all_pairs.copy()
    first_hidden[:, 1:, 0] = False
    hidden = reference.forward(config, weights, tokens, mask=first_hidden)
    np.testing.assert_array_equal(hidden[:, 0], plain[:, 0])
    later = reference.forward(config, weights, tokens[:, 1:], positions=np.arange(1, 6))
    np.testing.assert_allclose(hidden[:, 1:], later, atol=EXACT, rtol=0)


def test_a_mask_of_pairs_reaches_the_slots_of_the_cache():
    config = VARIANTS["plain"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 6)
    pairs = np.random.default_rng(2).random((1, 6, 6)) < 0.6
    whole = reference.forward(config, weights, tokens, mask=pairs)
    cache = reference.Cache()
    reference.forward(config, weights, tokens[:, :4], mask=pairs[:, :4, :4], cache=cache)
    rest = reference.forward(config, weights, tokens[:, 4:], mask=pairs[:, None, 4:], cache=cache)
    np.testing.assert_allclose(rest, whole[:, 4:], atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["plain", "window", "learned", "no position"])
def test_documents_in_a_row_are_as_if_alone(name):
    """Case 91."""
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 8)
    documents = np.array([[5] * 3 + [2] * 5])
    packed = reference.forward(config, weights, tokens, documents=documents)
    for part in (slice(0, 3), slice(3, 8)):
        alone = reference.forward(config, weights, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=EXACT, rtol=0)
    cache = reference.Cache()
    for part in (slice(0, 2), slice(2, 6), slice(6, 8)):
        logits = reference.forward(
            config, weights, tokens[:, part], documents=documents[:, part], cache=cache
        )
        np.testing.assert_allclose(logits, packed[:, part], atol=EXACT, rtol=0)


@given(st.permutations(range(7)))
def test_the_causal_rule_goes_by_order_and_the_rotation_by_position(positions):
    """The same positions, one list for all rows or one list per row, in any order."""
    config = VARIANTS["window"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(2, 7)
    whole = reference.forward(config, weights, tokens, positions=np.array(positions))
    rows = reference.forward(config, weights, tokens, positions=np.array([positions] * 2))
    np.testing.assert_array_equal(whole, rows)
    prefix = reference.forward(config, weights, tokens[:, :4], positions=np.array(positions[:4]))
    np.testing.assert_allclose(prefix, whole[:, :4], atol=EXACT, rtol=0)


def test_a_common_shift_of_positions_cancels_and_another_distance_does_not():
    config = VARIANTS["plain"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 5)
    plain = reference.forward(config, weights, tokens)
    shifted = reference.forward(config, weights, tokens, positions=np.arange(5) + 1000)
    np.testing.assert_allclose(shifted, plain, atol=1e-9, rtol=0)
    spread = reference.forward(config, weights, tokens, positions=np.arange(5) * 2)
    assert np.abs(spread - plain).max() > 1e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_changes_nothing_before_it(name):
    config = VARIANTS[name].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 7)
    changed = tokens.copy()
    changed[0, 4] = (tokens[0, 4] + 1) % 61
    before, after = (reference.forward(config, weights, ids) for ids in (tokens, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before[:, 4] - after[:, 4]) > 0).any()


@pytest.mark.parametrize(
    ("tokens", "arguments", "error", "message"),
    [
        ([[1, 61]], {}, ValueError, "tokens from 1 to 61 for a vocabulary of 61"),
        ([[-1, 3]], {}, ValueError, "tokens from -1 to 3"),
        ([[1.5, 3]], {}, TypeError, "tokens are integers, not float64"),
        ([[1, 2]], {"positions": [0]}, ValueError, r"positions has shape \(1,\), expected \(2,\)"),
        ([[1, 2]], {"positions": [0.0, 1.0]}, TypeError, "positions are integers"),
        ([[1, 2]], {"mask": [[1]]}, ValueError, r"mask has shape \(1, 1\), expected \(1, 2\)"),
        ([[1, 2]], {"mask": [[0.0, -np.inf]]}, ValueError, "only 0 and 1"),
        ([[1, 2]], {"documents": [[0]]}, ValueError, "documents has shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tokens, arguments, error, message):
    config = VARIANTS["plain"].to_dict()
    with pytest.raises(error, match=message):
        reference.forward(config, random_weights(config), tokens, **arguments)


# --- The whole decoder ---------------------------------------------------------------------------


def test_norm_placement_and_residual_are_what_they_say():
    """Each combination against its formula, with the sub-layers taken as they are."""
    tokens = drawn_tokens(1, 4)
    for placement, residual in (
        ("pre", "sequential"),
        ("post", "sequential"),
        ("sandwich", "sequential"),
        ("pre", "parallel"),
        ("post", "parallel"),
        ("sandwich", "parallel"),
        ("pre", "parallel_shared_norm"),
    ):
        config = VARIANTS["plain"].to_dict()
        layer = config["layers"][0] | {"norm_placement": placement, "residual": residual}
        config["layers"] = [layer | {"repeat": 1}]
        weights = random_weights(config)
        x = reference.embed(config, weights, tokens, np.arange(4)[None])
        theta = reference.rotary_frequencies(layer["attention"]["rotary"], 4)
        angles = np.arange(4)[None, :, None] * theta
        arguments = {"angles": angles, "may_read": np.tri(4, dtype=bool)[None], "cached": None}

        def attend(y, layer=layer, weights=weights, arguments=arguments):
            name = "layers.0.attention"
            return reference.self_attention(layer["attention"], weights, name, y, **arguments)[0]

        def feed(y, layer=layer, weights=weights):
            name = "layers.0.feedforward"
            return reference.feed_forward(layer["feedforward"], weights, name, y)

        def norm(which, y, weights=weights):
            mean_square = (y**2).mean(axis=-1, keepdims=True)
            return weights[f"layers.0.{which}.weight"] * y / np.sqrt(mean_square + 1e-5)

        match placement, residual:
            case "pre", "sequential":
                u = x + attend(norm("norm1", x))
                wanted = u + feed(norm("norm2", u))
            case "post", "sequential":
                u = x + norm("post_norm1", attend(x))
                wanted = u + norm("post_norm2", feed(u))
            case "sandwich", "sequential":
                u = x + norm("post_norm1", attend(norm("norm1", x)))
                wanted = u + norm("post_norm2", feed(norm("norm2", u)))
            case "pre", "parallel":
                wanted = x + attend(norm("norm1", x)) + feed(norm("norm2", x))
            case "post", "parallel":
                wanted = x + norm("post_norm1", attend(x)) + norm("post_norm2", feed(x))
            case "sandwich", "parallel":
                attended = norm("post_norm1", attend(norm("norm1", x)))
                wanted = x + attended + norm("post_norm2", feed(norm("norm2", x)))
            case _:
                wanted = x + attend(norm("norm1", x)) + feed(norm("norm1", x))
        found, _ = reference.decoder_layer(layer, weights, "layers.0", x, **arguments)
        np.testing.assert_allclose(found, wanted, atol=EXACT, rtol=0)


def test_head_bias_and_final_soft_cap():
    config = VARIANTS["tied head with bias"].to_dict()
    weights, tokens = random_weights(config), drawn_tokens(1, 3)
    assert "head.weight" not in weights
    logits = reference.forward(config, weights, tokens)
    unbiased = reference.forward(config | {"head_bias": False}, weights, tokens)
    np.testing.assert_allclose(logits, unbiased + weights["head.bias"], atol=EXACT)
    capped = reference.forward(config | {"final_soft_cap": 2.0}, weights, tokens)
    np.testing.assert_allclose(capped, 2 * np.tanh(logits / 2), atol=EXACT)


def test_a_long_text_leaves_no_trace():
    """Case 40."""
    for name in SCALINGS:
        config = VARIANTS[f"rope {name}"].to_dict()
        weights = random_weights(config)
        short = reference.forward(config, weights, drawn_tokens(1, 5))
        reference.forward(config, weights, drawn_tokens(1, 40))
        again = reference.forward(config, weights, drawn_tokens(1, 5))
        np.testing.assert_array_equal(again, short)
