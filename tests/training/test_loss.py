"""Chunked cross-entropy is the plain one, forward and backward, without all logits in memory."""

import pytest
import torch
from torch.nn import functional as F

from armillary.data import packing
from armillary.training.loss import (
    IGNORED,
    chunked_cross_entropy,
    next_token_labels,
    next_token_loss,
)
from support.models import VOCABULARY, build, config, layer, tokens
from support.tensor_memory import TensorMemory

CHUNK = 8
WIDTH = 40


def example(n, *, seed=0, dtype=torch.float64, bias=False, ignored=(), vocabulary=VOCABULARY):
    """Hidden states, labels, weight and bias, large enough that no probability is near 1/V."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    labels = torch.randint(0, vocabulary, (n,), generator=generator)
    labels[list(ignored)] = IGNORED
    hidden, weight = random(n, WIDTH), random(vocabulary, WIDTH)
    return hidden, labels, weight, random(vocabulary) if bias else None


def plain(hidden, labels, weight, bias, *, soft_cap=None, z_loss=0.0):
    """The same in three lines of torch, with all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    squares = logits.logsumexp(-1)[labels != IGNORED].square().sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") + z_loss * squares


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None])


OPTIONS = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {}),
    "soft cap": ({}, {"soft_cap": 1.5}),
    "z-loss": ({}, {"z_loss": 0.3}),
    "all, some ignored": (
        {"bias": True, "ignored": [0, 3, 4, 16]},
        {"soft_cap": 1.5, "z_loss": 0.3},
    ),
    # The ignored are taken out before chunks are cut, so no chunk is empty of labels.
    "the whole last chunk ignored": ({"ignored": range(9, 17)}, {}),
}


@pytest.mark.parametrize("n", [5, 17, 27], ids="{} tokens".format)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_plain_cross_entropy(n, name):
    """Lengths that are no multiple of the chunk of 8; the first is less than one."""
    made, options = OPTIONS[name]
    made = made | {"ignored": [i for i in made.get("ignored", ()) if i < n]}
    hidden, labels, weight, bias = example(n, **made)
    ours = chunked_cross_entropy(hidden, labels, weight, bias, chunk=CHUNK, **options)
    theirs = plain(hidden, labels, weight, bias, **options)
    torch.testing.assert_close(ours.total, theirs, rtol=1e-12, atol=1e-12)
    without_z = plain(hidden, labels, weight, bias, **(options | {"z_loss": 0.0}))
    torch.testing.assert_close(ours.cross_entropy, without_z.detach(), rtol=1e-12, atol=1e-12)
    assert int(ours.count) == int((labels != IGNORED).sum())
    scale = 0.37  # what a mean over some other count makes of the gradient
    for mine, other in zip(
        gradients(ours.total * scale, hidden, weight, bias),
        gradients(theirs * scale, hidden, weight, bias),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_float32_equals_plain_to_1e_5():
    hidden, labels, weight, bias = example(27, dtype=torch.float32, bias=True, ignored=[2, 9])
    ours = chunked_cross_entropy(hidden, labels, weight, bias, chunk=CHUNK).total
    theirs = plain(hidden, labels, weight, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        gradients(ours, hidden, weight, bias), gradients(theirs, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    tensors = dict(zip(["hidden", "labels", "weight", "bias"], example(17, bias=True), strict=True))
    trained = [name for name in ("hidden", "weight", "bias") if name != frozen]
    wanted = gradients(plain(**tensors), *(tensors[name] for name in trained))
    tensors[frozen].requires_grad_(False)
    loss = chunked_cross_entropy(**tensors, chunk=CHUNK).total
    found = gradients(loss, *(tensors[name] for name in trained))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert tensors[frozen].grad is None


def test_nothing_to_learn_is_zero_and_counted_and_no_nan():
    """cases.md 90: the mean would be 0/0."""
    hidden, labels, weight, bias = example(11, bias=True, ignored=range(11))
    loss = chunked_cross_entropy(hidden, labels, weight, bias, chunk=CHUNK, z_loss=0.1)
    assert [float(x) for x in (loss.total.detach(), loss.cross_entropy, loss.count)] == [0, 0, 0]
    for gradient in gradients(loss.total, hidden, weight, bias):
        assert (gradient == 0).all()
    assert F.cross_entropy(hidden @ weight.T, labels).isnan()


def test_what_is_ignored_may_be_nan():
    hidden, labels, weight, _ = example(11, ignored=[4])
    with torch.no_grad():
        hidden[4] = float("nan")
    loss = chunked_cross_entropy(hidden, labels, weight, chunk=CHUNK)
    of_hidden, of_weight = gradients(loss.total, hidden, weight)
    assert loss.total.isfinite()
    assert of_weight.isfinite().all()
    assert (of_hidden[4] == 0).all()


def test_sums_over_the_global_count_are_the_mean_of_all_tokens():
    """cases.md 89: 1 token at loss 4 and 9 at loss 1 make 1.3; the mean of means is 2.5.

    The logits are the bias alone; a token of probability exp(−loss) costs that loss.
    """

    def batch(n, loss):
        p = torch.tensor([-loss], dtype=torch.float64).exp()
        bias = torch.cat([p, 1 - p]).log()
        labels = torch.zeros(n, dtype=torch.int64)
        zeros = torch.zeros(n, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
        return chunked_cross_entropy(zeros[0], labels, zeros[1], bias, chunk=2)

    parts = [batch(1, 4.0), batch(9, 1.0)]
    count = sum(part.count for part in parts)
    assert float(sum(part.total for part in parts) / count) == pytest.approx(1.3, abs=1e-12)
    means = [float(part.total / part.count) for part in parts]
    assert sum(means) / 2 == pytest.approx(2.5, abs=1e-12)


def test_low_precision_products_still_give_a_float32_loss():
    """cases.md 94: in bfloat16, 36.1, 36.2 and 36.3 are 36.0, 36.25 and 36.25.

    The logits here are exact in bfloat16 and only the log-sum-exp and the sums are not.
    """
    one = torch.eye(3, dtype=torch.bfloat16)
    labels = torch.tensor([0, 1, 2] * 100)
    weight = (36 * one).contiguous()
    loss = chunked_cross_entropy(one.repeat(100, 1), (labels + 1) % 3, weight, chunk=CHUNK)
    exact = 300 * torch.tensor([36.0, 0.0, 0.0], dtype=torch.float64).logsumexp(0)
    assert loss.total.dtype == loss.cross_entropy.dtype == torch.float32
    torch.testing.assert_close(loss.total.double(), exact, rtol=1e-6, atol=0)
    offset = chunked_cross_entropy(one, torch.tensor([1, 2, 0]), weight / 32, chunk=1)
    exact = 3 * torch.tensor([1.125, 0.0, 0.0], dtype=torch.float64).logsumexp(0)
    torch.testing.assert_close(offset.total.double(), exact, rtol=1e-6, atol=0)
    assert torch.tensor([36.1, 36.2, 36.3]).bfloat16().tolist() == [36.0, 36.25, 36.25]


def test_under_autocast_products_are_narrow_and_gradients_are_summed_in_float32():
    """With 4 chunks the head's gradient is at most as far from float32's as the plain one."""
    hidden, labels, weight, _ = example(32, dtype=torch.float32)
    exact = gradients(plain(hidden, labels, weight, None), hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, labels, weight, chunk=CHUNK).total
        theirs = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=1e-3, atol=0)
    ours, other = gradients(loss, hidden, weight), gradients(theirs, hidden, weight)
    for mine, peer, right in zip(ours, other, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() <= 1.1 * (peer - right).norm()
        assert not torch.equal(mine, right)


def test_gradients_are_in_the_type_of_the_parameters_and_rounded_to_it_at_the_end():
    """With 96 chunks, and about as far from exact as with one; summed in bfloat16, 3 times."""
    tensors = example(96, dtype=torch.bfloat16, bias=True)
    hidden, labels, weight, bias = tensors
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    exact = gradients(plain(wide[0], labels, *wide[1:]), *wide)
    errors = []
    for chunk in (1, 96):
        loss = chunked_cross_entropy(*tensors, chunk=chunk).total
        found = gradients(loss, hidden, weight, bias)
        assert {gradient.dtype for gradient in found} == {torch.bfloat16}
        errors.append([(a - b).norm() for a, b in zip(found, exact, strict=True)])
    for many, one in zip(*errors, strict=True):
        assert many < 1.5 * one


def peak(n, *, chunk, run=chunked_cross_entropy, **options):
    """Bytes at the peak of a forward and backward pass, without `hidden` and its gradient."""
    hidden, labels, weight, bias = example(
        n, dtype=torch.float32, bias=True, vocabulary=997, ignored=[1]
    )
    with TensorMemory() as memory:
        loss = run(hidden, labels, weight, bias, **({"chunk": chunk} if chunk else {}), **options)
        (loss.total if chunk else loss).backward()
        del loss
    return memory.peak - 2 * hidden.nbytes


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "z_loss": 0.1}], ids=["plain", "all"])
def test_peak_memory_is_flat_in_the_number_of_chunks(options):
    """cases.md 98. Labels and the list of kept tokens are all that grows: by less than a 60th of
    the logits.
    """
    few, many = peak(64, chunk=32, **options), peak(640, chunk=32, **options)
    logits = 4 * 640 * 997
    assert many - few < logits / 60
    assert many < logits / 2
    assert peak(640, chunk=None, run=plain, **options) > 2 * logits


def test_logits_whose_squares_overflow_are_no_nan_without_a_z_loss():
    hidden, weight = torch.full((1, 1), 1e20), torch.tensor([[1.0], [0.5]])
    loss = chunked_cross_entropy(hidden, torch.tensor([1]), weight)
    assert float(loss.total) == pytest.approx(5e19)


def test_labels_may_be_integers_of_any_type():
    hidden, labels, weight, _ = example(11, ignored=[4])
    losses = [
        chunked_cross_entropy(hidden, labels.to(kind), weight).total
        for kind in (torch.int8, torch.int32, torch.int64)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_gradients_are_given_out_once():
    hidden, labels, weight, _ = example(5)
    loss = chunked_cross_entropy(hidden, labels, weight).total
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_without_gradients_only_the_loss_is_computed():
    hidden, labels, weight, _ = example(17)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, labels, weight, chunk=CHUNK)
    assert not loss.total.requires_grad
    torch.testing.assert_close(loss.total, plain(hidden, labels, weight, None).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels of shape \(4,\).*\(5,\)"),
        ({"weight": torch.zeros(61, 39)}, r"\(61, 39\).*width 40"),
        ({"bias": torch.zeros(60)}, r"bias of shape \(60,\)"),
        ({"labels": torch.full((5,), 61)}, "label 61 is outside the vocabulary of 61"),
        ({"labels": torch.full((5,), -1)}, "label -1 is outside"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, labels, weight, _ = example(5)
    arguments = {"hidden": hidden, "labels": labels, "weight": weight} | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**arguments)


HEADS = {
    "own": config(),
    "tied": config(tie_head=True),
    "tied with bias": config(tie_head=True, head_bias=True),
    "soft cap": config(final_soft_cap=1.5, head_bias=True),
    "scale": config(logit_scale=0.4, tie_head=True),
    "scale, bias and soft cap": config(logit_scale=3.0, final_soft_cap=1.5, head_bias=True),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_decoders_loss_is_that_of_its_logits(name):
    decoder = build(HEADS[name])
    ids = tokens(3, 7)
    labels = next_token_labels(ids)
    ours = next_token_loss(decoder, decoder.hidden(ids), labels, chunk=CHUNK).total
    theirs = F.cross_entropy(decoder(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    parameters = list(decoder.parameters())
    for mine, other in zip(
        gradients(ours, *parameters), gradients(theirs, *parameters), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_labels_are_the_next_tokens_and_the_last_has_none():
    assert next_token_labels(torch.tensor([[5, 6, 7], [8, 9, 10]])).tolist() == [
        [6, 7, IGNORED],
        [9, 10, IGNORED],
    ]


def test_the_label_across_a_seam_is_ignored():
    documents = torch.tensor([[0, 0, 0, 1, 1, 7]])
    labels = next_token_labels(torch.tensor([[1, 2, 3, 4, 5, 6]]), documents)
    assert labels.tolist() == [[2, 3, IGNORED, 5, IGNORED, IGNORED]]


def test_padding_goes_by_place_and_not_by_id():
    """cases.md 96: the token that ends a text also pads; as the text's end it is learned."""
    ids, mask = torch.tensor([[5, 6, 9, 9]]), torch.tensor([[1, 1, 1, 0]])
    assert next_token_labels(ids, mask=mask).tolist() == [[6, 9, IGNORED, IGNORED]]


def test_nothing_is_predicted_from_padding():
    ids, mask = torch.tensor([[9, 9, 5, 6]]), torch.tensor([[0, 0, 1, 1]])
    assert next_token_labels(ids, mask=mask).tolist() == [[IGNORED, IGNORED, 6, IGNORED]]


def test_the_first_token_of_an_answer_is_learned():
    learn = torch.tensor([[False, False, True, True]])
    labels = next_token_labels(torch.tensor([[1, 2, 3, 4]]), learn=learn)
    assert labels.tolist() == [[IGNORED, 3, 4, IGNORED]]


@pytest.mark.parametrize("name", ["documents", "mask", "learn"])
def test_labels_refuse_what_is_not_shaped_as_the_tokens(name):
    with pytest.raises(ValueError, match=rf"{name} of shape \(1, 2\) for tokens of shape \(1, 3\)"):
        next_token_labels(torch.zeros(1, 3), **{name: torch.zeros(1, 2)})


def step_gradients(decoder, ids, labels, splits):
    """Gradients of a step whose batch is cut into micro-batches of these many rows."""
    decoder.zero_grad()
    count = (labels != IGNORED).sum()
    for rows, answers in zip(ids.split(splits), labels.split(splits), strict=True):
        (next_token_loss(decoder, decoder.hidden(rows), answers).total / count).backward()
    return torch.cat([parameter.grad.flatten() for parameter in decoder.parameters()])


def test_gradients_do_not_depend_on_how_a_step_is_split():
    """cases.md 89, with unequal counts of tokens in the rows and none in one of them."""
    decoder = build(config(tie_head=True), dtype=torch.float32, std=0.1)
    ids = tokens(4, 9)
    lengths = torch.tensor([9, 2, 0, 5])
    labels = next_token_labels(ids, mask=torch.arange(9) < lengths[:, None])
    whole = step_gradients(decoder, ids, labels, [4])
    for splits in ([1, 1, 1, 1], [2, 2]):
        torch.testing.assert_close(
            step_gradients(decoder, ids, labels, splits), whole, rtol=0, atol=1e-6
        )


def test_a_packed_row_loses_what_its_documents_lose_alone():
    """cases.md 91: documents of 3 and 5 tokens; sums of tokens, so weights come by themselves."""
    decoder = build(config(layer(), layer(attention={"window": 3})))
    ids = tokens(1, 8)
    documents = torch.tensor([[4] * 3 + [9] * 5])

    def loss(row, of=None):
        labels = next_token_labels(row, of)
        return next_token_loss(decoder, decoder.hidden(row, documents=of), labels)

    packed, alone = loss(ids, documents), [loss(ids[:, :3]), loss(ids[:, 3:])]
    assert int(packed.count) == sum(int(part.count) for part in alone) == 6
    torch.testing.assert_close(packed.total, sum(part.total for part in alone), rtol=1e-12, atol=0)
    mean = sum(float(part.cross_entropy) for part in alone) / 6
    assert float(packed.cross_entropy / packed.count) == pytest.approx(mean, rel=1e-12)
    parameters = list(decoder.parameters())
    for mine, other in zip(
        gradients(packed.total, *parameters),
        gradients(sum(part.total for part in alone), *parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    changed = ids.clone()
    changed[0, :3] = (changed[0, :3] + 1) % VOCABULARY
    second = decoder(ids, documents=documents)[:, 3:]
    assert torch.equal(decoder(changed, documents=documents)[:, 3:], second)


def test_a_label_to_ignore_is_the_one_that_packing_writes():
    assert IGNORED == packing.IGNORED
