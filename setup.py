"""``pip install .``: builds the messages with the CMakeLists.txt that colcon uses and packs everything into one wheel.

ROS 2 is taken from AMENT_PREFIX_PATH (a sourced distribution) or, failing that, from the virtual environment itself,
where the ``ros-*`` wheels of requirements/ros-*.txt install. colcon never runs this file: package.xml says ament_cmake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
NAME = "pi05_ros"
ENVIRONMENT = Path(sys.executable).parent.parent  # not sys.prefix, which isolated builds and colcon override
BUILD = HERE / "build" / f"pip-{sys.implementation.cache_tag}"

# Goes before the generated imports. ROS opens these libraries by name, and the search path of a sourced distribution
# lacks the lib/ of the environment that pip installs to; what is loaded already is found by its name.
PRELOAD = f"""\
import ctypes as _ctypes
import pathlib as _pathlib

for _library in sorted(_pathlib.Path(__file__).parents[4].glob("lib{NAME}__rosidl_typesupport_*_c.so")):
    _ctypes.CDLL(str(_library))

"""


def generators_path(prefixes: list[str]) -> str:
    """PYTHONPATH for the generators: pip's isolated builds put one in its place that hides all but setuptools."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in inherited if path and "pip-build-env-" not in path]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix in map(Path, prefixes):
        for packages in (
            prefix / "lib" / python / "site-packages",
            prefix / "local" / "lib" / python / "dist-packages",
        ):
            if prefix != ENVIRONMENT and packages.is_dir() and str(packages) not in kept:
                kept.append(str(packages))
    return os.pathsep.join(kept)


class BuildMessages(build_ext):
    """Stands in for the compiler run of one extension: the generated messages and their type support."""

    def run(self) -> None:
        if self.inplace or getattr(self, "editable_mode", False):
            sys.exit(
                "pip install -e is not supported (setuptools' editable wheels leave out libraries and share/): "
                "run `pip install .` once, then put the source tree first on PYTHONPATH"
            )
        stage = self.run_cmake()
        self.collect_python(stage)
        self.collect_data(stage)

    def run_cmake(self) -> Path:
        wheels = (ENVIRONMENT / "share" / "rosidl_cmake").is_dir()
        prefixes = [p for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p] or [str(ENVIRONMENT)]
        if not any((Path(p) / "share" / "rosidl_default_generators").is_dir() for p in prefixes):
            sys.exit(
                f"no ROS 2 found: rosidl_default_generators was expected under share/ of {', '.join(prefixes)}; "
                "source a ROS 2 distribution (Jazzy or Kilted) or `pip install -r requirements/ros-kilted.txt` first"
            )
        environment = dict(
            os.environ, AMENT_PREFIX_PATH=os.pathsep.join(prefixes), PYTHONPATH=generators_path(prefixes)
        )
        environment.pop("PYTHONNOUSERSITE", None)
        stage = BUILD / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        configure = [
            "cmake", "-S", str(HERE), "-B", str(BUILD),
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_TESTING=OFF",
            "-DAMENT_CMAKE_SYMLINK_INSTALL=OFF",
            f"-DCMAKE_INSTALL_PREFIX={stage}",
            f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            # From lib/ and from lib/pythonX.Y/site-packages/pi05_ros to lib/.
            "-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../../..",
        ]  # fmt: skip
        if wheels:
            environment["PATH"] = os.pathsep.join([str(ENVIRONMENT / "bin"), environment.get("PATH", "")])
            configure.append(f"-DCMAKE_PROJECT_INCLUDE={HERE / 'resource' / 'pip_ros.cmake'}")
        for command in (
            configure,
            ["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)],
            ["cmake", "--install", str(BUILD)],
        ):
            subprocess.run(command, check=True, env=environment)
        return stage

    def collect_python(self, stage: Path) -> None:
        generated = next(stage.glob(f"l*/**/{NAME}/msg")).parent
        target = Path(self.build_lib) / NAME
        for folder in ("msg", "srv"):
            shutil.rmtree(target / folder, ignore_errors=True)
            shutil.copytree(generated / folder, target / folder, ignore=shutil.ignore_patterns("*.c", "__pycache__"))
            module = target / folder / "__init__.py"
            module.write_text(PRELOAD + module.read_text(encoding="utf-8"), encoding="utf-8")
        for library in generated.glob("*.so"):
            shutil.copy2(library, target / library.name)

    def collect_data(self, stage: Path) -> None:
        """Libraries, ament index, interface files, CMake configuration, launch/ and config/ go to the prefix."""
        data: dict[str, list[str]] = {}
        for top in ("lib", "share", "include"):
            for file in sorted((stage / top).rglob("*")):
                if file.is_file() and not {"site-packages", "dist-packages"} & set(file.parts):
                    data.setdefault(str(file.parent.relative_to(stage)), []).append(os.path.relpath(file, HERE))
        self.distribution.data_files[:] = data.items()

    def get_outputs(self) -> list[str]:
        return []

    def get_source_files(self) -> list[str]:
        return []


# Begins empty, or modules deleted since the last build would be packed again.
setuptools_build = BUILD / "setuptools"
shutil.rmtree(setuptools_build, ignore_errors=True)
setuptools_build.mkdir(parents=True)
setup(
    # Metadata in the source tree would pass for the installed one's where the source tree is first on the path.
    options={
        "build": {"build_base": str(setuptools_build.relative_to(HERE))},
        "egg_info": {"egg_base": str(setuptools_build.relative_to(HERE))},
    },
    ext_modules=[Extension(f"{NAME}._messages", sources=[])],
    cmdclass={"build_ext": BuildMessages},
    data_files=[],
)
