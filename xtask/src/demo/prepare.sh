# Runs inside, as `user`: a repository with history, a clone of it, and a package made of it. Needs no network.
set -euo pipefail
export GIT_AUTHOR_NAME=demo GIT_AUTHOR_EMAIL=demo@example.invalid
export GIT_COMMITTER_NAME=demo GIT_COMMITTER_EMAIL=demo@example.invalid
cd "$HOME"
git init -q -b main origin
for number in 1 2 3 4 5; do
    echo "line $number of a file with history" >> origin/README
    git -C origin add README
    git -C origin commit -q -m "Say line $number"
done
git clone -q origin work
mkdir -p package/DEBIAN package/usr/local/bin
cat > package/DEBIAN/control <<'CONTROL'
Package: demo-hello
Version: 1.0
Architecture: all
Maintainer: demo <demo@example.invalid>
Description: says hello
CONTROL
printf '#!/bin/sh\necho hello from a package\n' > package/usr/local/bin/demo-hello
chmod 755 package/usr/local/bin/demo-hello
dpkg-deb --build --root-owner-group -Zgzip package demo-hello.deb > /dev/null
