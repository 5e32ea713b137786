"""Every timm name that vitkern knows is timm's model: its configuration, parameters and classes."""

import pytest
import torch

from tools import timm_coverage
from vitkern import ViT, ViTConfig, names
from vitkern.bench import timm_import
from vitkern.foreign import timm as timm_models

timm_import.prepare()
timm = pytest.importorskip("timm", exc_type=ImportError)

PREFIXES = (
    "eva",
    "vit_",
    "deit_",
    "deit3_",
    "flexivit_",
    "beit_",
    "beitv2_",
)


def expressible() -> dict[str, ViTConfig]:
    """Every model of timm's that ViTConfig can express, by name."""
    found = {}
    with torch.device("meta"):
        for name in timm.list_models():
            if name.startswith(PREFIXES):
                try:
                    found[name] = timm_models.config_of(timm.create_model(name))
                except ValueError:
                    continue
    return found


@pytest.mark.full
def test_no_fewer_models_are_accelerated():
    taken, refused = timm_coverage.survey()
    assert len(taken) >= 241 and all(refused)


@pytest.mark.full
def test_every_expressible_model_of_timm_has_its_name():
    theirs = expressible()
    assert len(theirs) >= 244
    assert sorted(theirs) == names.timm_names()
    for name, config in theirs.items():
        ours = ViTConfig.named(name)
        assert ours.grid == config.grid, name
        known = dict(image_size=config.image_size, mean=config.mean, std=config.std)
        assert ours.replace(**known) == config, name


@pytest.mark.parametrize(
    "name",
    """vit_base_patch16_224_miil flexivit_small vit_intern300m_patch14_448 vit_huge_patch14_224
    vit_so150m2_patch16_reg1_gap_384 vit_base_patch14_reg1_tipsv2 vit_xsmall_patch16_clip_224
    vit_medium_patch16_gap_240 vit_so400m_patch14_siglip_gap_378 vit_large_patch32_224
    vit_so400m_patch14_siglip_384 vit_pe_core_tiny_patch16_384 vit_pe_core_gigantic_patch14_448
    deit_tiny_distilled_patch16_224 vit_srelpos_small_patch16_224
    vit_base_patch16_rpn_224 vit_large_patch14_xp_224 vit_small_patch16_18x2_224
    vit_base_r50_s16_384 vit_small_resnet26d_224 vit_pwee_patch16_reg1_gap_256""".split(),
)
def test_parameters_are_timms(name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    ours = ViT(name, device="meta")
    assert ours.num_classes == theirs.num_classes
    shapes = {n: p.shape for n, p in ours.named_parameters()}
    assert shapes == {n: p.shape for n, p in theirs.named_parameters()}


def test_names_of_timm_are_known_without_timm():
    assert len(names.timm_names()) >= 244
    for name in names.timm_names():
        ViTConfig.named(name)


@pytest.mark.parametrize("name", ["vit_wee_patch16_224", "vit_base_patch16_dinov2_x", "vit_base"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="unknown variant"):
        ViTConfig.named(name)
