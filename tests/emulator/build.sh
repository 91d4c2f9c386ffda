#!/usr/bin/env bash
# Builds the emulated CUDA libraries into a folder: `LD_LIBRARY_PATH=FOLDER ddp-run …` then trains on emulated GPUs.
#
#     tests/emulator/build.sh FOLDER
#
# What is newer than its sources is kept. $CXX is the C++ compiler, as for the kernels later; FOLDER/cache is for them
# (XDG_CACHE_HOME), and emptied with a new libnvrtc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
imitation=$here/../../worker/tests/kernels/cuda_on_cpu/cuda.hpp
mkdir -p "${1:?folder for the libraries}"
folder=$(cd "$1" && pwd)
exec 9>"$folder/.lock"
flock 9

# NAME SOURCE...: all that the library is made of; what ends in .cpp is compiled.
build() {
    local name=$1 source newer= sources=()
    shift
    for source in "$here/build.sh" "$here/cuda.h" "$@"; do
        [[ $folder/$name -nt $source ]] || newer=$source
        [[ $source != *.cpp ]] || sources+=("$source")
    done
    [[ -n $newer ]] || return 0
    echo "building $name"
    [[ $name != libnvrtc.* ]] || rm -rf "$folder/cache"
    "${CXX:-c++}" -std=c++17 -O2 -g -Wall -Wextra -pthread -shared -fPIC -fvisibility=hidden -Wl,-soname,"$name" \
        -DIMITATION="\"$imitation\"" -o "$folder/$name.new" "${sources[@]}" -ldl
    mv "$folder/$name.new" "$folder/$name"
}

build libcuda.so.1 "$here"/{driver.cpp,execution.cpp,driver.hpp,stream.hpp}
build libnvrtc.so.12 "$here/nvrtc.cpp" "$imitation"
build libcublasLt.so.12 "$here/cublaslt.cpp"
build libnccl.so.2 "$here/nccl.cpp" "$here"/nccl_*.hpp
ln -sf libcuda.so.1 "$folder/libcuda.so"
