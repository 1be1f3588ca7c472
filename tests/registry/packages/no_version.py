"""Does not say what it was written for."""

from ingle.plugin import hookimpl


@hookimpl
def ingle_weight_formats():
    return []
