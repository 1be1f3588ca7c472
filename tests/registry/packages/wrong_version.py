"""Written for a contract that does not exist yet."""

from ingle.plugin import hookimpl

INGLE_PLUGIN_API = (0, 99)


@hookimpl
def ingle_weight_formats():
    return []
