"""An independent Vision Transformer, written from the papers, to check vitkern.ViT against.

A function of (state dict, configuration, image) in the state dict's dtype; nothing here is fast,
fused or shared with the package. `drop(site, x, p)` stands for dropout and drop-path; by default it
does nothing.
Sites: "embed", "attention.i", "projection.i", "path1.i", "hidden.i", "mlp.i", "path2.i", "head".
"""

import math

import torch
import torch.nn.functional as F


def keep_all(site, x, p):
    return x


def logits(state, c, image, drop=keep_all):
    x = tokens(state, c, image, drop)[-1]
    if c.final_norm == "before_pool":
        x = layer_norm(x, state, "norm", c.norm_eps)
    if c.pool == "token":
        x = x[:, 0]
    elif c.pool == "mean":
        x = x[:, int(c.class_token) + c.registers :].mean(dim=1)
    if c.final_norm == "after_pool":
        x = layer_norm(x, state, "fc_norm", c.norm_eps)
    if c.head == "tanh":
        x = torch.tanh(linear(x, state, "pre_logits.fc"))
    if c.head == "token_norm":
        return layer_norm(
            drop("head", gelu(linear(x, state, "head")), c.head_dropout), state, "head_norm", 1e-5
        )
    x = drop("head", x, c.head_dropout)
    return linear(x, state, "head") if c.classes else x


def features(state, c, image, drop=keep_all):
    x = tokens(state, c, image, drop)[-1]
    return layer_norm(x, state, "norm", c.norm_eps) if c.final_norm == "before_pool" else x


def tokens(state, c, image, drop=keep_all):
    """Rows before the first block and after each block: depth + 1 tensors (B, S, D)."""
    x = embed(state, c, image, drop)
    all_rows = [x]
    grid = (image.shape[2] // c.patch_size, image.shape[3] // c.patch_size)
    for i in range(c.depth):
        name, after = f"blocks.{i}.", c.block == "post_norm"
        y = x if after else layer_norm(x, state, name + "norm1", c.norm_eps)
        y = attention(y, state, c, i, grid, drop)
        y = drop(f"projection.{i}", y, c.projection_dropout)
        if after:
            y = layer_norm(y, state, name + "norm1", c.norm_eps)
        if c.layer_scale is not None and not after:
            y = y * state[name + "ls1.gamma"]
        x = x + drop(f"path1.{i}", y, c.drop_path * i / max(c.depth - 1, 1))
        y = x if after else layer_norm(x, state, name + "norm2", c.norm_eps)
        y = drop(f"hidden.{i}", hidden(y, state, c, name + "mlp."), c.projection_dropout)
        if c.mlp_norm:
            y = layer_norm(y, state, name + "mlp.norm", c.norm_eps)
        y = drop(f"mlp.{i}", linear(y, state, name + "mlp.fc2"), c.projection_dropout)
        if after:
            y = layer_norm(y, state, name + "norm2", c.norm_eps)
        if c.layer_scale is not None and not after:
            y = y * state[name + "ls2.gamma"]
        x = x + drop(f"path2.{i}", y, c.drop_path * i / max(c.depth - 1, 1))
        all_rows.append(x)
    return all_rows


def hidden(x, state, c, name):
    """The MLP's hidden rows; a gate's are the first ones of fc1, or a layer of their own."""
    activation = ACTIVATIONS[c.activation]
    if c.mlp == "plain":
        return activation(linear(x, state, name + "fc1"))
    if c.mlp == "swiglu_split":
        return activation(linear(x, state, name + "fc1_g")) * linear(x, state, name + "fc1_x")
    y = linear(x, state, name + "fc1")
    return activation(y[..., : c.mlp_width]) * y[..., c.mlp_width :]


def embed(state, c, image, drop):
    weight = state["patch_embed.proj.weight"]
    if image.dtype == torch.uint8:
        mean, std = (torch.tensor(v, dtype=weight.dtype).view(-1, 1, 1) for v in (c.mean, c.std))
        image = (image.to(weight.dtype) / 255 - mean) / std
    if c.stem == "conv":
        image = convolved(state, image)
    p, (B, C, Y, X) = c.patch_size, image.shape
    patches = (
        image.reshape(B, C, Y // p, p, X // p, p)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(B, -1, C * p * p)
    )
    x = patches @ weight.reshape(c.width, -1).T
    if not c.pre_norm:
        x = x + state["patch_embed.proj.bias"]
    names = [n for n in ("cls_token", "reg_token") if n in state]
    prefix = [state[n].expand(B, -1, -1) for n in names]
    T, position = sum(t.shape[1] for t in prefix), patch_positions(state, c, (Y // p, X // p))
    x = torch.cat([*prefix, x], dim=1)
    if position is not None:
        missing = x.shape[1] - position.shape[0]
        assert missing in (0, T)
        x = x + torch.cat([position.new_zeros(missing, c.width), position])
    x = drop("embed", x, c.dropout)
    return layer_norm(x, state, "norm_pre", c.norm_eps) if c.pre_norm else x


def convolved(state, image):
    """Three stages: 3x3 convolution, eight groups normalised, ReLU, the largest of 3x3."""
    for i in (0, 4, 8):
        weight = state[f"patch_embed.backbone.{i}.weight"]
        (B, _, Y, X), N = image.shape, weight.shape[0]
        padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
        x = image.new_zeros(B, N, Y, X)
        for v in range(3):
            for u in range(3):
                part = padded[:, :, v : v + Y, u : u + X]
                x = x + torch.einsum("bcyx,nc->bnyx", part, weight[:, :, v, u])
        groups = x.reshape(B, 8, -1)
        groups = groups - groups.mean(-1, keepdim=True)
        groups = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        gain, bias = (state[f"patch_embed.backbone.{i + 1}.{n}"] for n in ("weight", "bias"))
        x = groups.reshape(B, N, Y, X) * gain.view(-1, 1, 1) + bias.view(-1, 1, 1)
        padded = torch.nn.functional.pad(x.clamp_min(0), (1, 1, 1, 1))  # nothing is below 0
        near = [padded[:, :, v : v + Y : 2, u : u + X : 2] for v in range(3) for u in range(3)]
        image = torch.stack(near).amax(0)
    return image


def patch_positions(state, c, grid):
    """(S or N, D) rows for a grid, or None."""
    dtype, D = state["patch_embed.proj.weight"].dtype, c.width
    T = int(c.class_token) + c.registers
    if c.position == "learned":
        rows = state["pos_embed"][0]
        T = T if c.position_covers_prefix else 0
        return torch.cat([rows[:T], moved(rows[T:], c.grid, grid)])
    if c.position == "learned_2d":
        rows = moved(state["pos_embed_y"][0], (c.grid[0], 1), (grid[0], 1))
        columns = moved(state["pos_embed_x"][0], (1, c.grid[1]), (1, grid[1]))
        return torch.stack([rows[y] + columns[x] for y in range(grid[0]) for x in range(grid[1])])
    if c.position == "sincos_1d":
        count = grid[0] * grid[1] + (T if c.position_covers_prefix else 0)
        table = [
            [
                (math.sin if d % 2 == 0 else math.cos)(s / 10000 ** ((d - d % 2) / D))
                for d in range(D)
            ]
            for s in range(count)
        ]
        return torch.tensor(table, dtype=torch.float64).to(dtype)
    if c.position == "sincos_2d":
        table = []
        for y in range(grid[0]):
            for x in range(grid[1]):
                waves = [10000 ** (-i / (D // 4)) for i in range(D // 4)]
                parts = ((math.sin, x), (math.cos, x), (math.sin, y), (math.cos, y))
                table.append([f(place * w) for f, place in parts for w in waves])
        return torch.tensor(table, dtype=torch.float64).to(dtype)
    return None


def moved(rows, old, new):
    if tuple(old) == tuple(new):
        return rows
    square = rows.T.reshape(1, -1, *old)
    square = F.interpolate(square, size=new, mode="bicubic", antialias=True)
    return square.reshape(rows.shape[1], -1).T


def attention(x, state, c, i, grid, drop):
    (B, S, D), H, name = x.shape, c.heads, f"blocks.{i}.attn."
    if c.separate_qkv:
        q, k, v = (linear(x, state, f"{name}{part}_proj") for part in "qkv")
    else:
        q, k, v = linear(x, state, name + "qkv").split(D, dim=-1)
    if name + "q_bias" in state:
        q, v = q + state[name + "q_bias"], v + state[name + "v_bias"]
    heads = []
    bias = relative_bias(state, c, i, grid)
    q, k, v = (t.reshape(B, S, H, D // H) for t in (q, k, v))
    if c.qk_norm:
        q = layer_norm(q, state, name + "q_norm", c.norm_eps)
        k = layer_norm(k, state, name + "k_norm", c.norm_eps)
    if c.rope != "none":
        q, k = (turned(t, state, c, i, grid) for t in (q, k))
    weights = []
    for h in range(H):
        scores = q[:, :, h] @ k[:, :, h].transpose(1, 2) / math.sqrt(D // H)
        if bias is not None:
            scores = scores + bias[h]
        weights.append(torch.softmax(scores, dim=-1))
    weights = drop(
        f"attention.{i}", torch.stack(weights, dim=1), c.attention_dropout
    )  # (B, H, S, S)
    heads = [weights[:, h] @ v[:, :, h] for h in range(H)]
    y = torch.cat(heads, dim=-1)
    if c.attention_norm:
        y = layer_norm(y, state, name + "norm", c.norm_eps)
    return linear(y, state, name + "proj")


def turned(x, state, c, i, grid):
    """Rotary positions: pairs of channels of x (B, S, H, E) as complex numbers, times e^(i angle).

    Rows of the class and register tokens stay as they are.
    """
    T, (H, E) = x.shape[1] - grid[0] * grid[1], x.shape[2:]
    angles = []
    for y in range(grid[0]):
        for column in range(grid[1]):
            angles.append(torch.stack([row_angles(state, c, i, h, y, column, grid)
                                       for h in range(H)]))  # fmt: skip
    patches = x[:, T:]
    angles = torch.stack(angles)  # (N, H, E / 2)
    if c.rope_half:
        real, imaginary = patches[..., : E // 2], patches[..., E // 2 :]
    else:
        real, imaginary = patches[..., 0::2], patches[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    real, imaginary = real * cos - imaginary * sin, real * sin + imaginary * cos
    if c.rope_half:
        out = torch.cat([real, imaginary], -1)
    else:
        out = torch.stack([real, imaginary], -1).flatten(-2)
    return torch.cat([x[:, :T], out], 1)


def row_angles(state, c, i, h, y, x, grid):
    """(E / 2) of the patch in row y and column x."""
    dtype, E = state["patch_embed.proj.weight"].dtype, c.width // c.heads
    places = [y + c.rope_offset, x + c.rope_offset]
    if c.rope_grid is not None:
        places = [p / n * r for p, n, r in zip(places, grid, c.rope_grid, strict=True)]
    if c.rope == "dinov3":
        places = [2 * math.pi * (2 * (p + 0.5) / n - 1) for p, n in zip(places, grid, strict=True)]
    if c.rope_x_first:
        places = places[::-1]
    if c.rope == "mixed":
        learned = state["rope.freqs"][:, i, h]
        return places[0] * learned[0] + places[1] * learned[1]
    bands = range(E // 4)
    angles = [p * c.rope_temperature ** (-b / (E // 4)) for p in places for b in bands]
    return torch.tensor(angles, dtype=torch.float64).to(dtype)


def relative_bias(state, c, i, grid):
    """BEiT: a learned number per head and offset; three more for pairs with a prefix token."""
    if c.position != "relative":
        return None
    table = state[f"blocks.{i}.attn.relative_position_bias_table"]
    T = int(c.class_token) + c.registers
    old, new = ((2 * y - 1, 2 * x - 1) for y, x in (c.grid, grid))
    offsets = moved(table[: old[0] * old[1]], old, new)
    places = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    rows = []
    for s in range(T + len(places)):
        row = []
        for t in range(T + len(places)):
            if s < T and t < T:
                row.append(table[-1])
            elif s < T:
                row.append(table[-3])
            elif t < T:
                row.append(table[-2])
            else:
                (ys, xs), (yt, xt) = places[s - T], places[t - T]
                row.append(offsets[(ys - yt + grid[0] - 1) * new[1] + xs - xt + grid[1] - 1])
        rows.append(torch.stack(row))
    return torch.stack(rows).permute(2, 0, 1)  # (H, S, S)


def linear(x, state, name):
    y = x @ state[name + ".weight"].T
    return y + state[name + ".bias"] if name + ".bias" in state else y


def layer_norm(x, state, name, eps):
    mean = x.mean(dim=-1, keepdim=True)
    variance = (x - mean).square().mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * state[name + ".weight"] + state[name + ".bias"]


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def silu(x):
    return x * torch.sigmoid(x)


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "silu": silu}
