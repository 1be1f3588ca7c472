"""A hook's name lacks an s."""

from ingle.plugin import hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_format():
    return []
