"""What is asked of a model besides its forward: files, tables, reasons and attention maps.

Each is a line that calls the module which knows, loaded when it is first asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from . import dispatch, explanation

if TYPE_CHECKING:
    from .model import ViT
    from .summary import Summary


class ModelTools(nn.Module):
    """Methods of `vitkern.ViT`, which is the module."""

    @classmethod
    def from_pretrained(cls, path: Any, **options: Any) -> Any:
        """`vitkern.load`: the model of a checkpoint's file, folder or name, in any known layout."""
        from .loading import load

        return load(path, **options)

    def save_packed(self, path: Any, precision: str | None = None) -> None:
        """`vitkern.save_packed`: the weights packed for a precision (None: the model's own), which
        `vitkern.load` reads without packing them again."""
        from .packed_file import save_packed

        save_packed(_vit(self), path, precision)

    def explain(self, image: Tensor | None = None) -> str:
        """Which path the next forward takes (of this image, if given) and why, in a few lines."""
        return explanation.explain(_vit(self), image)

    def summary(
        self, image_size: int | tuple[int, int] | None = None, *, show: bool = True
    ) -> Summary:
        """Print and return a table of layers, shapes, parameters and multiply-adds."""
        from .summary import summarise

        table = summarise(_vit(self), image_size)
        if show:
            print(table.text)
        return table

    def attention_maps(
        self,
        images: Tensor,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
    ) -> Tensor:
        """Attention weights (L, B, H, S, S) of all blocks and heads, or of those chosen."""
        from . import inspection

        model = _vit(self)
        dispatch.check_image(model, images, model.patch_embed_weight, "images")
        return inspection.attention_maps(model, images, layers, heads)

    def __prepare_scriptable__(self) -> nn.Module:
        raise RuntimeError(
            "ViT: torch.jit.script cannot compile it; use torch.jit.trace, torch.export or"
            " torch.compile"
        )


def _vit(tools: ModelTools) -> ViT:
    return cast("ViT", tools)
