#!/bin/sh
# Replaces `flashover` in tests: prints the file for a backend, precision and subcommand, in the folder of this script.
here=$(dirname "$0")
question=$1
subject= quant= kv=
while [ $# -gt 0 ]; do
  case $1 in
    --backend) subject=$2 ;;
    --quant) quant=$2 ;;
    --kv-cache) [ "$2" = float ] || kv=$2 ;;
  esac
  shift
done
subject=$subject${quant:+ $quant}${kv:+${quant:+,} kv $kv}
cat "$here/$subject.$question" && exit 0
cat "$here/$subject.error" >&2
exit 2
