"""The linears of an AWQ checkpoint. Headers need no torch; reading a weight does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingle.plugin import TensorReader
from ingle.plugin.affine_loader import AffineLoader, StoredLinear

if TYPE_CHECKING:
    from ingle.plugin import AffineWeight


class AwqLoader(AffineLoader):
    """Serves the linears of one AWQ checkpoint."""

    def read_weight(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole, with the divisor of the activation before it as input scale."""
        from ingle_quant_awq.reading import AwqReader

        return AwqReader(self.info, self.config).read(linear, reader)
