"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell that starts a command in the background makes it ignore Ctrl-C, and so do all its children. Tests that interrupt
# programs need them as they are in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
