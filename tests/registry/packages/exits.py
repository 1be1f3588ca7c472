"""Ends the process when imported, or tries to."""

import sys

sys.exit("no licence")
