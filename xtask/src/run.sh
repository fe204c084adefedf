#!/bin/sh
# Verifies and measures Flashover on this machine, which needs neither Rust nor a network.
# Usage: [OUT=DIR] ./run.sh [options of bench, for example --backend cuda]
# Writes records.jsonl, bench.html and bench.md into OUT (default: the current folder).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-.}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
if command -v xz >/dev/null; then
  tar -xJf "$here/flashover.tar.xz" -C "$work"
elif command -v python3 >/dev/null; then
  python3 -m tarfile -e "$here/flashover.tar.xz" "$work"
  chmod +x "$work"/*
else
  echo "error: flashover.tar.xz cannot be unpacked" >&2
  echo "hint: install xz (Debian package xz-utils) or python3" >&2
  exit 2
fi
# Use libraries of the archive only where this machine lacks them.
mkdir "$work/lacking"
for name in $(ldd "$work/flashover" "$work/flashover-bench" | awk '/not found/ { print $1 }' | sort -u); do
  if [ -e "$work/lib/$name" ]; then mv "$work/lib/$name" "$work/lacking/"; fi
done
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$work/lacking"
if [ -z "${CUDA_PATH:-}" ] && [ -d /usr/local/cuda ]; then
  export CUDA_PATH=/usr/local/cuda
fi
export FLASHOVER_PROGRAMS="$work"
# Each part runs even if an earlier one failed. The exit code is that of the last failure.
status=0
"$work/xtask" doctor || status=$?
# Reject bad options of bench now, before the long verify.
"$work/xtask" bench --suite kernels --backend all "$@" --dry-run || exit $?
"$work/xtask" verify --backend all || status=$?
"$work/xtask" bench --suite kernels --backend all --format md \
  --save "$out/records.jsonl" --html "$out/bench.html" "$@" >"$out/bench.md" || status=$?
cat "$out/bench.md"
exit "$status"
