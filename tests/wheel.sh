#!/usr/bin/env bash
# Build the wheel and import it, from an empty folder, with only what the wheel itself and the development packages bring.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m build --wheel --no-isolation --outdir "$work/dist" "$root" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$root/.venv/bin/python" -m pip install --quiet --no-deps --target "$work/site" "$work"/dist/*.whl
cd "$work"
PYTHONPATH="$work/site" "$root/.venv/bin/python" - "$work" <<'PY'
import sys
from pathlib import Path
import lightning_memsave
home = Path(lightning_memsave.__file__).resolve()
assert home.is_relative_to(Path(sys.argv[1]).resolve()), home
assert (home.parent / "py.typed").is_file()
print(f"wheel: imported {lightning_memsave.__version__} from {home.parent}")
PY
PYTHONPATH="$work/site" "$work/site/bin/lightning-memsave" --version
