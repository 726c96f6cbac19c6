"""What a person submits: ``python -m jobs.NAME RECIPE [key=value …]``."""

import atexit
import gc

# A job imports some 5,000 modules. With Python's own threshold, it spends a fifth of that time looking for garbage.
gc.set_threshold(20_000)
# Nor does it look for garbage when it ends, which would take seconds. Registered first, this runs last.
atexit.register(gc.freeze)
