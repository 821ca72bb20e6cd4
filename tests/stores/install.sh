#!/usr/bin/env bash
# Installs the servers of tests/stores that are not here: Ceph and node by apt-get (Debian, Ubuntu;
# as root or by a sudo that asks nothing), Azurite by npm into tests/stores/node_modules, an emulator
# of Google's storage by pip. Usage: tests/stores/install.sh PYTHON
set -euo pipefail

python=${1:?usage: tests/stores/install.sh PYTHON}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
azurite=3.37.0

packages=()
for program in ceph ceph-authtool ceph-mon ceph-osd monmaptool radosgw radosgw-admin; do
    if ! command -v "$program" >/dev/null; then
        packages+=(ceph-mon ceph-osd radosgw ceph-common)
        break
    fi
done
command -v node >/dev/null || packages+=(nodejs)
command -v npm >/dev/null || packages+=(npm)

if ((${#packages[@]})); then
    root=()
    if ((EUID != 0)); then
        root=(sudo -n)
        if ! sudo -n true 2>/dev/null; then
            echo "test-stores: needs root for: apt-get install --no-install-recommends ${packages[*]}" >&2
            exit 1
        fi
    fi
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi

if [[ ! -x $here/node_modules/.bin/azurite-blob ]]; then
    npm install --prefix "$here" --no-save --no-package-lock --no-audit --no-fund --silent \
        "azurite@$azurite"
fi

"$python" -m pip install --quiet -c "$here/../../constraints.txt" gcp-storage-emulator
