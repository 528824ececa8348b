#!/usr/bin/env bash
# Sets up .venv: ROS 2 (a sourced distribution, else wheels), the Python packages, and this package with its messages.
# Runs again in a second when nothing has changed. Read from the environment: PYTHON (default python3) and
# ROS_WHEELS (kilted or jazzy; default kilted; without effect in a sourced distribution).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
venv=$root/.venv
python=${PYTHON:-python3}
wheels=${ROS_WHEELS:-kilted}
log=$root/build/setup.log

say() { echo "[set-up] $*"; }
fail() {
  echo "[set-up] $*" >&2
  exit 1
}

# quietly WHAT COMMAND...: runs the command into the log and shows the log's end when it fails.
quietly() {
  local what=$1 start=$SECONDS
  shift
  say "$what ..."
  { echo "== $what: $*" && "$@"; } >>"$log" 2>&1 </dev/null || {
    tail -n 25 "$log" >&2
    fail "$what failed; all of it is in ${log#"$root"/}"
  }
  ((SECONDS - start < 5)) || say "  done in $((SECONDS - start)) s"
}

check_machine() {
  command -v "$python" >/dev/null || fail "PYTHON=$python was not found; install python3 or name another: make PYTHON=..."
  # The interpreter behind an active virtual environment, so that .venv never hangs on another environment.
  python=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  case $version in
    3.10 | 3.11 | 3.12 | 3.13) ;;
    *) fail "Python 3.10 to 3.13 was expected, $python is Python $version; name another: make PYTHON=python3.12" ;;
  esac
  local missing=()
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python$version-venv")
  "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' \
    || missing+=("python$version-dev")
  local tool
  for tool in make gcc g++ cmake; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]} == 0)) || fail "missing: ${missing[*]}; install with: sudo apt install ${missing[*]}"
}

choose_ros() {
  if [[ -n ${ROS_DISTRO:-} ]]; then
    case $ROS_DISTRO in
      jazzy | kilted) ;;
      *) fail "ROS 2 Jazzy or Kilted was expected, $ROS_DISTRO is sourced; without a sourced one, wheels are used" ;;
    esac
    "$python" -c 'import rclpy' 2>/dev/null || fail "ROS 2 $ROS_DISTRO is sourced, but its rclpy cannot be imported by" \
      "$python (Python $version); name the distribution's Python with make PYTHON=..., or use a shell without it"
    ros="$ROS_DISTRO (sourced)"
  else
    [[ -f requirements/ros-$wheels.txt ]] || fail "ROS_WHEELS=kilted or ROS_WHEELS=jazzy was expected, not $wheels"
    ros="$wheels (wheels)"
  fi
}

# What the environment rests on; another interpreter or another ROS needs a new environment.
base_key() { echo "$python $version, ROS 2 $ros"; }
requirements_key() { cat requirements/*.txt scripts/setup.sh | sha256sum; }
# Python modules are not in it: .venv reads them from the source tree.
package_key() {
  find msg srv launch config resource pi05_ros/assets CMakeLists.txt package.xml pyproject.toml setup.py \
    -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum
}

stamp_is() { [[ -f $venv/.set-up-$1 && $(<"$venv/.set-up-$1") == "$2" ]]; }
stamp() { echo "$2" >"$venv/.set-up-$1"; }

make_environment() {
  local site=()
  [[ -z ${ROS_DISTRO:-} ]] || site=(--system-site-packages)
  if [[ -e $venv ]]; then
    [[ -f $venv/.set-up-base ]] || fail ".venv is not one of ours; move it away and try again"
    say ".venv was made for $(<"$venv/.set-up-base"); making it anew"
    rm -rf "$venv"
  fi
  quietly "virtual environment .venv: Python $version, ROS 2 $ros" "$python" -m venv "${site[@]}" "$venv"
  stamp base "$(base_key)"
}

install_requirements() {
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
  if [[ -z ${ROS_DISTRO:-} ]]; then
    quietly "ROS 2 $wheels as wheels (about 90 packages)" "${pip[@]}" -r "requirements/ros-$wheels.txt"
  fi
  quietly "Python packages (torch is the large one)" "${pip[@]}" -c requirements/constraints.txt \
    -r requirements/python.txt -r requirements/test.txt
  stamp requirements "$(requirements_key)"
}

install_package() {
  quietly "messages and this package" "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    --no-deps --no-build-isolation --force-reinstall .
  # The source tree comes first in .venv: a changed module needs no reinstallation, and the messages are found through
  # pi05_ros.__path__. (pip's editable installations leave out libraries and share/.)
  echo "import sys; sys.path.insert(0, '$root')" \
    >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_pi05_ros_source.pth"
  stamp package "$(package_key)"
}

mkdir -p build
check_machine
choose_ros
exec 9>build/.set-up-lock
flock -n 9 || { say "waiting for another set-up of this folder" && flock 9; }
start=$SECONDS
stamp_is base "$(base_key)" || make_environment
stamp_is requirements "$(requirements_key)" || install_requirements
stamp_is package "$(package_key)" || install_package
say "ready: .venv with Python $version, ROS 2 $ros ($((SECONDS - start)) s)"
