#!/usr/bin/env bash
# Proves that `pip install .` and `colcon build` give a working package, each from a clean copy of the source tree.
#
#   scripts/check_install.sh                      in a new environment, everything
#   scripts/check_install.sh ENVIRONMENT CHECK... in an environment with ROS 2 and colcon: pip, colcon, colcon-symlink
#
# Read from the environment: PYTHON and ROS_WHEELS, as for scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
if [[ -z ${ROS_DISTRO:-} ]]; then
  # Of the wheels of whoever called; the environments below find their own.
  unset _ROS_WHEELS_BOOTSTRAP_COMPLETE PYTHONPATH AMENT_PREFIX_PATH LD_LIBRARY_PATH
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
source=$scratch/workspace/src/pi05_ros
mkdir -p "$source"
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [[ -f $file ]]; then printf '%s\0' "$file"; fi
  done | tar --null --files-from=- -c | tar -x -C "$source"
else
  tar -c --exclude='./.venv*' --exclude=./build --exclude=./install --exclude=./log . | tar -x -C "$source"
fi

log=$scratch/log
quietly() {
  "$@" >"$log" 2>&1 </dev/null || {
    tail -n 40 "$log" >&2
    echo "failed: $*" >&2
    exit 1
  }
}

if (($# == 0)); then
  environment=$scratch/environment
  checks=(pip colcon colcon-symlink)
  echo "new environment: ${PYTHON:-python3}, ${ROS_DISTRO:-${ROS_WHEELS:-kilted} wheels}"
  if [[ -n ${ROS_DISTRO:-} ]]; then
    quietly "${PYTHON:-python3}" -m venv --system-site-packages "$environment"
  else
    quietly "${PYTHON:-python3}" -m venv "$environment"
    quietly "$environment/bin/pip" install -r "requirements/ros-${ROS_WHEELS:-kilted}.txt"
  fi
  quietly "$environment/bin/pip" install numpy colcon-common-extensions
else
  environment=$(cd "$1" && pwd)
  checks=("${@:2}")
fi
python=$environment/bin/python

# An environment on top of that one, without what .pth files add there (.venv puts its source tree first).
on_top() {
  local site=() base purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  [[ -z ${ROS_DISTRO:-} ]] || site=(--system-site-packages)
  base=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  quietly "$base" -m venv "${site[@]}" "$1"
  "$python" -c "$purelib" >"$("$1/bin/python" -c "$purelib")/_below.pth"
}

# The libraries of wheels, which their own .pth file would put on the path, without those of an installation of ours.
below_libraries() {
  local packages library
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$scratch/lib"
  for library in "$environment"/lib/lib*.so*; do
    [[ $library == */libpi05_ros__* ]] || ln -sf "$library" "$scratch/lib/"
  done
  printf '%s:' "$scratch/lib" "$packages"/ros_*.libs
}

probe() { (cd "$scratch" && "$1/bin/python" "$root/scripts/probe_install.py" "$source" "$2"); }

check_pip() {
  on_top "$scratch/pip"
  (
    cd "$scratch"
    quietly "$python" -m pip wheel --no-deps --no-build-isolation -w "$scratch/dist" "$source"
    quietly "$scratch/pip/bin/python" -m pip install --ignore-installed --no-deps --no-index "$scratch"/dist/pi05_ros-*.whl
  )
  # Without the new environment's own lib/, which a sourced distribution does not look into either.
  LD_LIBRARY_PATH=$([[ -n ${ROS_DISTRO:-} ]] || below_libraries)${LD_LIBRARY_PATH:-} PATH=$scratch/pip/bin:$PATH \
    probe "$scratch/pip" "$scratch/pip"
}

check_colcon() (
  cd "$scratch/workspace"
  rm -rf build install log
  [[ -d $scratch/colcon ]] || on_top "$scratch/colcon"
  arguments=("-DPython3_EXECUTABLE=$python" -DBUILD_TESTING=OFF)
  if [[ -z ${ROS_DISTRO:-} ]]; then
    export AMENT_PREFIX_PATH=$environment CMAKE_PREFIX_PATH=$environment
    arguments+=("-DCMAKE_PROJECT_INCLUDE=$source/resource/pip_ros.cmake")
  fi
  PATH=$environment/bin:$PATH quietly "$python" -m colcon build "$@" --cmake-args "${arguments[@]}"
  export PATH=$scratch/colcon/bin:$PATH
  # As a user's shell does; the script of ament reads variables that may be unset.
  set +u
  # shellcheck disable=SC1091
  source install/setup.bash
  [[ -n ${ROS_DISTRO:-} ]] || export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$(below_libraries)
  probe "$scratch/colcon" "$scratch/workspace/install/pi05_ros"
)

for check in "${checks[@]}"; do
  start=$SECONDS
  case $check in
    pip) found=$(check_pip) ;;
    colcon) found=$(check_colcon) ;;
    colcon-symlink) found=$(check_colcon --symlink-install) ;;
    *) echo "pip, colcon or colcon-symlink was expected, not $check" >&2 && exit 2 ;;
  esac
  echo "$check: $found ($((SECONDS - start)) s)"
done
