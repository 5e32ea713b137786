"""What a block keeps for its backward: the page has what is counted; it is less than eager's."""

import pytest

from tools import recipe_costs, saved_memory
from vitkern import ViTConfig
from vitkern.bench import timm_import

timm_import.prepare()
pytest.importorskip("timm", exc_type=ImportError)


@pytest.mark.parametrize(
    "names",
    [("Ti/16",), pytest.param(saved_memory.MODELS, marks=pytest.mark.full)],
    ids=["small", "all"],
)
def test_the_page_has_what_is_counted(names):
    counted, page = saved_memory.lines(names), saved_memory.PAGE.read_text()
    assert len(counted) == len(names) * len(saved_memory.PRECISIONS)
    assert all(line in page for line in counted), "run python -m tools.saved_memory"


@pytest.mark.parametrize("precision", saved_memory.PRECISIONS)
def test_a_block_keeps_less_than_eager_s(precision):
    ours, theirs = (
        saved_memory.kept(name, "Ti/16", precision) for name in saved_memory.CONTESTANTS
    )
    assert 0 < ours.an_image < 0.7 * theirs.an_image
    assert ours.a_step <= theirs.a_step


@pytest.mark.parametrize("name", ("Ti/16", "S/16"))
def test_what_a_recipe_is_said_to_keep_is_what_is_kept(name):
    config = ViTConfig.named(name)
    for computed, counted in (("fp32", "fp32"), ("bf16", "autocast")):
        seen = saved_memory.kept("vitkern", name, counted).an_image
        each = recipe_costs.kept_bytes(config, computed) / config.depth
        assert each == pytest.approx(seen, rel=0.01)
