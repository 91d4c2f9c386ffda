#!/usr/bin/env bash
# Makes FOLDER.tgz of a folder, and fails if that is larger than 50 MiB: what is carried to a machine with a GPU often may
# not be. Compressed, because programs shrink to a third: at its last measurement the pack was 66 MB, and 24 MB so.
#
#     tests/gpu/archive.sh FOLDER
set -euo pipefail
limit=$((50 << 20))

# Says what takes the space, and fails, if an archive of FOLDER is too large: ARCHIVE FOLDER
check_size() {
    local bytes
    bytes=$(stat --format=%s "$1")
    echo "$1: $((bytes >> 20)) MiB of at most $((limit >> 20)), unpacked $(du -sm "$2" | cut -f 1) MiB"
    ((bytes > limit)) || return 0
    {
        echo "error: \`$1\` has $bytes bytes, and $limit may be carried; its largest files, in bytes before compression:"
        find "$2" -type f -printf '%12s  %P\n' | sort --numeric-sort --reverse | sed -n '1,5p'
        echo "  hint: take files out of \`$2\` that the sections you run do not need, and run \`archive.sh $2\` again"
    } >&2
    return 1
}

folder=$(cd "${1:?folder made by pack.sh}" && pwd)
tar -C "$folder" -czf "$folder.tgz" .
check_size "$folder.tgz" "$folder"
