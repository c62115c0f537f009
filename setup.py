"""Builds the native CPU kernels with the package; without a C++ compiler the install succeeds without them."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# By path: floe_chat cannot be imported before it is installed.
build = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "kernels" / "cpu" / "build.py")))


class BuildKernels(build_ext):
    """Compiles each source with the flags of its own instruction set; the result is a plain library for ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(build.NAME))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.compiler.compiler_type == "msvc":
            self._build_with_msvc(ext, target)
            return
        try:
            # Not with Python's own flags: they would add debug information ten times as large as the kernels. -S drops
            # what $CXXFLAGS adds.
            build.build(target, ["-Wl,-S"])
        except FileNotFoundError as error:
            raise CompileError(str(error)) from error
        except subprocess.CalledProcessError as error:
            raise CompileError(error.stderr) from error

    def _build_with_msvc(self, ext: Extension, target: Path) -> None:
        objects: list[str] = []
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        for source in (*ext.sources, str(build.write_layout(Path(self.build_temp)))):
            flags = build.flags_for(source, "msvc", platform.machine())
            objects += self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags)
        aside = [f"/IMPLIB:{Path(self.build_temp) / 'floe.lib'}"]  # else it gets into the wheel
        self.compiler.link_shared_object(objects, str(target), extra_postargs=aside, target_lang="c++")


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python of a platform, since ctypes loads the library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = Extension(
    "floe_chat.kernels.cpu._floe",
    [f"kernels/cpu/{source}" for source in build.SOURCES],
    optional=os.environ.get("CIBUILDWHEEL") != "1",  # a wheel for others has to have them
)
setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
