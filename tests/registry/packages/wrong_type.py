"""A hook that gives strings where formats are wanted."""

from ingle.plugin import hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_formats():
    return ["a format"]
