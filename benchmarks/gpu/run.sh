#!/usr/bin/env bash
# Run the measurements that need a GPU, in at most 9 minutes. README.md in this folder explains them and the kit.
# DEVICE=cpu tests the script on small models; KIT is the folder of the kit; PYTHON is the interpreter with torch.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
for folder in "${KIT:-}" "$checkout/.." "$checkout/build/gpu-kit"; do
    [ -n "$folder" ] && [ -d "$folder/wheels" ] && kit=$(cd "$folder" && pwd) && break
done
[ -n "${kit:-}" ] || { echo "error: there is no kit: run 'make gpu-kit', or set KIT to its folder" >&2; exit 2; }
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$kit"/wheels/*.whl
export KIT=$kit PYTHONPATH=$site:$checkout
"$python" -m benchmarks.gpu "$@"
