"""``ingle`` where no file can grow: writing fails as on a full disk, if by another name (EFBIG)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from ingle.cli.app import run

# What it prints may go to a file that does grow: another process writes it there.
for stream in (1, 2):
    writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=os.dup(stream))
    assert writer.stdin is not None
    os.dup2(writer.stdin.fileno(), stream)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sys.exit(run(sys.argv[1:]))
