"""What is trained is what generates and what is read again (case 38): one forward pass for all."""

import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.data import prepare
from armillary.extension.adapt_config import AdaptConfig
from armillary.extension.apply import apply
from armillary.extension.rules import RuleOptions
from armillary.language_model import load
from armillary.parts.kv_cache import KVCache
from armillary.training.objective import Objective
from armillary.training.parallel.ranks import Ranks
from armillary.training.setup import open_model, prepare_run
from support.adaptations import TARGET, WINDOW, entries, prepare_directory, source

RULES = {
    "linear": RuleOptions(),
    "yarn": RuleOptions(),
    "yarn, explicit": RuleOptions(attention_factor=1.3),
    "longrope": RuleOptions(short_factors=(1.0,) * 5, long_factors=(1.0, 1.5, 2.5, 3.5, 4.0)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model, texts, and these as tokens."""
    made = prepare_directory(tmp_path_factory.mktemp("forward"))
    prepare([str(made / "texts")], source(made).tokenizer, made / "data", validation=0.2)
    return made


@pytest.mark.parametrize("name", RULES)
def test_trainer_generator_and_reload_give_the_same_logits(directory, tmp_path, name):
    """Within the original window, where a rule's attention factor counts too, and beyond it."""
    rule = name.split(",")[0]
    out = tmp_path / "model"
    apply(source(directory), out, to=TARGET, rule=rule, options=RULES[name])
    config = AdaptConfig.from_dict(entries(directory))
    run = config.run(1, model=out, data=directory / "data", out=tmp_path / "run", window=WINDOW)
    work = prepare_run(run, open_model(run), Ranks.single())
    objective = Objective(work.decoder).train()

    lm = load(out, dtype="float32")
    lm.save(tmp_path / "ours")
    again = load(tmp_path / "ours", dtype="float32")
    assert open_checkpoint(tmp_path / "ours").format == "armillary"
    ids = torch.from_numpy(work.train.batch(0).tokens[:1]).long()
    for length in (WINDOW, TARGET):
        tokens = ids[:, :length]
        with torch.no_grad():
            trained = objective.decoder.project(objective.decoder.hidden(tokens))
            read = again.decoder(tokens)
            stepped = step_by_step(lm.decoder, tokens)
        # Step by step, rules that vary with the length see a shorter text at the earlier tokens.
        kept = slice(-1, None) if rule == "longrope" else slice(None)
        torch.testing.assert_close(read, trained, rtol=0, atol=1e-5)
        torch.testing.assert_close(stepped[:, kept], trained[:, kept], rtol=0, atol=1e-4)
    plain = load(directory / "model", dtype="float32").decoder
    with torch.no_grad():
        assert (plain(ids[:, :WINDOW]) - objective.decoder(ids[:, :WINDOW])).abs().max() > 1e-2


def step_by_step(decoder, tokens):
    cache = KVCache(decoder.config)
    parts = [decoder(tokens[:, :40], cache=cache)]
    parts += [decoder(tokens[:, at : at + 1], cache=cache) for at in range(40, tokens.shape[1])]
    return torch.cat(parts, dim=1)
