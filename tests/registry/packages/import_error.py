"""Fails when imported."""

import ingle_package_that_is_not_installed  # noqa: F401

INGLE_PLUGIN_API = (0, 1)
