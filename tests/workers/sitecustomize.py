"""Python imports this module on startup: see ``tests.workers``.

A process that Ray starts as a worker requests a fork to do its work, and waits until the fork ends.
"""

import os
import sys

if any(word.endswith("ray/_private/workers/default_worker.py") for word in sys.orig_argv[1:3]):
    from tests.workers.request import be_forked

    be_forked(sys.orig_argv[1:])
    os._exit(0)
