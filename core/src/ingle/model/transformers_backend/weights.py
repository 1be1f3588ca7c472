"""Fills transformers' model: linears and experts by Ingle's loaders, the rest tensor by tensor."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ingle.errors import CheckpointError
from ingle.model.linear import Linear
from ingle.model.transformers_backend.experts import Expert, Experts, gate_of, is_plain_experts
from ingle.model.transformers_backend.names import StoredNames
from ingle.model.transformers_backend.skeleton import rotaries
from ingle.model.weights import WeightSource

_EXPERT_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projections, when each is stored by itself."""


class LinearModule(nn.Module):
    """Ingle's linear, called as transformers calls its own."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., K] to [..., N]."""
        rows = self._linear(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], self._linear.out_features)


class Filler:
    """Gives every parameter of a skeleton its value, once.

    Args:
        model: All of it on the meta device.
        source: Where weights come from.
        max_model_len: Tokens of a sequence at most; some rotary scalings depend on it.
    """

    def __init__(self, model: PreTrainedModel, source: WeightSource, max_model_len: int) -> None:
        self._model: Any = model  # much of transformers has no annotations
        self._source = source
        self._max_model_len = max_model_len
        self._names = StoredNames(model, source.reader.names())
        self._device = torch.device(source.device.torch_device)

    def fill(self) -> None:
        """Replaces linears and experts, loads what else is stored and computes the rest.

        Raises:
            CheckpointError: When a tensor is missing or has another shape.
        """
        self._compute_buffers()
        head = self._model.get_output_embeddings()
        for name, module in list(self._model.named_modules()):
            if is_plain_experts(module):
                self._model.set_submodule(name, self._experts(name, module))
            elif type(module) is nn.Linear:
                linear = self._head(name, module) if module is head else self._linear(name, module)
                self._model.set_submodule(name, LinearModule(linear))
            else:
                self._load_own(name, module)
        self._check_complete()

    # -- what has a kernel ---------------------------------------------------------------------

    def _linear(self, name: str, module: nn.Linear) -> Linear:
        if module.bias is not None and not self._names.has(f"{name}.bias"):
            raise CheckpointError(f"the checkpoint has no tensor {name + '.bias'!r}.")
        stored = self._names.module(name)
        return self._source.linear([stored], [module.out_features], module.in_features)

    def _head(self, name: str, module: nn.Linear) -> Linear:
        """The output head; a tied one shares the embedding's tensor, unless it is stored too."""
        tied = self._model.config.get_text_config().tie_word_embeddings
        if not tied or self._source.has_linear(self._names.module(name)):
            return self._linear(name, module)
        embedding = self._model.get_input_embeddings()
        found = next(n for n, m in self._model.named_modules() if m is embedding)
        linear = self._source.tied_head(
            self._names.module(found), module.out_features, module.in_features
        )
        if module.bias is None:
            return linear
        return Linear(linear.parts, self._tensor(f"{name}.bias", module.bias))

    def _experts(self, name: str, module: Any) -> Experts:
        number, doubled, hidden = module.gate_up_proj.shape
        gate = gate_of(module)
        stacked = self._names.tensor(f"{name}.gate_up_proj")
        experts = []
        for index in range(number):
            if self._source.has_linear(stacked):
                joined = self._source.expert(stacked, doubled, hidden, index)
                down_name = self._names.tensor(f"{name}.down_proj")
                down = self._source.expert(down_name, hidden, doubled // 2, index)
            else:
                joined, down = self._one_expert(f"{name}.{index}", doubled // 2, hidden)
            experts.append(Expert(gate_up_proj=joined, down_proj=down, gate=gate))
        return Experts(tuple(experts))

    def _one_expert(self, name: str, inner: int, hidden: int) -> tuple[Linear, Linear]:
        source, module = self._source, self._names.module
        known = (each for each in _EXPERT_NAMES if source.has_linear(module(f"{name}.{each[2]}")))
        gate, up, down = next(known, _EXPERT_NAMES[0])
        names = [module(f"{name}.{gate}"), module(f"{name}.{up}")]
        return (
            source.linear(names, [inner, inner], hidden),
            source.linear([module(f"{name}.{down}")], [hidden], inner),
        )

    # -- the rest ------------------------------------------------------------------------------

    def _load_own(self, name: str, module: nn.Module) -> None:
        """The parameters that ``module`` holds itself, and the buffers the checkpoint has."""
        prefix = f"{name}." if name else ""
        for own, parameter in list(module.named_parameters(recurse=False)):
            value = self._tensor(prefix + own, parameter)
            module.register_parameter(own, nn.Parameter(value, requires_grad=False))
        for own, buffer in list(module.named_buffers(recurse=False)):
            stored = self._names.has(prefix + own) and own in module.state_dict()
            value = self._tensor(prefix + own, buffer) if stored else buffer.to(self._device)
            module._buffers[own] = value

    def _tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if not self._names.has(name):
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r}. A shard may be missing, or config.json is "
                "of another model."
            )
        return self._source.tensor_as(self._names.tensor(name), tuple(like.shape), like.dtype)

    def _compute_buffers(self) -> None:
        """Tables that no checkpoint holds, by transformers' own code: rotary frequencies, mostly.

        Parameters are still on the meta device, where initialising them does nothing.
        """
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                real = torch.zeros_like(buffer, device="cpu")
                if real.is_floating_point():
                    real.fill_(float("nan"))
                module._buffers[name] = real
        self._model.initialize_weights()
        for rotary in rotaries(self._model):
            self._pin(rotary)

    def _pin(self, rotary: Any) -> None:
        """Fixes a scaling that follows the length of sequences to that of the longest: keys in the
        cache stay as they were turned."""
        compute = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        frequencies, factor = compute(rotary.config, "cpu", seq_len=self._max_model_len)
        rotary.inv_freq.copy_(frequencies)
        rotary.attention_scaling = factor
        rotary.rope_type = "default"

    def _check_complete(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.is_meta:
                raise CheckpointError(f"nothing has set {name!r}.")
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise CheckpointError(f"{name!r} is neither stored nor computed by transformers.")
