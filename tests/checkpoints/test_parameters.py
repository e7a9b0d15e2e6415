"""The list of parameters is the decoder's own, and tensors fill it one to one."""

import numpy as np
import pytest

from armillary.checkpoints.parameters import assign, names_in_file, parameter_shapes
from armillary.checkpoints.tensors import StoredTensor
from armillary.decoder import Decoder
from armillary.errors import CheckpointError
from support.models import TORCH_VARIANTS as VARIANTS
from support.models import config


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_those_of_the_decoder(variant):
    decoder = Decoder(VARIANTS[variant])
    expected = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    assert parameter_shapes(VARIANTS[variant]) == expected


CONFIG = config()
NAMES = {ours: "their." + ours for ours in parameter_shapes(CONFIG)}


def tensors():
    return {
        NAMES[ours]: StoredTensor(
            NAMES[ours], shape, "F32", np.zeros(4 * int(np.prod(shape)), "u1"), "f"
        )
        for ours, shape in parameter_shapes(CONFIG).items()
    }


def test_every_tensor_is_assigned_under_our_name():
    assigned = assign(CONFIG, tensors(), NAMES, "f")
    assert {name: tensor.shape for name, tensor in assigned.items()} == parameter_shapes(CONFIG)
    assert all(tensor.name == name for name, tensor in assigned.items())


FIRST = "their.layers.0.attention.q.weight"


def renamed(found):
    found["their.layers.0.attention.w_q.weight"] = found.pop(FIRST)


def without_prefix(found):
    for name in list(found):
        found[name.removeprefix("their.")] = found.pop(name)


def extra(found):
    found["their.layers.2.norm1.weight"] = found["their.layers.1.norm1.weight"]


def transposed(found):
    found["their.layers.0.attention.k.weight"] = StoredTensor(
        "k", (40, 20), "F32", np.zeros(3200, np.uint8), "f.gguf"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            renamed,
            r"f: tensors do not fit the decoder: missing 'their\.layers\.0\.attention\.q\.weight' "
            r"\(did you mean 'their\.layers\.0\.attention\.w_q\.weight'\?\); belonging to no par",
        ),
        (without_prefix, r"missing 'their\.embedding\.weight'.* and 18 more; belonging to no"),
        (extra, r"belonging to no parameter 'their\.layers\.2\.norm1\.weight' \(did you mean"),
        (lambda found: found.pop(FIRST), "missing 'their.layers.0.attention.q.weight'$"),
        (transposed, r"f\.gguf: tensor 'their.* has shape \[40, 20\], .* asks for \[20, 40\]"),
    ],
)
def test_tensors_that_do_not_fit_are_fatal(damage, message):
    """Cases.md 75."""
    found = tensors()
    damage(found)
    with pytest.raises(CheckpointError, match=message) as caught:
        assign(CONFIG, found, NAMES, "f")
    assert "\n" not in str(caught.value)


def test_missing_tensors_can_be_allowed_but_no_others():
    found = tensors()
    found.pop(FIRST)
    assigned = assign(CONFIG, found, NAMES, "f", allow_missing=True)
    assert set(parameter_shapes(CONFIG)) - set(assigned) == {"layers.0.attention.q.weight"}
    extra(found)
    with pytest.raises(CheckpointError, match="belonging to no parameter"):
        assign(CONFIG, found, NAMES, "f", allow_missing=True)


def test_a_parameter_without_a_name_in_the_family_is_an_error():
    with pytest.raises(
        CheckpointError, match=r"no name for the parameter layers\.0\.norm1\.weight"
    ):
        names_in_file(CONFIG, {"embedding.weight": "e"}, "f")
