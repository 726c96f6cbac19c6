"""Load a published model, answer once, and say when: python -m benchmarks.compile.first_answer STORAGE …"""

import time

BEGAN = time.time()  # before anything else is imported

# ruff: noqa: E402
import json
import sys

from app.published.loaded import load_model
from app.storage import open_storage

IMPORTED = time.time()


def main() -> None:
    """Print the times at which each phase ended, as JSON. Arguments: storage, NAME/VERSION, threads, text."""
    storage, model, threads, text = sys.argv[1:]
    name, _, version = model.partition("/")
    loaded_model = load_model(open_storage(storage), name, int(version), int(threads))
    loaded = time.time()
    (row,) = loaded_model.encode([text])
    loaded_model.engine.infer(row.tensors)
    answered = time.time()
    print(json.dumps({"began": BEGAN, "imported": IMPORTED, "loaded": loaded, "answered": answered}))


if __name__ == "__main__":
    main()
