#!/usr/bin/env bash
# The contract and callback tests against the oldest supported Lightning (torch is pinned to one minor version).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/pip install --quiet --no-deps --target "$work" lightning==2.6.0 pytorch-lightning==2.6.0
PYTHONPATH="$work" .venv/bin/python -c "import lightning; assert lightning.__version__ == '2.6.0', lightning.__version__"
PYTHONPATH="$work" .venv/bin/pytest -m 'not slow and not gpu' tests/contracts tests/callbacks tests/strategies
