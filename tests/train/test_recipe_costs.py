"""What recipes need: the page has what the code computes, and that agrees with what is known."""

import pytest

from tools import recipe_costs
from vitkern import ViTConfig
from vitkern.train import recipes


@pytest.mark.full
def test_the_page_has_the_table():
    assert recipe_costs.table() in recipe_costs.PAGE.read_text(), "run python -m tools.recipe_costs"


def test_the_step_whose_rate_is_taken_is_published():
    """Results files are renamed when machines are added."""
    assert recipe_costs.STEPS.is_file() and recipe_costs.cpu_rate("fp32") > 1e11


def test_a_recipe_costs_what_its_model_does():
    it = recipe_costs.cost(recipes.settings("cifar10-b16-lr1e-4"))
    assert it.images == pytest.approx(10 * 50_000, rel=1e-3), "ten epochs"
    assert it.flops == pytest.approx(3 * 2 * 17.56e9, rel=0.01), "17.6 GMAC a forward"
    assert it.state == 16 * it.parameters == 16 * 85_806_346
    large = recipe_costs.cost(recipes.settings("cifar10-large"))
    assert large.parameters == 302_520_350


def test_kept_bytes_are_those_that_a_step_was_seen_to_keep():
    """The page's measured 6.06 and 1.52 MB for a block and an image."""
    for name, seen in (("B/16", 6.06e6), ("Ti/16", 1.52e6)):
        config = ViTConfig.named(name)
        kept = recipe_costs.kept_bytes(config, "fp32") / config.depth
        assert kept == pytest.approx(seen, rel=0.01)
        assert recipe_costs.kept_bytes(config, "bf16") / config.depth < 0.7 * kept
