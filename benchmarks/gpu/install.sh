#!/usr/bin/env bash
# In a folder that benchmarks/gpu_pack.py has made: install what it holds, without network, and run gpu_check.
#   bash FOLDER/install.sh OUTPUT SECONDS [STEP …]
# It writes into OUTPUT and into a folder of its own in /tmp, and changes nothing else.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && output=$(cd "$1" && pwd) && seconds=$2 && shift 2
begin=$(date +%s)
site=$(mktemp -d /tmp/ringcomm-gpu-XXXXXX)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site/packages" "$here"/wheels/*.whl
export PYTHONPATH=$site/packages PYTHONSAFEPATH=1 XDG_CACHE_HOME=$site/cache
mkdir -p -m 700 "$site/cache/ringcomm"
[ ! -f "$here/kernels.tar.xz" ] || tar xJf "$here/kernels.tar.xz" -C "$site/cache/ringcomm"
python3 -c "import cffi, ringcomm; print('ringcomm', ringcomm.__version__, 'in', ringcomm.__file__)"
options=()
[ ! -d "$here/peers" ] || options+=(--wheels "$here/peers")
if [ -f "$here/libnccl.so.2.xz" ]; then
    xz -dc "$here/libnccl.so.2.xz" >"$site/libnccl.so.2"
    options+=(--nccl "$site/libnccl.so.2")
fi
took=$(($(date +%s) - begin))
echo "installed in $took s"
python3 "$here/repository/benchmarks/gpu_check.py" --budget $((seconds - took)) -o "$output" "${options[@]}" "$@"
