"""Python imports this module when it starts: see ``tests.workers``.

A process that Ray starts as a worker asks for a fork to do its work, and waits for the fork's end.
"""

import os
import sys

if any(word.endswith("ray/_private/workers/default_worker.py") for word in sys.orig_argv[1:3]):
    from tests.workers.request import be_forked

    be_forked(sys.orig_argv[1:])
    os._exit(0)
