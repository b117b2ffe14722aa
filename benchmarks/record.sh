#!/usr/bin/env bash
# Runs a command that prints one JSON object as a line, and adds that with a name to a file, unless the file has a line
# of this name.
#   benchmarks/record.sh FILE NAME SECONDS command [argument ...]
set -u
file=$1 name=$2 limit=$3
shift 3
grep -qF "{\"name\": \"$name\"," "$file" 2>/dev/null && exit 0
mkdir -p "$(dirname "$file")"
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
line=$(timeout -k 10 "$limit" "$@" 2> "$errors" | grep '^{' | tail -1)
if [ -z "$line" ]; then
  echo "$name: no figures after $SECONDS s"
  tail -5 "$errors"
  exit 1
fi
echo "{\"name\": \"$name\", ${line#\{}" | tee -a "$file" | cut -c1-1500
