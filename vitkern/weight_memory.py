"""Where a model's weights are: in its parameters, packed beside them, or packed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import dispatch, positions

if TYPE_CHECKING:
    from .engines.base import Engines
    from .engines.released import Released


class WeightMemory(nn.Module):
    """The part of `vitkern.ViT` that packs weights, releases and restores them."""

    _engines: Engines | None
    _released: Released | None
    if TYPE_CHECKING:  # what ViT has
        pos_embed: nn.Parameter | None

    @property
    def engines(self) -> Engines:
        """The packed engines of this model."""
        if self._engines is None or self._engines.model is not self:  # a shallow copy has another's
            from .engines.base import Engines

            self._engines = Engines(self)  # type: ignore[arg-type]
        return self._engines

    @property
    def released(self) -> Released | None:
        """What holds the weights after `release_weights`, else None."""
        held = self._released
        return held or None

    def repack(self) -> None:
        """Pack the weights again; needed after writes through `parameter.data` that nothing shows.

        On the CPU those to a part of a parameter, on a GPU all. Captured CUDA graphs have them too.
        """
        if self._engines is not None:
            self.engines.repack()

    def release_weights(self, *others: nn.Module) -> None:
        """Hold the weights once: packed for the present precision, without the parameters' memory.

        At int8 as integers, a quarter of the parameters' bytes, beside the engine's panels of them.

        Afterwards the model runs in eval mode without gradients, at this precision. The matrices
        among its parameters, and among those of `others` that share them, are left without memory
        (on the meta device). `state_dict()` unpacks them where packing did not round (fp32; bf16
        and int8 are refused), and `restore_weights()` brings them back.
        """
        from .engines.released import release

        if self.released is not None:
            return
        model: Any = self
        precision = dispatch.check_releasable(model)
        siblings = [other for other in others if isinstance(other, WeightMemory)]
        for other in siblings:
            other.engines.forget()
        held = release(model, precision, *others)
        self._released = held
        for other in siblings:  # they share the panels, too
            other._released = held.shared()

    def hold_panels(self, held: Released) -> None:
        """Take panels as the only weights, as after `release_weights`; the matrices are on meta."""
        self._released = held

    def restore_weights(
        self, state_dict: Mapping[str, Tensor] | None = None, *, rounded: bool = False
    ) -> None:
        """Undo `release_weights`: the parameters get their memory and values back.

        state_dict: where the values come from, if packing rounded them (bf16, int8). rounded=True
        takes what packing left of them instead: the model then computes at any precision, or is
        trained, with values that differ from the checkpoint's, and `state_dict()` has those.
        """
        if state_dict is not None and rounded:
            raise ValueError("ViT.restore_weights: give a state dict or rounded=True, not both")
        held = self.released
        if held is not None:
            from .engines.released import restore

            model: Any = self
            restore(model, held, state_dict, rounded)
            self._released = None
        if state_dict is not None:
            self.load_state_dict(state_dict)

    def check_weights(self, what: str) -> None:
        """Refuse what reads parameters while they have no memory."""
        held = self.released
        if held is not None:
            raise RuntimeError(
                f"ViT: {what} needs the weights, which were released (keep_weights=False) and are"
                f" packed for {held.precision} alone; {held.how_to_restore()}"
            )

    def weight_bytes(self) -> dict[str, int]:
        """Memory of the parameters, and of the panels that this model's engines hold.

        Integers in parameters' place (`release_weights` at int8) count as parameters.
        """
        there: list[Tensor] = [p for p in self.parameters() if p.is_cpu]
        held = self.released
        there += [] if held is None else [t for one in held.integers.values() for t in one.weight]
        memory = {t.untyped_storage().data_ptr() + t.storage_offset(): t.nbytes for t in there}
        return {"parameters": sum(memory.values()), "packed": self.engines.packed_bytes()}

    # ---- what nn.Module does with parameters ----

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's; weights that were released are unpacked, or refused if rounded."""
        state = super().state_dict(*args, **kwargs)
        held = self.released
        if held is not None:
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            for name, parameter in self.named_parameters(remove_duplicate=False):
                if held.holds(parameter):
                    state[prefix + name] = held.unpacked(parameter)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As nn.Module's, with timm's names; another image size's positions are refused by name."""
        if isinstance(state_dict, Mapping):
            positions.refuse_another_size(state_dict.get("pos_embed"), self.pos_embed)
        result = super().load_state_dict(state_dict, strict, assign)
        self.repack()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also of a module that has this one inside."""
        self.check_weights("load_state_dict")
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.check_weights("moving or converting the model")
        super()._apply(fn, recurse)
        self.repack()
        return self

    def train(self, mode: bool = True) -> Any:
        if mode:
            self.check_weights("training")
            if self._engines is not None:
                self.engines.drop()  # weights will change: do not hold two copies meanwhile
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": None}
