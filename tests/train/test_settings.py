"""Settings: what is read, what is refused, and the recipes that come with the package."""

import itertools

import pytest

from tests.conftest import ROOT
from vitkern import ViT
from vitkern.__main__ import main
from vitkern.train import build, recipes
from vitkern.train.settings import Settings, by_key, parse, read


@pytest.mark.parametrize(
    "found, words",
    [
        ({"optimizer": {"learning_rat": 1.0}}, r"no key 'learning_rat'"),
        ({"optimizer": {"lrr": 1.0}}, r"did you mean lr\?"),
        ({"optimiser": {}}, r"no section 'optimiser'; did you mean optimizer\?"),
        ({"model": {"drop_pat": 0.1}}, r"did you mean drop_path\?"),
        ({"optimizer": {"lr": "fast"}}, r"\[optimizer\] lr must be a number, not 'fast'"),
        ({"loop": {"batch": 0}}, "batch must be from 1"),
        ({"loop": {"batch": True}}, "must be an integer"),
        ({"loop": {"precision": "fp8"}}, r"no value 'fp8'"),
        ({"optimizer": {"lr": float("nan")}}, "must be at least 0"),
        ({"optimizer": {"lr": float("inf")}}, "must be finite"),
        ({"data": 3}, "must be a table"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_are_refused_clearly(found, words):
    with pytest.raises(ValueError, match=words):
        parse(found, "a.toml")


def test_what_is_written_is_read_back(tmp_path):
    for name in recipes.names():
        settings = recipes.settings(name)
        path = tmp_path / f"{name}.toml"
        path.write_text(settings.text(), encoding="utf-8")
        assert read(path) == settings


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("lr = = 3")
    with pytest.raises(ValueError, match="not TOML"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "b.toml")


@pytest.mark.parametrize("text, value", [("0.1", 0.1), ('"mean"', "mean"), ("mean", "mean")])
def test_keys_take_toml_s_values_and_bare_words(text, value):
    assert by_key("model.pool", text, "--set") == {"model": {"options": {"pool": value}}}


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_builds_its_model(name):
    settings = recipes.settings(name)
    assert len(settings.about) > 60
    options = dict(settings.model.options)
    assert ViT(settings.model.name, device="meta", classes=10, **options)


def parameters(name: str) -> int:
    settings = recipes.settings(name)
    model = ViT(settings.model.name, device="meta", classes=10, **settings.model.options)
    return sum(p.numel() for p in model.parameters())


def test_the_models_of_the_recipes_have_the_parameters_they_promise():
    assert parameters("cifar10-large") == 302_520_350
    assert parameters("cifar10-small") <= 1_500_000


def test_recipes_have_the_settings_of_their_sources():
    pretrain, finetune = recipes.settings("paper-pretrain"), recipes.settings("paper-finetune")
    assert (pretrain.loop.batch, pretrain.optimizer.weight_decay) == (4096, 0.1)
    assert (pretrain.optimizer.beta1, pretrain.optimizer.beta2) == (0.9, 0.999)
    assert (pretrain.schedule.decay, pretrain.schedule.warmup) == ("linear", 10_000)
    assert (finetune.optimizer.optimizer, finetune.optimizer.momentum) == ("sgd", 0.9)
    assert (finetune.loop.batch, finetune.optimizer.clip) == (512, 1.0)
    large = recipes.settings("cifar10-large")
    assert (large.optimizer.optimizer, large.optimizer.lr) == ("adam", 5e-7)
    assert (large.loop.batch, large.schedule.epochs, large.loop.seed) == (512, 800, 123)
    rates = {"lr1e-4": (1e-4, 10), "lr3e-4": (3e-4, 10), "augmented": (3e-4, 50)}
    for name, (lr, epochs) in rates.items():
        settings = recipes.settings(f"cifar10-b16-{name}")
        assert (settings.optimizer.lr, settings.schedule.epochs) == (lr, epochs)
        assert settings.loop.batch == 64 and settings.model.options["attention_dropout"] == 0.1


def test_the_augmented_recipe_has_the_settings_of_its_source():
    """Flips, rotations, decay and smoothing as it says; how strong the colour jitter is, it does
    not say: 0.2 for brightness, contrast and saturation and 0.1 for hue are our choice."""
    s = recipes.settings("cifar10-b16-augmented")
    assert (s.model.name, s.model.options["image_size"]) == ("B/16", 224)
    assert s.model.options["dropout"] == s.model.options["attention_dropout"] == 0.1
    assert (s.data.kind, s.data.normalisation) == ("cifar10", "imagenet")
    assert (s.data.flip, s.data.rotation) == (0.5, 15.0)
    jitter = (s.data.brightness, s.data.contrast, s.data.saturation, s.data.hue)
    assert jitter == (0.2, 0.2, 0.2, 0.1)
    assert (s.optimizer.optimizer, s.optimizer.lr, s.optimizer.weight_decay) == (
        "adamw",
        3e-4,
        1e-4,
    )
    assert (s.schedule.epochs, s.loop.batch, s.loop.label_smoothing) == (50, 64, 0.1)
    assert (s.data.mixup, s.data.cutmix, s.loop.ema) == (0, 0, 0), "nothing that it does not have"


def test_the_paper_s_weight_decay_is_attributed():
    """0.1 is of the text, 0.03 of table 3 for ImageNet-21k: whoever reads one looks for it."""
    s = recipes.settings("paper-pretrain")
    assert s.optimizer.weight_decay == 0.1
    assert all(words in s.about for words in ("section 4.1", "table 3", "--weight-decay 0.03"))
    finer = s.changed({"optimizer": {"weight_decay": 0.03}}, "--weight-decay")
    assert (finer.optimizer.weight_decay, finer.schedule.epochs) == (0.03, 90)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean digits"):
        recipes.settings("digit")


def test_learning_rate_rises_then_falls_to_its_end():
    s = parse({"schedule": {"warmup": 10, "decay": "cosine", "final_lr": 0.1}}, "x").schedule
    rates = [build.learning_rate(s, 1.0, step, 100, 10) for step in range(100)]
    assert rates[:10] == [pytest.approx((i + 1) / 10) for i in range(10)]
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    s = parse({"schedule": {"decay": "linear"}}, "x").schedule
    assert build.learning_rate(s, 1.0, 50, 101, 10) == pytest.approx(0.5)


def test_flags_change_a_recipe(capsys):
    flags = ["--recipe", "digits", "--lr", "0.5", "--epochs", "3", "--no-decay-all", "--show"]
    assert main(["train", *flags, "--set", "model.drop_path=0.25"]) == 0
    said = capsys.readouterr().out
    assert "lr = 0.5\n" in said and "epochs = 3\n" in said and "drop_path = 0.25" in said


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--recipe", "digit"], "did you mean digits"),
        (["--config", "absent.toml"], "no such file"),
        (["--lr", "-1"], "--lr: [optimizer] lr must be at least 0"),
        (["--set", "loop.bach=3"], "did you mean"),
        (["--set", "lr"], "KEY=VALUE"),
        (["--resume", "absent"], "no run was started"),
        ([], "no data is named"),
        (["--repeats", "0"], "at least once"),
    ],
    ids=str,
)
def test_wrong_flags_are_refused_in_one_line(capsys, flags, words):
    assert main(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_every_recipe_is_on_the_page_of_training():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in recipes.names())


def test_defaults_are_settings():
    assert parse({}, "x", "run") == Settings()
