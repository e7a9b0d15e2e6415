"""What the decoder computes, in float64 NumPy, written to be read: the executable specification.

Imports nothing of the library; the library is held against it. It is slow on purpose: no fusing,
no in-place tricks, every sum written as its formula. Dropout is left out, as it is when a model
is not being trained.

Read it from the top: numbers and rules first, then one layer, then the whole decoder (`forward`).

    B rows, T new tokens, p cached ones, S = p + T slots, d model width, h query heads,
    h_kv key/value heads, d_h head width, f feed-forward width, V vocabulary, L training window,
    b rotary base, θ_i the radians that channel pair i turns at each position

A configuration is the plain dict of `DecoderConfig.to_dict()`. Weights are a mapping of parameter
names to arrays; a linear map's weight has shape (out, in) and computes W·x (+ bias).
"""

# NumPy's operators are typed as Any; casting each result would bury the formulas.
# mypy: disable-error-code="no-any-return"

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Config = Mapping[str, Any]
Weights = Mapping[str, ArrayLike]
KeysValues = tuple[Array, Array]


# --- Normalisation -------------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """(w + offset)_j · x_j / √(mean(x²) + ε) over the last axis.

    Source: Zhang and Sennrich 2019, §4; the offset is Gemma's, whose files store weight − 1.
    """
    mean_square = (x**2).mean(axis=-1, keepdims=True)
    return (weight + offset) * x / np.sqrt(mean_square + eps)


def layer_norm(x: Array, weight: Array, eps: float, bias: Array | None = None) -> Array:
    """w_j · (x − mean(x))_j / √(var(x) + ε) + bias_j over the last axis.

    The variance divides by the width. Source: Ba, Kiros and Hinton 2016, §3.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return weight * centred / np.sqrt(variance + eps) + (0.0 if bias is None else bias)


# --- Rotary positions ----------------------------------------------------------------------------


def rotary_frequencies(rotary: Config, length: int) -> Array:
    """θ_i, radians turned per position, for a text of `length` tokens: shape (d_rotary / 2,).

    θ_i = b^(−2i/d) with d = d_rotary, then the scaling rule. Only dynamic and longrope look at
    the length. Source: Su et al. 2021, §3.2.2; the rules' sources stand with each.
    """
    b, d, rule = rotary["base"], rotary["d_rotary"], rotary["scaling"]
    i = np.arange(d // 2)
    theta = b ** (-2 * i / d)
    match rule["kind"]:
        case "default":
            scaled = theta
        case "linear":  # Chen et al. 2023, §2
            scaled = theta / rule["factor"]
        case "ntk":  # bloc97 2023
            scaled = _ntk(b, d, rule["factor"])
        case "dynamic":  # emozilla 2023; up to the original window nothing changes
            M, s = rule["original_window"], rule["factor"]
            scaled = _ntk(b, d, s * max(length, M) / M - (s - 1))
        case "yarn":  # Peng et al. 2023, §3.2
            ramp = yarn_ramp(rotary)
            scaled = ramp * theta / rule["factor"] + (1 - ramp) * theta
        case "llama3":  # Llama 3.1, 2024
            scaled = np.array([_llama3(angle, rule) for angle in theta])
        case "longrope":  # Ding et al. 2024; strictly longer texts take the long list
            long = length > rule["original_window"]
            scaled = theta / np.array(rule["long_factor"] if long else rule["short_factor"])
        case unknown:
            raise ValueError(f"no rotary scaling rule is called {unknown!r}")
    return scaled


def _ntk(b: float, d: int, stretch: float) -> Array:
    """θ for the base b·stretch^(d/(d−2)): pair 0 stays, the last pair is divided by stretch."""
    larger_base = b * stretch ** (d / (d - 2))
    return larger_base ** (-2 * np.arange(d // 2) / d)


def yarn_ramp(rotary: Config) -> Array:
    """How far each pair is interpolated: 0 not at all, 1 wholly; shape (d_rotary / 2,).

    clamp((i − low)/(high − low), 0, 1), where pair c(n) = d·ln(L/(2πn)) / (2·ln b) turns n times
    in the original window, low = c(β_fast) and high = c(β_slow). The paper ramps in turns; this
    follows the implementations, which ramp in the pair index.
    """
    b, d, rule = rotary["base"], rotary["d_rotary"], rotary["scaling"]

    def c(turns: float) -> float:
        return d * math.log(rule["original_window"] / (2 * math.pi * turns)) / (2 * math.log(b))

    low, high = c(rule["beta_fast"]), c(rule["beta_slow"])
    if rule["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)


def _llama3(theta: float, rule: Config) -> float:
    """One pair: short waves stay, long waves are divided by s, a blend linear in L/λ between."""
    s, L = rule["factor"], rule["original_window"]
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    wavelength = 2 * math.pi / theta
    if wavelength < L / high:
        return theta
    if wavelength > L / low:
        return theta / s
    t = (L / wavelength - low) / (high - low)
    return (1 - t) * theta / s + t * theta


def rotary_attention_factor(rotary: Config) -> float:
    """What cos and sin are multiplied by, so that scores grow by its square.

    yarn: the explicit factor, else g(s, mscale)/g(s, mscale_all_dim) when both are set and not
    zero, else g(s, 1), with g(s, m) = 0.1·m·ln s + 1 for s > 1, else 1.
    longrope: the explicit factor, else √(1 + ln s / ln L) for s > 1, else 1. All others: 1.
    """
    rule = rotary["scaling"]
    if rule["kind"] not in {"yarn", "longrope"}:
        return 1.0
    s = rule["factor"]
    if rule["explicit_attention_factor"] is not None:
        return float(rule["explicit_attention_factor"])
    if s <= 1:
        return 1.0
    if rule["kind"] == "longrope":
        return math.sqrt(1 + math.log(s) / math.log(rule["original_window"]))

    def g(m: float) -> float:
        return 0.1 * m * math.log(s) + 1

    if rule["mscale"] and rule["mscale_all_dim"]:
        return g(rule["mscale"]) / g(rule["mscale_all_dim"])
    return g(1.0)


def rotate(x: Array, angles: Array, layout: str, attention_factor: float = 1.0) -> Array:
    """Turn each channel pair (x, y) by its angle φ: (x·cos φ − y·sin φ, x·sin φ + y·cos φ).

    x (B, h, T, d_h), angles (B, T, d_rotary / 2) in radians → (B, h, T, d_h). Pairs are channels
    (i, i + d_rotary/2) when `half_split`, (2i, 2i + 1) when `interleaved`. Channels from d_rotary
    on stay as they are. Raises ValueError when the angles are not those of x's tokens.
    """
    B, _, T, _ = x.shape
    if angles.shape[:2] != (B, T):
        raise ValueError(f"angles of shape {angles.shape} for tokens of shape {(B, T)}")
    pairs = angles.shape[-1]
    if layout == "interleaved":
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    cos = attention_factor * np.cos(angles)[:, None]  # the same for every head
    sin = attention_factor * np.sin(angles)[:, None]
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


# --- Positions added at the input ----------------------------------------------------------------


def sinusoidal_table(positions: Integers, d: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same): (..., T) → (..., T, d).

    Source: Vaswani et al. 2017, §3.5.
    """
    angles = positions[..., None] / 10000.0 ** (np.arange(0, d, 2) / d)
    table = np.empty((*positions.shape, d))
    table[..., 0::2] = np.sin(angles)
    table[..., 1::2] = np.cos(angles)
    return table


# --- Attention -----------------------------------------------------------------------------------


def attention(
    q: Array,
    k: Array,
    v: Array,
    may_read: Booleans,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v over the slots that each query may read.

    q (B, h, T, d_h), k and v (B, h_kv, S, d_h), may_read (B, T, S) → (B, h, T, d_h). Query head j
    reads key/value head j // (h/h_kv). `scale` is d_h^(−1/2) when None; a soft cap c makes the
    scores c·tanh(score / c) before the mask. A query that may read nothing gives zeros.
    Source: Vaswani et al. 2017, §3.2; Ainslie et al. 2023 (grouped queries).
    """
    B, h, T, d_h = q.shape
    queries_per_head = h // k.shape[1]
    scale = d_h**-0.5 if scale is None else scale
    result = np.zeros((B, h, T, d_h))
    for row in range(B):
        for head in range(h):
            keys, values = k[row, head // queries_per_head], v[row, head // queries_per_head]
            scores = scale * q[row, head] @ keys.T
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            result[row, head] = masked_softmax(scores, may_read[row]) @ values
    return result


def masked_softmax(scores: Array, may_read: Booleans) -> Array:
    """exp(score_s) / Σ exp(score_s') over the allowed s' of the last axis; zeros where none is."""
    allowed = np.where(may_read, scores, -np.inf)
    largest = allowed.max(axis=-1, keepdims=True)
    exponentials = np.exp(allowed - np.where(np.isfinite(largest), largest, 0.0))
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.where(total == 0.0, 1.0, total)


def within_window(may_read: Booleans, window: int | None) -> Booleans:
    """may_read (B, T, S), held to the last `window` slots up to the query's own, itself included.

    Queries are the last T of the S slots.
    """
    if window is None:
        return may_read
    _, T, S = may_read.shape
    distance = np.arange(S - T, S)[:, None] - np.arange(S)[None, :]
    return may_read & (distance < window)


# --- Feed-forward --------------------------------------------------------------------------------


def activate(z: Array, activation: str) -> Array:
    """σ(z) = 1/(1 + e^(−z)); silu z·σ(z); gelu z·Φ(z), by erf or by tanh; relu; or nothing.

    Source: Hendrycks and Gimpel 2016 (both forms of GELU).
    """
    match activation:
        case "identity":
            return z
        case "relu":
            return np.maximum(z, 0.0)
        case "sigmoid":
            return _sigmoid(z)
        case "silu":
            return z * _sigmoid(z)
        case "gelu":
            return z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
        case "gelu_tanh":
            return z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case unknown:
            raise ValueError(f"no activation is called {unknown!r}")


def _sigmoid(z: Array) -> Array:
    """1/(1 + e^(−z)), written so that no exponential overflows."""
    return 0.5 * (1 + np.tanh(z / 2))


def feed_forward(config: Config, weights: Weights, name: str, x: Array) -> Array:
    """glu: (act(x W_g) ⊙ (x W_u)) W_d; mlp: act(x W_u) W_d. x (B, T, d) → (B, T, d).

    A fused weight is W_g over W_u, the gate half first. Source: Shazeer 2020.
    """

    def project(which: str, x: Array) -> Array:
        return linear(weights, f"{name}.{which}", x, config["bias"])

    if config["kind"] == "mlp":
        inner = activate(project("up", x), config["activation"])
    else:
        if config["fused"]:
            gate, up = np.split(project("gate_up", x), 2, axis=-1)
        else:
            gate, up = project("gate", x), project("up", x)
        inner = activate(gate, config["activation"]) * up
    return project("down", inner)


# --- Reading weights by name ---------------------------------------------------------------------


def parameter(weights: Weights, name: str) -> Array:
    """The named parameter in float64."""
    return np.asarray(weights[name], dtype=np.float64)


def linear(weights: Weights, name: str, x: Array, bias: bool) -> Array:
    """W·x, plus the bias where there is one: (..., in) → (..., out)."""
    y = x @ parameter(weights, f"{name}.weight").T
    return y + parameter(weights, f"{name}.bias") if bias else y


def norm(config: Config, weights: Weights, name: str, x: Array) -> Array:
    """The norm that the configuration asks for, with the parameters under `name`."""
    weight = parameter(weights, f"{name}.weight")
    if config["kind"] == "rms":
        return rms_norm(x, weight, config["eps"], config["offset"])
    bias = parameter(weights, f"{name}.bias") if config["bias"] else None
    return layer_norm(x, weight, config["eps"], bias)


def norm_heads(config: Config, weights: Weights, name: str, x: Array) -> Array:
    """The norm of queries or keys, x (B, n, T, d_h) → the same, over what qk_norm_over says.

    head: each, by the same weights (d_h,); head_own_weights: each by its part of (n·d_h,);
    all_heads: the n·d_h channels of a token as one vector.
    """
    B, n, T, d_h = x.shape
    over, of = config["qk_norm_over"], config["qk_norm"]
    if over == "all_heads":
        joined = x.transpose(0, 2, 1, 3).reshape(B, T, n * d_h)
        return norm(of, weights, name, joined).reshape(B, T, n, d_h).transpose(0, 2, 1, 3)
    if over == "head":
        return norm(of, weights, name, x)
    result = np.empty_like(x)
    for head in range(n):
        part = slice(head * d_h, (head + 1) * d_h)
        own = {f"{name}.{kind}": np.asarray(weights[f"{name}.{kind}"])[part]
               for kind in (["weight", "bias"] if of["bias"] else ["weight"])}  # fmt: skip
        result[:, head] = norm(of, own, name, x[:, head])
    return result


# --- The slots of a sequence ---------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """What is known of every token so far, cached or new, whatever the layer.

    tokens, positions and documents (B, S) integers; real (B, S), false for padding; may_read
    (B, S, S): which slot (last axis) the token in which slot may read, windows aside.
    """

    tokens: Integers
    positions: Integers
    documents: Integers
    real: Booleans
    may_read: Booleans

    @property
    def count(self) -> int:
        """S."""
        return int(self.tokens.shape[1])

    @property
    def lengths(self) -> Integers:
        """Per row the largest position of a real token, plus one; 0 for a row of padding."""
        return np.where(self.real, self.positions, -1).max(axis=1) + 1


def no_slots(B: int) -> Slots:
    """B rows without a token."""
    none = np.zeros((B, 0), dtype=np.int64)
    return Slots(none, none, none, none.astype(bool), np.zeros((B, 0, 0), dtype=bool))


def extend(
    old: Slots,
    tokens: ArrayLike,
    *,
    positions: ArrayLike | None,
    mask: ArrayLike | None,
    documents: ArrayLike | None,
) -> Slots:
    """The p old slots followed by T new ones; the arguments are those of `forward`."""
    new = _integers("tokens", tokens)
    B, T = new.shape
    p, S = old.count, old.count + T
    new_real, permitted = read_mask(mask, B, T, S)
    real = np.concatenate([old.real, new_real], axis=1)
    new_documents = np.zeros((B, T), np.int64)
    if documents is not None:
        new_documents = _integers("documents", documents)
    of = np.concatenate([old.documents, _shaped("documents", new_documents, (B, T))], axis=1)

    # A new token (axis 1) and a slot (axis 2) are kin when the slot is real and of its document.
    kin = real[:, None, :] & (of[:, p:, None] == of[:, None, :])
    token, slot = np.arange(p, S)[:, None], np.arange(S)[None, :]

    # Old tokens keep what they could read; the new slots come after them.
    may_read = np.zeros((B, S, S), dtype=bool)
    may_read[:, :p, :p] = old.may_read
    may_read[:, p:] = (slot <= token) & kin & permitted

    if positions is None:
        new_positions = np.where(new_real, ((slot < token) & kin).sum(axis=-1), 0)
    else:
        new_positions = read_positions(positions, B, T)
    return Slots(
        tokens=np.concatenate([old.tokens, new], axis=1),
        positions=np.concatenate([old.positions, new_positions], axis=1),
        documents=of,
        real=real,
        may_read=may_read,
    )


def read_mask(mask: ArrayLike | None, B: int, T: int, S: int) -> tuple[Booleans, Booleans]:
    """Which new tokens are real (B, T), and which slots each may read by the mask (B, T, S).

    A mask over tokens marks padding; a mask over pairs leaves every token real.
    """
    real, permitted = np.ones((B, T), dtype=bool), np.ones((B, T, S), dtype=bool)
    if mask is None:
        return real, permitted
    given = np.asarray(mask)
    if not np.isin(given, (0, 1)).all():
        raise ValueError("a mask has only 0 and 1, or false and true; true means may be read")
    given = given.astype(bool)
    if given.ndim == 2:
        return _shaped("mask", given, (B, T)), permitted
    if given.ndim == 4:
        return real, _shaped("mask", given, (B, 1, T, S))[:, 0]
    return real, _shaped("mask", given, (B, T, S))


def read_positions(positions: ArrayLike, B: int, T: int) -> Integers:
    """(T,) for all rows, or (B, T) → (B, T)."""
    given = _integers("positions", positions)
    if given.ndim == 1:
        return np.broadcast_to(_shaped("positions", given, (T,)), (B, T))
    return _shaped("positions", given, (B, T))


def _integers(name: str, given: ArrayLike) -> Integers:
    array = np.asarray(given)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} are integers, not {array.dtype}")
    return array.astype(np.int64)


def _shaped(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    return array


# --- The cache -----------------------------------------------------------------------------------


@dataclass
class Cache:
    """What is kept of the tokens seen: per layer K, already rotated, and V as projected.

    Per layer, `keys_values` holds two (B, h_kv, p, d_h) arrays and `frequencies` the θ under which
    the keys were rotated, (B, d_rotary / 2). The tokens are kept too: when a row grows into other
    frequencies, every entry is computed anew from them. Turning the keys alone would not do: from
    the second layer on, what is projected depends on the rotations before it.
    """

    config: Config | None = None
    slots: Slots | None = None
    keys_values: list[KeysValues] = field(default_factory=list)
    frequencies: list[Array] = field(default_factory=list)

    def still_valid(self, frequencies: list[Array]) -> bool:
        """Whether the entries were computed under these frequencies."""
        return len(self.keys_values) > 0 and all(
            np.array_equal(old, new) for old, new in zip(self.frequencies, frequencies, strict=True)
        )


# --- One layer -----------------------------------------------------------------------------------


def row_frequencies(rotary: Config | None, lengths: Integers) -> Array:
    """θ for each row's length, (B, d_rotary / 2); no columns where the layer does not rotate."""
    if rotary is None:
        return np.zeros((len(lengths), 0))
    return np.stack([rotary_frequencies(rotary, int(length)) for length in lengths])


def self_attention(
    config: Config,
    weights: Weights,
    name: str,
    x: Array,
    *,
    angles: Array,
    may_read: Booleans,
    cached: KeysValues | None,
) -> tuple[Array, KeysValues]:
    """Project, split heads, normalise q and k, rotate them, attend, join heads, project.

    x (B, T, d), angles (B, T, d_rotary / 2), may_read (B, T, S), cached keys and values
    (B, h_kv, p, d_h) → the result (B, T, d), and all keys and values (B, h_kv, S, d_h).
    """
    B, T, _ = x.shape
    h, h_kv, d_h = config["n_heads"], config["n_kv_heads"], config["d_head"]

    def heads(which: str, count: int) -> Array:
        projected = linear(weights, f"{name}.{which}", x, config["qkv_bias"])  # (B, T, count·d_h)
        return projected.reshape(B, T, count, d_h).transpose(0, 2, 1, 3)

    q, k, v = heads("q", h), heads("k", h_kv), heads("v", h_kv)
    if config["qk_norm"] is not None:
        q = norm_heads(config, weights, f"{name}.q_norm", q)
        k = norm_heads(config, weights, f"{name}.k_norm", k)
    if config["rotary"] is not None:
        factor = rotary_attention_factor(config["rotary"])
        q = rotate(q, angles, config["rotary"]["layout"], factor)
        k = rotate(k, angles, config["rotary"]["layout"], factor)
    if cached is not None:
        k, v = np.concatenate([cached[0], k], axis=2), np.concatenate([cached[1], v], axis=2)

    visible = within_window(may_read, config["window"])
    result = attention(q, k, v, visible, scale=config["scale"], soft_cap=config["soft_cap"])
    joined = result.transpose(0, 2, 1, 3).reshape(B, T, h * d_h)
    return linear(weights, f"{name}.out", joined, config["out_bias"]), (k, v)


def decoder_layer(
    config: Config,
    weights: Weights,
    name: str,
    x: Array,
    *,
    angles: Array,
    may_read: Booleans,
    cached: KeysValues | None,
) -> tuple[Array, KeysValues]:
    """One layer: u = x + Attn(Norm1(x)); y = u + FFN(Norm2(u)), and its variants as data.

    norm_placement pre normalises what a sub-layer reads, post what it returns, sandwich both.
    residual parallel: y = x + Attn(Norm1(x)) + FFN(Norm2(x)); parallel_shared_norm: Norm1 for
    both. residual_scale multiplies what is added. x (B, T, d) → y (B, T, d), and the keys and
    values to be cached.
    """
    placement, residual = config["norm_placement"], config["residual"]

    def before(number: int, x: Array) -> Array:
        if placement == "post":
            return x
        return norm(config["norm"], weights, f"{name}.norm{number}", x)

    def after(number: int, result: Array) -> Array:
        if placement == "pre":
            return result
        return norm(config["norm"], weights, f"{name}.post_norm{number}", result)

    attended, kept = self_attention(
        config["attention"],
        weights,
        f"{name}.attention",
        before(1, x),
        angles=angles,
        may_read=may_read,
        cached=cached,
    )
    u = x + config["residual_scale"] * after(1, attended)
    if residual == "sequential":
        read = before(2, u)
    elif residual == "parallel":
        read = before(2, x)
    else:
        read = before(1, x)
    result = feed_forward(config["feedforward"], weights, f"{name}.feedforward", read)
    y = u + config["residual_scale"] * after(2, result)
    return y, kept


# --- The whole decoder ---------------------------------------------------------------------------


def layers_of(config: Config) -> list[Config]:
    """One entry per layer: an entry of the configuration with `repeat: n` stands for n layers."""
    return [layer for layer in config["layers"] for _ in range(layer.get("repeat", 1))]


def embed(config: Config, weights: Weights, tokens: Integers, positions: Integers) -> Array:
    """Scaled embeddings, plus a position table where there is one: (B, T) → (B, T, d).

    Raises ValueError for a token outside the vocabulary or a position outside a learned table.
    """
    table = parameter(weights, "embedding.weight")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(table):
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} for a vocabulary of {len(table)}"
        )
    x = config["embedding_scale"] * table[tokens]
    if config["position_table"] == "sinusoidal":
        x = x + sinusoidal_table(positions, config["d_model"])
    if config["position_table"] == "learned":
        learned = parameter(weights, "position_table.weight")
        if positions.size and not 0 <= positions.min() <= positions.max() < len(learned):
            raise ValueError(
                f"positions from {positions.min()} to {positions.max()}; the learned table has "
                f"{len(learned)} and cannot give others"
            )
        x = x + learned[positions]
    return x


def project_to_vocabulary(config: Config, weights: Weights, x: Array) -> Array:
    """Final norm, head (the embedding when tied), bias, scale, soft cap: (B, T, d) → (B, T, V)."""
    if config["final_norm"] is not None:
        x = norm(config["final_norm"], weights, "final_norm", x)
    head = parameter(weights, "embedding.weight" if config["tie_head"] else "head.weight")
    logits = x @ head.T
    if config["head_bias"]:
        logits = logits + parameter(weights, "head.bias")
    logits = logits * config["logit_scale"]
    cap = config["final_soft_cap"]
    return logits if cap is None else cap * np.tanh(logits / cap)


def forward(
    config: Config,
    weights: Weights,
    tokens: ArrayLike,
    *,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    documents: ArrayLike | None = None,
    cache: Cache | None = None,
    rotary_length: ArrayLike | None = None,
) -> Array:
    """Logits of every token: (B, T) → (B, T, V).

    * positions (T,) or (B, T): any integers. Left out, a token's position is the count of real
      tokens before it in its row and document, cached ones among them.
    * mask, true or 1 for "may be read": (B, T) marks real tokens, the others are padding, which
      is neither read nor counted (what it computes itself means nothing, but is finite); (B, T, S)
      or (B, 1, T, S) says which new token may read which slot, S = T without a cache. Always
      combined with the causal rule, which goes by order in the sequence, not by position.
    * documents (B, T) integers: a token reads only tokens of its own document. Left out, 0.
    * cache: read, and extended with the new tokens. Raises ValueError when it was filled under
      another configuration.
    * rotary_length: the length for which the rotary frequencies are computed, one for all rows or
      one for each. Left out, a row's largest position of a real token plus one, cached or new.
    """
    cache = Cache() if cache is None else cache
    if cache.config is not None and cache.config != config:
        raise ValueError("the cache was filled under another configuration; start a new one")
    B, T = np.shape(tokens)
    layers = layers_of(config)
    slots = extend(
        no_slots(B) if cache.slots is None else cache.slots,
        tokens,
        positions=positions,
        mask=mask,
        documents=documents,
    )

    lengths = slots.lengths if rotary_length is None else np.broadcast_to(rotary_length, (B,))
    frequencies = [row_frequencies(layer["attention"]["rotary"], lengths) for layer in layers]
    still_valid = cache.still_valid(frequencies)
    start = slots.count - T if still_valid else 0  # the first slot that has to be computed

    x = embed(config, weights, slots.tokens[:, start:], slots.positions[:, start:])
    keys_values: list[KeysValues] = []
    for number, layer in enumerate(layers):
        x, kept = decoder_layer(
            layer,
            weights,
            f"layers.{number}",
            x,
            angles=slots.positions[:, start:, None] * frequencies[number][:, None, :],
            may_read=slots.may_read[:, start:],
            cached=cache.keys_values[number] if still_valid else None,
        )
        keys_values.append(kept)
    logits = project_to_vocabulary(config, weights, x)

    cache.config, cache.slots = config, slots
    cache.keys_values, cache.frequencies = keys_values, frequencies
    return logits[:, slots.count - T - start :]
