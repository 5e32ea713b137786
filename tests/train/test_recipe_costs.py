"""What recipes need: the page has what the code computes, and that agrees with what is known."""

import pytest

from tools import recipe_costs
from vitkern.train import recipes


def test_the_page_has_the_table():
    assert recipe_costs.table() in recipe_costs.PAGE.read_text(), "run python -m tools.recipe_costs"


def test_the_rate_is_that_of_the_class_measured_last(monkeypatch):
    def step(date, seconds):
        name, batch = recipe_costs.MEASURED
        row = {"model": name, "batch": batch, "contestant": "vitkern", "precision": "fp32"}
        return [{**row, "contestant": "eager", "us": 1.0, "date": date},
                {**row, "us": seconds * 1e6, "date": date}]  # fmt: skip

    def published(**files):
        monkeypatch.setattr(recipe_costs.tables, "all_published", lambda: files)
        recipe_costs.recorded.cache_clear()
        return recipe_costs.recorded

    try:
        old, new = step("2026-01-31", 9.0), step("2026-02-01", 3.0)
        assert published(amx=old, avx2=new)() == ("avx2", "2026-02-01", {"fp32": 3.0})
        assert published(amx=new, avx2=old)().machine_class == "amx"
        with pytest.raises(SystemExit, match="make bench-training"):
            published(amx=[])()
    finally:
        recipe_costs.recorded.cache_clear()


def test_a_recipe_costs_what_its_model_does():
    it = recipe_costs.cost(recipes.settings("cifar10-b16-lr1e-4"))
    assert it.images == pytest.approx(10 * 50_000, rel=1e-3), "ten epochs"
    assert it.flops == pytest.approx(3 * 2 * 17.56e9, rel=0.01), "17.6 GMAC a forward"
    assert it.state == 16 * it.parameters == 16 * 85_806_346
    large = recipe_costs.cost(recipes.settings("cifar10-large"))
    assert large.parameters == 302_520_350
