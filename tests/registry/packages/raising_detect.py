"""A format that cannot even look at a checkpoint."""

from ingle.plugin import WeightFormat, hookimpl

INGLE_PLUGIN_API = (0, 1)


class BlindFormat(WeightFormat):
    name = "blind"

    def detect(self, info):
        raise TypeError("cannot read this config")

    def open(self, info):
        raise TypeError("cannot read this config")


@hookimpl
def ingle_weight_formats():
    return [BlindFormat()]
