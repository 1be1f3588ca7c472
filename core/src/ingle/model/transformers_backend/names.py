"""Under which names a checkpoint stores what transformers' model calls otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming


class StoredNames:
    """From a module's or a tensor's name in the model to the one in the checkpoint.

    A checkpoint may lack the prefix of the base model (``h.0`` for ``transformer.h.0``), and for
    some families transformers renames what older checkpoints hold; both are undone here.

    Args:
        model: transformers' model.
        stored: Names of the checkpoint's tensors.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        self._prefix = model.base_model_prefix
        self._children = {name for name, _ in model.named_children()}
        self._renamings = [
            renaming
            for renaming in get_model_conversion_mapping(model)
            if isinstance(renaming, WeightRenaming)
        ]
        self._tensors = {self._target(name): name for name in stored}
        self._modules = {
            target.rpartition(".")[0]: name.rpartition(".")[0]
            for target, name in self._tensors.items()
        }

    def tensor(self, name: str) -> str:
        """The stored name of tensor ``name``; itself when the checkpoint has no such tensor."""
        return self._tensors.get(name, name)

    def module(self, name: str) -> str:
        """The stored name of the module ``name``; itself when the checkpoint has none."""
        return self._modules.get(name, name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has tensor ``name`` under any name."""
        return name in self._tensors

    def _target(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        first = name.partition(".")[0]
        return name if first in self._children else f"{self._prefix}.{name}"
