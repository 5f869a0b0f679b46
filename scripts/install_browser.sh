#!/usr/bin/env bash
# Install what the tests of reports in a browser need: Chromium, and npm for axe-core. Where that is
# not possible those tests are skipped, and say so.
set -euo pipefail
packages=()
command -v chromium >/dev/null || packages+=(chromium)
command -v npm >/dev/null || packages+=(npm)
[ ${#packages[@]} -gt 0 ] || exit 0
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
}
if ! { install || { apt-get update -qq && install; }; } >/dev/null 2>&1; then
    echo "not all of these could be installed: ${packages[*]}"
fi
