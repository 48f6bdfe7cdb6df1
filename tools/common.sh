# Sourced by the other scripts: paths, and what this machine has.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The newest PyTorch that the tests were run with.
torch_version=2.13.0

say() { printf '\n== [%4ds] %s\n' "$SECONDS" "$*"; }

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

has_gpu() { [ -e /dev/nvidiactl ] && nvidia-smi -L >/dev/null 2>&1; }

# make_venv DIR PYTHON [OPTIONS...]: a virtual environment with a recent pip; kept if it is there already.
make_venv() {
  local dir=$1 python=$2
  shift 2
  if [ ! -x "$dir/bin/pip" ]; then
    "$python" -m venv "$@" "$dir" || die "$python cannot make a virtual environment (on Debian: apt-get install python3-venv)"
  fi
  "$dir/bin/pip" install --quiet --upgrade pip
}

# install_torch PIP: the CPU build where there is no GPU and the package sources offer one, else the ordinary one.
install_torch() {
  if has_gpu; then
    "$1" install --quiet "torch==$torch_version"
  elif ! "$1" install --quiet "torch==$torch_version+cpu" 2>/dev/null; then
    echo "pip finds no CPU build of torch $torch_version for this Python: taking the ordinary one, which is large"
    "$1" install --quiet "torch==$torch_version"
  fi
}
