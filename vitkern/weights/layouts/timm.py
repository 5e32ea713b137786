"""timm's VisionTransformer, whose names are vitkern's own."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ...config import STEMS, ViTConfig
from .base import (
    PLAIN,
    Checkpoint,
    Layout,
    Refused,
    Rule,
    heads_of,
    pairs,
    patch_fields,
    place_fields,
    plain_blocks,
)  # fmt: skip

ROWS = ("cls_token", "reg_token", "pos_embed", "pos_embed_y", "pos_embed_x")
LAYERS = ("patch_embed.proj", "norm_pre", "norm", "fc_norm", "pre_logits.fc", "head", "head_norm")
OF_A_BLOCK = ("norm1", "attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.q_norm",
              "attn.k_norm", "attn.norm", "attn.proj", "norm2", "mlp.fc1", "mlp.fc1_g", "mlp.fc1_x",
              "mlp.norm", "mlp.fc2")  # fmt: skip
VECTORS = ("attn.relative_position_bias_table", "attn.q_bias", "attn.v_bias", "ls1.gamma",
           "ls2.gamma")  # fmt: skip
STEM = (0, 1, 4, 5, 8, 9)  # convolutions and norms of vitkern's own stem (stem.py)
# The first convolution of a hybrid's stem.
FIRST = tuple(f"patch_embed.backbone.{n}.weight" for n in ("stem.conv", "conv", "conv1.0"))
POOL = ("pool_heads", "pool_mlp_width", "pool_prefix")
ROPE = ("rope", "rope_temperature", "rope_offset", "rope_x_first", "rope_grid", "rope_half")
# What only the model's name, or a field that is given, tells of a ViT: the field, names that show
# that it has something, names of which it has none, and what it has. No published model with these
# names is without that (tests/layouts/test_untold.py).
UNTOLD = (
    ("stem", (r"patch_embed\.backbone\.",), (), "the hybrid's convolutional stem"),
    ("block", (r"blocks\.0\.(attns|in_proj)",), (), "parallel blocks"),
    ("rope", ("norm_pre", "attn_pool"), (), "the rotary positions of Perception Encoder"),
    ("rope", ("norm_pre",), (r"(fc_)?norm\.",), "the rotary positions of Perception Encoder"),
    ("block", (r"(blocks\.0\.attn|shared)\.?_?rel_pos\.mlp",), (r"blocks\.0\.ls1",),
     "blocks with norms after attention and MLP"),
    ("block", ("pos_embed",), ("cls_token", "reg_token", r"blocks\.0\.(attn\.qkv\.bias|ls1)"),
     "blocks with norms after attention and MLP"),
)  # fmt: skip
# What a ViT of these names may have that ViTConfig does not.
MISSING = (
    (r"blocks\.0\.mlp\.(w1\.|gate)", "another gated MLP than those of timm and DINOv2"),
    (r"patch_embed\.norm", "a norm inside the patch embedding"),
)


def first_found(c: Checkpoint, table: tuple[tuple[str, str], ...]) -> str:
    """What the first pattern that some name fits stands for; "" if none does."""
    for pattern, what in table:
        if any(re.match(pattern, name) for name in c.tensors):
            return what
    return ""


class Timm(Layout):
    name, title = "timm", "timm's ViT"
    anchor, stem = "patch_embed.proj.weight", "blocks."
    marks: tuple[str, ...] = (
        r"blocks\.0\.(norm1|in_norm|attns\.0\.norm)\.weight",
        r"blocks\.0\.(attn\.qkv|in_proj|attns\.0\.attn\.qkv)\.weight",
    )
    own_names = True
    ignored = r".*num_batches_tracked$"
    unmarked = (
        r"decoder_|register_tokens|mask_token|head\.(mlp|last_layer)|blocks\.0\.attn\.q_bias"
        r"|blocks\.0\.gamma_1|blocks\.0\.mlp\.fc1_g|blocks\.0\.attn\.q_proj"
    )
    elsewhere = r"text\.|logit_"
    holds = tuple(PLAIN)
    head = r"head\.|head_dist\.|head_norm\.|pre_logits\."

    def refusal(self, c: Checkpoint) -> str:
        return first_found(c, MISSING)

    def fields(self, c: Checkpoint) -> dict[str, Any]:
        named, whole = _named(c), _whole(c)
        _check_told(c, {**named, **whole, **c.said})
        if whole:
            whole |= {k: v for k, v in self.head_fields(c).items() if k == "classes"}
            return whole | _pixels(c, whole["channels"])
        found = {**named, **patch_fields(c, self.anchor), "depth": c.count(self.stem)}
        D, p = found["width"], found["patch_size"]
        first = [c.size(name, 1, 0) for name in FIRST]
        if any(first):  # the projection's channels are those of a stem's map
            found["channels"] = max(first)
            p *= STEMS[c.said["stem"]].stride if c.said.get("stem") in STEMS else 1
        found["class_token"] = "cls_token" in c.tensors
        found["registers"] = c.size("reg_token", 1, 0)
        T = int(found["class_token"]) + found["registers"] + int("dist_token" in c.tensors)
        found |= self.positions(c, p, T)
        found |= self.block_fields(c, D, named.get("heads") or heads_of(D, found["depth"]))
        found |= _relative_mlp(c)
        found |= self.head_fields(c)
        hidden = c.size("attn_pool.mlp.fc1.weight", 0, found["mlp_width"])
        if found["pool"] != "map":
            found |= dict.fromkeys(POOL[:2]) | {"pool_prefix": False}
        elif hidden != found["mlp_width"]:
            found["pool_mlp_width"] = hidden
        found["pre_norm"] = "norm_pre.weight" in c.tensors
        found.setdefault("norm_eps", 1e-5 if found["pre_norm"] else 1e-6)
        return found | _pixels(c, found["channels"])

    def positions(self, c: Checkpoint, p: int, T: int) -> dict[str, Any]:
        shape = c.shape("pos_embed")
        if len(shape) != 3:
            tables = "blocks.0.attn.relative_position_bias_table" in c.tensors
            size = c.said.get("image_size", 224)
            return {"position": "relative" if tables else "none", "image_size": size}
        # Registers came with positions of patches alone.
        likely: tuple[int, ...] = (0, T) if T > 1 else (T, 0)
        if "dist_token" in c.tensors:
            likely = (T,)
        prefix, size = place_fields(c, shape[1], likely, p)
        covers = bool(prefix) or not T
        return {"position": "learned", "image_size": size, "position_covers_prefix": covers}

    def block_fields(self, c: Checkpoint, D: int, heads: int) -> dict[str, Any]:
        norm = c.shape("blocks.0.attn.q_norm.weight")
        if len(norm) == 1 and norm[0]:
            heads = D // norm[0]
        at = "blocks.0.attn."
        return {
            "heads": heads,
            **self.mlp_fields(c, D),
            "qkv_bias": any(f"{at}{n}" in c.tensors for n in ("qkv.bias", "q_bias", "q_proj.bias")),
            "key_bias": f"{at}q_bias" not in c.tensors
            and (f"{at}q_proj.bias" not in c.tensors or f"{at}k_proj.bias" in c.tensors),
            "separate_qkv": f"{at}q_proj.weight" in c.tensors,
            "attention_norm": f"{at}norm.weight" in c.tensors,
            "qk_norm": bool(norm),
            "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in c.tensors else None,
        }

    def mlp_fields(self, c: Checkpoint, D: int) -> dict[str, Any]:
        at = "blocks.0.mlp."
        gates, hidden = c.size(f"{at}fc1_g.weight", 0, 0), c.size(f"{at}fc2.weight", 1, 0)
        both = c.size(f"{at}w12.weight", 0, 0)
        first = both or c.size(f"{at}fc1.weight", 0, 4 * D)
        found: dict[str, Any] = {"mlp_width": first, "mlp_norm": f"{at}norm.weight" in c.tensors}
        if gates:
            found |= {"mlp": "swiglu_split", "mlp_width": gates, "activation": "silu"}
        elif both or first == 2 * hidden:
            found |= {"mlp": "swiglu", "mlp_width": first // 2, "activation": "silu"}
        return found

    def head_fields(self, c: Checkpoint) -> dict[str, Any]:
        head = c.shape("head.weight")
        after = "fc_norm.weight" in c.tensors
        before = "norm.weight" in c.tensors
        pooled = "token" if "cls_token" in c.tensors and not after else "mean"
        if "attn_pool.latent" in c.tensors:
            pooled = "map"
        kind = "tanh" if "pre_logits.fc.weight" in c.tensors else "linear"
        return {
            "classes": head[0] if len(head) == 2 else 0,
            "pool": pooled,
            "final_norm": "after_pool" if after else "before_pool" if before else "none",
            "head": "distilled" if "dist_token" in c.tensors else kind,
            "representation_size": (c.shape("pre_logits.fc.weight") or (None,))[0],
        }

    def rules(self, config: ViTConfig) -> list[Rule]:
        rules = [Rule(name, (name,)) for name in (*ROWS, "rope.freqs")]
        for name in LAYERS:
            rules += pairs(name, name)
        if config.stem == "conv":
            for i in STEM:
                rules += pairs(f"patch_embed.backbone.{i}", f"patch_embed.backbone.{i}")
        rules += plain_blocks("blocks.", {name: name for name in OF_A_BLOCK})
        # Biases of queries and values alone are BEiT's, which names LayerScale in another way.
        beit = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"} if not config.key_bias else {}
        for name in VECTORS:
            rules.append(Rule(f"blocks.{{i}}.{name}", (f"blocks.{{i}}.{beit.get(name, name)}",)))
        if config.stem == "mci":  # whose last convolution is the projection
            rules += pairs("patch_embed.proj", "patch_embed.backbone.2.conv")
        return rules

    def export_refusal(self, config: ViTConfig) -> str:
        no_key = config.qkv_bias and not config.key_bias
        split = config.separate_qkv or config.mlp == "swiglu_split"
        relative = "relative" in config.position
        if (no_key or split) and not relative and config.block != "twin":
            return 'its blocks are those of timm\'s EVA: layout="eva"'
        if split or (no_key and config.block == "twin"):
            return "parts of a block that no class of timm's has together"
        return ""


def _check_told(c: Checkpoint, known: dict[str, Any]) -> None:
    """Refuses a model that tensors alone would make another one of."""
    for field, shown, absent, what in UNTOLD:
        has = all(any(re.match(one, name) for name in c.tensors) for one in shown)
        lacks = not any(re.match(one, name) for one in absent for name in c.tensors)
        if field not in known and has and lacks:
            raise Refused(
                f"its tensors look like {what}, and do not tell: load the folder with its"
                f" config.json, or pass {field}= and what goes with it"
            )


def _named(c: Checkpoint) -> dict[str, Any]:
    """What timm's config.json says by the architecture's name, and tensors do not."""
    name = c.config.get("architecture")
    if not isinstance(name, str):
        return {}
    try:
        known = ViTConfig.named(name)
    except ValueError:
        return {}
    told = ("heads", "activation", "norm_eps", "layer_scale", "block", *ROPE, *POOL)
    return {key: getattr(known, key) for key in told}


def _whole(c: Checkpoint) -> dict[str, Any]:
    """All fields that the architecture's name stands for, where tensors do not tell them all."""
    name = c.config.get("architecture")
    try:
        known = ViTConfig.named(name) if isinstance(name, str) else ViTConfig()
    except ValueError:
        return {}
    plain = ViTConfig()
    told = all(getattr(known, key) == getattr(plain, key) for key in ("stem", "block", "crop"))
    return {} if told else dataclasses.asdict(known)


def _relative_mlp(c: Checkpoint) -> dict[str, Any]:
    for kind, stem in (("", "blocks.0.attn.rel_pos"), ("shared_", "shared_rel_pos")):
        first, last = (c.shape(f"{stem}.mlp.{name}.weight") for name in ("fc1", "fc2"))
        if len(first) == 2 and len(last) == 2:
            found = {"position": f"{kind}relative_mlp", "relative_width": first[0]}
            return {**found, "heads": last[0], "image_size": c.said.get("image_size", 224)}
    return {}


def _pixels(c: Checkpoint, channels: int) -> dict[str, Any]:
    about = c.config.get("pretrained_cfg")
    stats = {n: about.get(n) for n in ("mean", "std")} if isinstance(about, dict) else {}
    fit = all(isinstance(v, list) and len(v) == channels for v in stats.values())
    return {name: tuple(v or ()) for name, v in stats.items()} if stats and fit else {}
