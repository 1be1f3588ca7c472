"""The linears of a GPTQ checkpoint. Headers need no torch; reading a weight does."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ingle.plugin import TensorReader
from ingle.plugin.affine_loader import AffineLoader, StoredLinear

if TYPE_CHECKING:
    from ingle.plugin import AffineWeight
    from ingle_quant_gptq.reading import GptqReader


class GptqLoader(AffineLoader):
    """Serves the linears of one GPTQ checkpoint."""

    def read_weight(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole."""
        return self._reader.read(linear, reader)

    @cached_property
    def _reader(self) -> GptqReader:
        """One for all linears: it warns of the file once."""
        from ingle_quant_gptq.reading import GptqReader

        return GptqReader(self.info, self.config)
