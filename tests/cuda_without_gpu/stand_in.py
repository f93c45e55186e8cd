"""Puts torch's CUDA build over the runtime without a device (`runtime.cpp`): downloads, compiles, says what
a process over it needs.

The wheels come from PyPI by pip, without what they depend on: every library of CUDA's that torch links
against is replaced. What is made lies outside of the repository and is made again only when it has changed:

    wheels/    as downloaded; carry them there where no network is
    site/      torch and torchvision, unpacked; the other packages are those of the Python that runs
    lib/       the replaced libraries
    hook/      what Python reads first
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
PINNED = ("torch==2.11.0", "torchvision==0.26.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# torchvision brings a runtime of its own, which would ask a driver.
UNUSED = (
    "torch/include/", "torch/share/", "torch/test/", "torchvision.libs/libcu",
    "torchvision.libs/libnv",
)  # fmt: skip
TOOLS = ("gcc", "g++", "nm", "objdump")
# Nobody links against these; torch looks for them, and for these functions, while it runs.
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
LOOKED_UP = (
    "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetGpuFabricInfoV",
)  # fmt: skip
OF_CUDA = re.compile(
    r"(?:__cuda|cuda|cublas|cudnn|cufft|curand|cusparse|cusolver|cupti|cuFile|cu[A-Z]|nccl|nv)"
)
# What a stream is given to compute, so that it takes its time there.
COMPUTES = re.compile(r"cublas\w*?(?:[Gg]emm|[Gg]emv|[Dd]ot|[Gg]er|[Tt]rsm|[Ss]yrk)")


class CannotBuildError(RuntimeError):
    """What is missing here, with the remedy."""


def default_folder() -> Path:
    """Where it is made unless somebody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gpipe-bench" / "cuda-without-gpu"


def prepare(folder: Path) -> Path:
    """Makes what is not there yet or no longer up to date; `CannotBuildError` says what is missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CannotBuildError(
            f"torch's CUDA build is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
        )
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise CannotBuildError(f"{', '.join(missing)} not found; install a C++ compiler (gcc, g++, binutils)")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # somebody else may be making it, for the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    site, include, lib = (folder / name for name in ("site", "include", "lib"))
    sources = [(HERE / name).read_text(encoding="utf-8") for name in ("runtime.cpp", "stand_in.py")]
    for made, of, make in (
        (site, (*PINNED, *UNUSED, tag), lambda: _unpack(_wheels(folder / "wheels", tag), site, include)),
        (lib, (*sources, *PINNED, tag), lambda: _compile(site, include, lib)),
    ):
        stamp, wanted = made.with_suffix(".sha256"), hashlib.sha256("\0".join(of).encode()).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            make()
            stamp.write_text(wanted)
    shutil.copytree(HERE / "hook", folder / "hook", dirs_exist_ok=True, ignore=lambda *_: ["__pycache__"])


def variables(folder: Path, root: Path, *, gpus: int = 1, gib: float | None = None) -> dict[str, str]:
    """The environment of a process over the built folder, which imports the project from `root`."""
    found = {
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "hook", folder / "site", root))),
        "FAKE_GPUS": str(gpus),
    }
    return {**os.environ, **found, **({} if gib is None else {"FAKE_GIB": str(gib)})}


def _wheels(folder: Path, tag: str) -> list[Path]:
    """The pinned wheels, downloaded unless they lie there."""

    def there(requirement: str) -> list[Path]:
        name, _, version = requirement.partition("==")
        found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        return [path for path in found if f"-{tag}-" in path.name or "-py3-" in path.name]

    missing = [requirement for requirement in PINNED if not there(requirement)]
    if missing:
        choices = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        choices += [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *choices, *missing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip says nothing"]
            said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise CannotBuildError(
                f"{', '.join(missing)} for {tag} cannot be downloaded: {said}; without a network, carry the "
                f"wheels for {PLATFORMS[0]} to {folder}"
            )
    return [there(requirement)[0] for requirement in PINNED]


def _unpack(wheels: list[Path], site: Path, include: Path) -> None:
    for folder in (site, include):
        shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            if wheel.name.startswith("nvidia"):
                packed.extractall(include, [name for name in packed.namelist() if "/include/" in name])
            else:
                used = [name for name in packed.namelist() if not name.startswith(UNUSED)]
                packed.extractall(site, used)


def _compile(site: Path, include: Path, lib: Path) -> None:
    """One library with all functions, and one of each name that torch links against, which leads to it."""
    shutil.rmtree(lib, ignore_errors=True)
    lib.mkdir()
    linked = [*site.glob("torch/lib/*.so*"), *site.glob("torch/*.so"), *site.glob("torchvision/*.so")]
    names, versions, called = set(DRIVER), dict[str, set[str]](), set(LOOKED_UP)
    for path in linked:
        said = _said("objdump", "-p", path)
        names |= {name for name in re.findall(r"NEEDED\s+(lib\S+)", said) if _is_replaced(name)}
        for name, lines in re.findall(r"required from (\S+):\n((?:    .*\n)+)", said):
            versions.setdefault(name, set()).update(line.split()[-1] for line in lines.splitlines())
        for line in _said("nm", "-D", "--undefined-only", path).splitlines():
            called.add(line.split()[-1].partition("@")[0])
    written = set(re.findall(r"^API [^;{(]*?[ *](\w+)\(", (HERE / "runtime.cpp").read_text(), re.MULTILINE))
    stubs = ['#define API __attribute__((visibility("default")))', "long fake_cublas(void*);"]
    for name in sorted(called - written):
        if COMPUTES.match(name):
            stubs.append(f"API long {name}(void* handle) {{ return fake_cublas(handle); }}")
        elif OF_CUDA.match(name):
            stubs.append(f"API long {name}() {{ return 0; }}")
    (lib / "stubs.c").write_text("\n".join(stubs) + "\n")
    headers = next(include.glob("nvidia/*/include"))
    options = ("-O1", "-fPIC", "-w")
    _said("gcc", *options, "-c", lib / "stubs.c", "-o", lib / "stubs.o")
    _said("g++", *options, "-std=c++17", f"-I{headers}", "-c", HERE / "runtime.cpp", "-o", lib / "runtime.o")
    whole = lib / "libfake_cuda.so"
    _said("g++", "-shared", "-o", whole, lib / "runtime.o", lib / "stubs.o", "-lpthread", "-lrt")
    (lib / "empty.c").write_text("")
    for name in sorted(names):
        nodes = [f"{version} {{ local: nothing; }};\n" for version in sorted(versions.get(name, ()))]
        (lib / "versions").write_text("".join(nodes))
        script = [f"-Wl,--version-script={lib / 'versions'}"] if nodes else []
        _said(
            "gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", *script, f"-Wl,-soname,{name}", "-o", lib / name,
            lib / "empty.c", f"-L{lib}", "-lfake_cuda", "-Wl,-rpath,$ORIGIN",
        )  # fmt: skip


def _is_replaced(name: str) -> bool:
    return re.match(r"lib(?:cu|nccl|nv)", name) is not None


def _said(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(map(str, command))}: {done.stderr.strip()[-500:]}")
    return done.stdout
