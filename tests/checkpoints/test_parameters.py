"""The list of parameters is the decoder's own, and tensors fill it one to one."""

import numpy as np
import pytest

from armillary.checkpoints.parameters import assign, parameter_shapes
from armillary.checkpoints.tensors import StoredTensor
from armillary.decoder import Decoder
from armillary.errors import CheckpointError
from support.models import EVERY_VARIANT as VARIANTS
from support.models import config


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_those_of_the_decoder(variant):
    decoder = Decoder(VARIANTS[variant])
    expected = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    assert parameter_shapes(VARIANTS[variant]) == expected


CONFIG = config()


def tensors():
    return {
        name: StoredTensor(name, shape, "F32", np.zeros(4 * int(np.prod(shape)), "u1"), "f")
        for name, shape in parameter_shapes(CONFIG).items()
    }


def test_every_tensor_is_assigned_under_our_name():
    assigned = assign(CONFIG, tensors(), "f")
    assert {name: tensor.shape for name, tensor in assigned.items()} == parameter_shapes(CONFIG)
    assert all(tensor.name == name for name, tensor in assigned.items())


FIRST = "layers.0.attention.q.weight"


def renamed(found):
    found["layers.0.attention.w_q.weight"] = found.pop(FIRST)


def with_prefix(found):
    for name in list(found):
        found[f"model.{name}"] = found.pop(name)


def extra(found):
    found["layers.2.norm1.weight"] = found["layers.1.norm1.weight"]


def transposed(found):
    found["layers.0.attention.k.weight"] = StoredTensor(
        "k", (40, 20), "F32", np.zeros(3200, np.uint8), "f.gguf"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            renamed,
            r"f: tensors do not fit the decoder: missing 'layers\.0\.attention\.q\.weight' "
            r"\(did you mean 'layers\.0\.attention\.w_q\.weight'\?\); belonging to no par",
        ),
        (with_prefix, r"missing 'embedding\.weight'.* and 18 more; belonging to no"),
        (extra, r"belonging to no parameter 'layers\.2\.norm1\.weight' \(did you mean"),
        (lambda found: found.pop(FIRST), "missing 'layers.0.attention.q.weight'$"),
        (transposed, r"f\.gguf: tensor 'layers.* has shape \[40, 20\], .* asks for \[20, 40\]"),
    ],
)
def test_tensors_that_do_not_fit_are_fatal(damage, message):
    """Cases.md 75."""
    found = tensors()
    damage(found)
    with pytest.raises(CheckpointError, match=message) as caught:
        assign(CONFIG, found, "f")
    assert "\n" not in str(caught.value)


def test_missing_tensors_can_be_allowed_but_no_others():
    found = tensors()
    found.pop(FIRST)
    assigned = assign(CONFIG, found, "f", allow_missing=True)
    assert set(parameter_shapes(CONFIG)) - set(assigned) == {"layers.0.attention.q.weight"}
    extra(found)
    with pytest.raises(CheckpointError, match="belonging to no parameter"):
        assign(CONFIG, found, "f", allow_missing=True)
