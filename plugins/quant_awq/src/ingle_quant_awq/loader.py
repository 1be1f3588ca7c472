"""The linears of an AWQ checkpoint. Headers need no torch; reading a weight does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ingle.plugin import TensorReader
from ingle.plugin.affine_checks import FLOATS, INT32
from ingle.plugin.affine_loader import AffineLoader, StoredLinear

if TYPE_CHECKING:
    from ingle.plugin import AffineWeight


class AwqLoader(AffineLoader):
    """Serves the linears of one AWQ checkpoint."""

    types: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "gemv": {"qweight": INT32, "qzeros": INT32},
        "gemv_fast": {"qweight": ("I16",), "qzeros": FLOATS},
        "marlin": {"qweight": INT32},
    }

    def read_weight(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole, with the divisor of the activation before it as input scale."""
        from ingle_quant_awq.reading import AwqReader

        return AwqReader(self.info, self.config).read(linear, reader)
