#!/usr/bin/env bash
# Installs the Debian packages that the build needs, and those given as arguments, without questions. Does nothing if all
# are installed.
set -euo pipefail

packages=(
  g++ cmake ninja-build make pkg-config
  libdnnl-dev ocl-icd-opencl-dev libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libboost-dev
  libsentencepiece-dev libpcre2-dev libutf8proc-dev libzstd-dev zlib1g-dev libedit-dev
  libgtest-dev
  libopenmpi-dev openmpi-bin
  "$@"
)

# NCCL for several GPUs, if a CUDA toolkit without it is installed and the package exists. The build works without it.
if toolkit=$(command -v nvcc) && ! ls "$(dirname "$toolkit")"/../include/nccl.h /usr/include/nccl.h >/dev/null 2>&1 &&
    apt-cache show libnccl-dev >/dev/null 2>&1; then
  packages+=(libnccl-dev)
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "setup: only Debian and Ubuntu are supported; install these packages: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "setup: root is needed to install ${missing[*]}; run this script as root, or install sudo" >&2; exit 1; }
  as_root=(sudo -n)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
