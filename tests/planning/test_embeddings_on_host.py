"""Token embeddings that stay on the host while everything else goes to another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingle.model.decoder import look_up
from ingle.model.weights import WeightSource
from ingle.plugin.device import DeviceInfo
from ingle.testing.checkpoint import MemoryReader

TABLE = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize("on_host", [False, True])
def test_only_the_embeddings_stay_behind(on_host: bool) -> None:
    elsewhere = DeviceInfo(type="meta")
    source = WeightSource(
        MemoryReader({"table": TABLE, "norm": TABLE[0]}),
        [],
        lambda weight: weight,  # type: ignore[arg-type, return-value]
        torch.float32,
        elsewhere,
        embeddings_on_host=on_host,
    )
    assert source.embedding("table", (6, 2)).device.type == ("cpu" if on_host else "meta")
    assert source.tensor("norm", (2,)).device.type == "meta"


def test_rows_are_looked_up_where_the_table_is_and_go_where_the_tokens_are() -> None:
    moves: list[Any] = []

    class Ids(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            moves.append(args[0])
            return self.as_subclass(torch.Tensor)

    token_ids = torch.tensor([5, 0]).as_subclass(Ids)
    assert torch.equal(look_up(TABLE, token_ids), TABLE[[5, 0]])
    assert moves == [TABLE.device]
