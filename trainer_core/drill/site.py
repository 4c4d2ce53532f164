"""Where a fault is put into a run, and helpers that do it. Everything is keyed by the drill's seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..draws import Draws

if TYPE_CHECKING:
    import torch

    from ..data import Batch
    from ..networks.lora import LoraModule
    from ..trainer import Trainer


@dataclass(frozen=True)
class Planted:
    """What was broken: module names of adapters, and picture files. Both may be empty: the fault is nobody's."""

    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass
class Site:
    """A run that is put together and has not begun. `onset`: the step at which the fault sets in."""

    trainer: Trainer
    seed: int
    onset: int

    @property
    def draws(self) -> Draws:
        return Draws(self.seed)

    def choose(self, purpose: str, count: int, of: int) -> list[int]:
        """`count` different numbers below `of`."""
        order = self.draws.generator(0, "drill", purpose).permutation(of)
        return sorted(int(number) for number in order[:count])

    def modules(self, part: str = "unet") -> list[LoraModule]:
        """Adapters of one part (the drill's runs use our own LoRA)."""
        network: Any = self.trainer.parts.network
        return [module for module in network.modules.values() if module.part == part]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.trainer.parts.network.named_parameters())

    def at(self, step: int, action: Callable[[], None]) -> None:
        """Do something once, right before `step` (counted from 1) is computed."""
        done: list[bool] = []

        def once(coming: int) -> None:
            if coming >= step and not done:
                done.append(True)
                action()

        self.before_each(once)

    def before_each(self, action: Callable[[int], None]) -> None:
        """Do something before every step, with its number."""
        trainer: Any = self.trainer
        original = trainer.train_step

        def train_step() -> bool:
            action(trainer.state.step + 1)
            return bool(original())

        trainer.train_step = train_step

    def change_batches(self, change: Callable[[Batch], Batch]) -> None:
        """Pass every micro-batch of the run through `change`."""
        trainer: Any = self.trainer
        original = trainer.load
        trainer.load = lambda epoch, refs: change(original(epoch, refs))

    def poison(self, is_bad: Callable[[str], bool]) -> None:
        """Make the latents of samples NaN whose key is bad; asked anew at every load."""

        def change(batch: Batch) -> Batch:
            bad = [place for place, key in enumerate(batch.sample_keys) if is_bad(key)]
            if not bad:
                return batch
            mean_BCHW = batch.mean_BCHW.clone()
            mean_BCHW[bad] = float("nan")
            return dataclasses.replace(batch, mean_BCHW=mean_BCHW)

        self.change_batches(change)

    def files_of(self, keys: Collection[str]) -> tuple[str, ...]:
        """Pictures of sample keys."""
        plan = self.trainer.parts.plan
        wanted = {key.partition(":")[0] for key in keys}
        return tuple(item.file for item in plan.items if item.key().partition(":")[0] in wanted)

    def picture_keys(self) -> list[str]:
        """One key a picture, without its repeat."""
        return [item.key().partition(":")[0] for item in self.trainer.parts.plan.items]

    def began_so(self) -> None:
        """What is trained now counts as the run's beginning: the fault was there before the run was."""
        if self.trainer.health is not None:
            self.trainer.health.rebase()
