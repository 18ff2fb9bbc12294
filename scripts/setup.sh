# Sourced by scripts/run and scripts/test. Makes the virtual environment, once. Messages go to stderr.

say() { printf 'llamagpu: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# set_up run|test: afterwards $VENV is ready to run llamagpu, or its tests. $ROOT is the checkout.
set_up() {
    find_venv "$1"
    installed "$1" || make_venv "$1"
    check_adapter
}

# The environment of a read-only checkout is in the user's cache.
find_venv() {
    VENV=$ROOT/.venv
    if installed "$1" || { [ -d "$VENV" ] && [ -w "$VENV" ]; } || { [ ! -e "$VENV" ] && [ -w "$ROOT" ]; }; then
        return
    fi
    local cache=${LLAMAGPU_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/llamagpu}
    VENV=$cache/venv-$(printf %s "$ROOT" | cksum | cut -d ' ' -f 1)
}

# What an environment was made from: the interpreter, the path of the checkout, pyproject.toml.
fingerprint() { printf '%s\n' "$(readlink -f "$VENV/bin/python" 2>/dev/null)" "$ROOT" "$(<"$ROOT/pyproject.toml")"; }

installed() {
    [ -x "$VENV/bin/python" ] && [ -f "$VENV/.ready-$1" ] && [ "$(<"$VENV/.ready-$1")" = "$(fingerprint)" ]
}

# Sets PYTHON to an interpreter that is new enough and can make environments.
find_python() {
    local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python) name version found='' no_venv=''
    [ -z "${LLAMAGPU_PYTHON:-}" ] || candidates=("$LLAMAGPU_PYTHON")
    for name in "${candidates[@]}"; do
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        found="$found, $name is $version"
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        PYTHON=$name
        ! "$name" -c 'import ensurepip, venv' 2>/dev/null || return 0
        no_venv=${no_venv:-$version}
    done
    if [ -n "$no_venv" ]; then
        say "Python $no_venv is here, but without what it takes to make virtual environments"
        die "run \`apt-get install python$no_venv-venv\`, or name another Python with LLAMAGPU_PYTHON=/path/to/python"
    fi
    say "Python 3.11 or newer is needed${found:-, and there is none}"
    die "install one (\`apt-get install python3.12-venv\`, \`dnf install python3.12\`, \`brew install python\`)" \
        "or name it with LLAMAGPU_PYTHON=/path/to/python"
}

# Shows one line that grows with the work. A killed run leaves no damage: the next run repeats the step.
make_venv() {
    local extras='' started=$SECONDS log=$VENV/install.log
    [ "$1" = run ] || extras='[test,dev]'
    find_python
    mkdir -p "$VENV" 2>/dev/null || die "cannot write to $VENV; set LLAMAGPU_CACHE to a folder that you may write to"
    exec 9>"$VENV/.lock"
    lock
    if installed "$1"; then exec 9>&-; return; fi  # another run was faster

    printf %s "llamagpu: setting up $VENV ($("$PYTHON" --version)) ..." >&2
    rm -f "$VENV"/.ready-*
    if [ -e "$VENV/.unfinished" ] || ! usable; then
        touch "$VENV/.unfinished"
        rm -rf "${VENV:?}"/{bin,include,lib,lib64,share,pyvenv.cfg}
        "$PYTHON" -m venv "$VENV" >"$log" 2>&1 || install_failed "$log"
    fi
    touch "$VENV/.unfinished"
    printf %s " installing packages (half a minute or so) ..." >&2
    # The user's pip settings apply (index, proxy), except those that install packages elsewhere.
    (cd "$ROOT" && unset PIP_TARGET PIP_PREFIX PIP_ROOT && export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 &&
        "$VENV/bin/python" -P -m pip install --editable ".$extras") >"$log" 2>&1 </dev/null || install_failed "$log"
    fingerprint >"$VENV/.ready-run"
    [ "$1" = run ] || fingerprint >"$VENV/.ready-$1"
    rm -f "$VENV/.unfinished"
    printf ' done in %s s\n' $((SECONDS - started)) >&2
    exec 9>&-
}

# The lock belongs to file descriptor 9: it outlives the Python process that takes it and ends with this shell.
lock() {
    "$PYTHON" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("llamagpu: waiting for another run that is setting up", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks'
}

usable() {
    "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        { "$VENV/bin/python" -P -m pip --version || "$VENV/bin/python" -P -m ensurepip; } >/dev/null 2>&1
}

install_failed() {
    rm -f "$VENV/.unfinished"  # pip undoes an installation that fails
    local remedy='Check `pip config list`, then try again' cause
    cause=$(grep -E '^ *(ERROR|OSError|error):' "$1" | grep -v subprocess-exited | tail -n 1 | sed 's/^ *//') || true
    if grep -q 'No space left' "$1"; then
        cause='no space left on the disk' remedy='Free some (200 MB), then try again'
    elif grep -qE 'NewConnection|NameResolution|ConnectTimeout|ReadTimeout|ProxyError' "$1"; then
        cause='the package index does not answer' remedy='Check the network and pip'"'"'s proxy settings, then try again'
    fi
    printf '\n' >&2
    die "set-up failed: ${cause:-see the log}. $remedy; the whole log is $1"
}

# A missing adapter is no error here: some commands need none, and the others report it.
check_adapter() {
    if [ -f "$VENV/.adapter" ] && [ "$(<"$VENV/.adapter")" = "$(drivers)" ]; then return; fi
    local how sudo='sudo ' found=''
    [ "$(id -u)" != 0 ] || sudo=
    if has_adapter || { install_mesa && has_adapter; }; then found=yes; fi
    { drivers >"$VENV/.adapter"; } 2>/dev/null || true  # the check and the message are repeated only when the drivers change
    [ -z "$found" ] || return 0
    say "no WebGPU adapter was found: install your GPU's Vulkan driver, or Mesa's software driver with"
    for how in 'apt-get install mesa-vulkan-drivers' 'dnf install mesa-vulkan-drivers vulkan-loader' \
        'pacman -S vulkan-swrast vulkan-icd-loader' 'zypper install libvulkan_lvp libvulkan1' \
        'apk add mesa-vulkan-swrast vulkan-loader'; do
        ! command -v "${how%% *}" >/dev/null || say "    $sudo$how"
    done
}

# Changes with the machine or container that the checkout is on.
drivers() { printf '%s\n' "${HOSTNAME:-}" /usr/share/vulkan/icd.d/* /etc/vulkan/icd.d/*; }

has_adapter() {
    # The package never selects an OpenGL adapter, so it does not count here.
    "$VENV/bin/python" -P -c 'import sys, wgpu
sys.exit(all(a.info["backend_type"] == "OpenGL" for a in wgpu.gpu.enumerate_adapters_sync()))' >/dev/null 2>&1
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

install_mesa() {
    local apt=(as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120) log=$VENV/mesa.log
    command -v apt-get >/dev/null && as_root true 2>/dev/null || return 1
    printf %s "llamagpu: no WebGPU adapter, installing Mesa's software Vulkan driver ..." >&2
    "${apt[@]}" update >"$log" 2>&1 </dev/null  # if that fails, the present lists may suffice
    if "${apt[@]}" install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers >>"$log" 2>&1 </dev/null; then
        printf ' done\n' >&2
    else
        printf ' failed (%s): %s\n' "$log" "$(grep -m 1 '^E:' "$log" || echo 'no reason was given')" >&2
        return 1
    fi
}
