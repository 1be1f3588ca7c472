"""A hook without its marker: pluggy would never see it."""

INGLE_PLUGIN_API = (0, 1)


def ingle_weight_formats():
    return []
