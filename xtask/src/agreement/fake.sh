#!/bin/sh
# Stands in for `flashover`: says what the files beside it say, for each backend and question.
here=$(dirname "$0")
question=$1
backend=any
while [ $# -gt 0 ]; do
  case $1 in
    --backend) backend=$2 ;;
    --prompt=) question=empty ;;
  esac
  shift
done
cat "$here/$backend.$question" && exit 0
cat "$here/$backend.error" >&2
exit 2
