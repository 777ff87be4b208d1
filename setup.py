"""Builds the three compiled parts of specdec_kernels. The rest of the metadata is in pyproject.toml.

======================  =============================  ============================================================
``_C_cpu.so``           csrc/bind_cpu.cpp, csrc/cpu/   CPU kernels on torch's stable ABI; needs torch's headers
``_C_cuda.so``          csrc/bind_cuda.cpp, csrc/cuda  the same for CUDA, where nvcc is found; torch may be CPU-only
``_host.cpython-*.so``  csrc/host/                     pybind11 module; without it slower ways in Python serve
======================  =============================  ============================================================

``setup.py build_emulated`` makes a fourth for the tests alone, build/emulated/_C_emulated.so: the CUDA kernels compiled
for the CPU (csrc/emulator). No package contains it. ``setup.py build_kernels`` only compiles the CUDA kernels, for
every architecture that we support, and leaves the compiler's output beside the objects, for .ci/resources.py.
``setup.py build_sanitized`` makes a copy of the package in build/sanitized whose CPU library and host module run under
ASan and UBSan, for python_tests/fuzz.

Environment variables read here, and nowhere at run time:

``SPECDEC_CUDA``        ``auto`` (default: build where nvcc works), ``0`` (never), ``1`` (stop where it cannot be built)
``SPECDEC_CUDA_ARCHS``  ``;``-separated, e.g. ``80;90a;120+PTX``; or ``all``, every architecture we support: for a wheel
                        that is handed on. Default: the GPU at hand's (nvidia-smi); without one ``80+PTX;90a``, which
                        every GPU since Ampere runs (an editable install: ``80+PTX``, the quickest to compile)
``CUDA_HOME``, ``CXX``  where nvcc is looked for first; the C++ compiler (default: the first of c++, g++, clang++)
``SPECDEC_WERROR``      ``1``: compiler warnings, and register spills of CUDA kernels, stop the build (as in CI)
``MAX_JOBS``            compilers run at once (default: the cores this process may use)
``USE_NINJA``           ``0``: not by ninja although it is there; as of torch's own extensions

Objects are kept in build/obj with dependency files, so only what changed is compiled again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

from setuptools import Command, Extension, setup
from setuptools import __version__ as setuptools_version
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "specdec_kernels"
OBJECTS = Path("build/obj")
OLDEST_TORCH, OLDEST_SETUPTOOLS = "2.11", "77"
TORCH_TARGET_VERSION = "0x020B000000000000"  # the same, for torch's headers: anything newer or unstable is an #error
RELEASE_ARCHS = "80+PTX;90a;100;120+PTX"
COMMON_ARCHS = "80+PTX;90a"
EDITABLE_ARCHS = "80+PTX"

# What the compiled parts were built beside: backends/native.py refuses parts built for another order of arguments, and
# a host module that lays out differently what it hands to the libraries.
CONTRACT = runpy.run_path(str(ROOT / PACKAGE / "backends/contract.py"))["contract"]()
DIRECT_LAYOUT = zlib.crc32((ROOT / "csrc/direct_ops.h").read_bytes())
BUILT_BESIDE = [f"-DSPECDEC_CONTRACT={CONTRACT}", f"-DSPECDEC_DIRECT_LAYOUT={DIRECT_LAYOUT}"]
BOUND = ("csrc/bind_cpu.cpp", "csrc/bind_cuda.cpp", "csrc/host/bind_host.cpp")

# No -ffast-math and no contraction: the order and rounding of every sum are part of the contract. No -march=native: the
# files of isa/ get their own instruction set and are chosen at run time.
# Warnings are errors in CI, but not for a user whose newer compiler warns of something else.
STRICT = os.environ.get("SPECDEC_WERROR", "0") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if STRICT else [])]
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS]
NVCC_HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS]
NVCC_FLAGS = [
    *("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-fmad=false"),
    *("-Xptxas=--warn-on-spills", "-Xptxas=-v", f"-Xcompiler={','.join(NVCC_HOST_FLAGS)}"),
    *(["-Werror=all-warnings", "-Xptxas=--warning-as-error"] if STRICT else []),
]
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512".split(),
}


def say(message: str) -> None:
    sys.stderr.write(f"{PACKAGE}: {message}\n")  # one write: print() makes two, and threads would mix their lines


def stop(message: str) -> NoReturn:
    raise SystemExit(f"{PACKAGE}: {message}")


# Only the fuzzer loads what is built with these flags.
SANITIZERS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


# ---------------------------------------------------------------- what this machine has


NO_CXX = "no C++ compiler was found (c++, g++, clang++ or CXX)"


def find_cxx() -> list[str] | None:
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        try:
            command = shlex.split(wanted)
        except ValueError as error:
            stop(f"CXX must be a command, got {wanted!r}: {error}")
        if shutil.which(command[0]) is None:
            stop(f"the C++ compiler CXX={wanted} was not found")
        return command
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def is_older(version: str, oldest: str) -> bool:
    found, needed = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, oldest))
    return found < needed


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None:
        stop(
            f"the build needs torch >= {OLDEST_TORCH} in this environment: install torch first, "
            "then `pip install --no-build-isolation .`"
        )
    version = importlib.metadata.version("torch")
    if is_older(version, OLDEST_TORCH):
        stop(f"the build needs torch >= {OLDEST_TORCH}, found {version}")
    return folder


def wanted_cuda() -> str:
    wanted = os.environ.get("SPECDEC_CUDA", "").strip() or "auto"
    if wanted not in ("auto", "0", "1"):
        stop(f"SPECDEC_CUDA must be auto, 0 or 1, got {wanted!r}")
    return wanted


def without_cuda(reason: str, instead: str = "building for the CPU only") -> None:
    """Stop if CUDA was asked for; otherwise say why it is left out."""
    if wanted_cuda() == "1":
        stop(f"SPECDEC_CUDA=1, but {reason}")
    say(f"{reason}: {instead}")


def find_nvcc() -> str | None:
    if wanted_cuda() == "0":
        say("SPECDEC_CUDA=0: building without CUDA")
        return None
    home = os.environ.get("CUDA_HOME")
    for candidate in (home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    without_cuda("nvcc was found neither in CUDA_HOME nor on PATH")
    return None


def cuda_library_folder(nvcc: str) -> Path | None:
    # nvcc may be a wrapper script anywhere on PATH, so ask it where its toolkit is; and whether it is new enough.
    command = [nvcc, "-std=c++20", "--dryrun", "-c", "-x", "cu", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        report, failed = done.stderr.strip(), done.returncode != 0
    except OSError as error:  # for another machine, or no program at all
        report, failed = str(error), True
    top = re.search(r"^#\$ TOP=(.+)$", report, re.MULTILINE)
    if failed or top is None:
        last = report.splitlines()[-1] if report else "it printed nothing"
        without_cuda(f"{nvcc} does not work: {last}" if failed else f"{nvcc} --dryrun names no toolkit (a line TOP=)")
        return None
    home = Path(top[1].strip())
    folders = [home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))]  # as NVIDIA, pip and conda have it
    found = next((folder for folder in folders if (folder / "libcudart_static.a").exists()), None)
    if found is None:
        without_cuda(f"{nvcc} has no libcudart_static.a in {', '.join(map(str, folders))}")
    return found


def wanted_archs(editable: bool, nvcc: str) -> str:
    """What to compile for: as asked, else for the GPUs at hand, else what most GPUs run."""
    if wanted := os.environ.get("SPECDEC_CUDA_ARCHS", "").strip():
        return RELEASE_ARCHS if wanted == "all" else wanted
    default = EDITABLE_ARCHS if editable else COMMON_ARCHS
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            answer = ""
        found = {int("".join(number)) for number in re.findall(r"^(\d+)\.(\d)\s*$", answer, re.MULTILINE)}
        if found and min(found) >= 80:
            said = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
            known = {int(number) for number in re.findall(r"compute_(\d+)", said)} or found
            # If nvcc is too old for a GPU, the driver compiles for it what is meant for the newest one before it.
            own = (f"{g}" if g in known else f"{max([k for k in known if k < g] or [g])}+PTX" for g in sorted(found))
            default = ";".join(dict.fromkeys("90a" if arch == "90" else arch for arch in own))
    say(f"compiling CUDA kernels for {default}: minutes each (SPECDEC_CUDA_ARCHS chooses others, or all)")
    return default


def arch_flags(archs: str) -> list[str]:
    flags = []
    for arch in archs.strip(";").split(";"):
        match = re.fullmatch(r"(\d{2,3}[af]?)(\+PTX)?", arch)
        if match is None:
            stop(f"SPECDEC_CUDA_ARCHS must look like 80;90a;120+PTX, got {archs!r}")
        code = f"[sm_{match[1]},compute_{match[1]}]" if match[2] else f"sm_{match[1]}"
        flags.append(f"-gencode=arch=compute_{match[1]},code={code}")
    return flags


# ---------------------------------------------------------------- what is to be built


@dataclass(frozen=True)
class Part:
    """One shared library: how each of its sources is compiled, and how the objects are linked."""

    name: str
    filename: str
    sources: list[str]
    compile: list[str]  # the command for a .cpp source, less source and object
    link: list[str]  # the command for a .cpp source, without source and object
    linker: list[str]
    compile_cuda: list[str] | None = None  # the same for a .cu source
    variant: str = ""  # two variants of a part must not overwrite each other's objects

    @property
    def folder(self) -> Path:
        return OBJECTS / (self.name + self.variant)

    def object(self, source: str) -> Path:
        return self.folder / (source.removeprefix("csrc/").replace("/", "_") + ".o")

    def command(self, source: str) -> list[str]:
        base = self.compile_cuda if source.endswith(".cu") and self.compile_cuda else self.compile
        isa = next((flags for suffix, flags in X86_FLAGS.items() if Path(source).stem.endswith(suffix)), [])
        if platform.machine().lower() not in ("x86_64", "amd64"):
            isa = []
        names = BUILT_BESIDE if source in BOUND else []
        out = self.object(source)
        return [*base, *isa, *names, "-MD", "-MF", str(out.with_suffix(".d")), "-c", source, "-o", str(out)]


def sources(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


SOURCES = {
    "_C_cpu": sources("csrc/bind_cpu.cpp", "csrc/cpu/*.cpp", "csrc/cpu/isa/*.cpp"),
    "_C_cuda": sources("csrc/bind_cuda.cpp", "csrc/cuda/*.cu"),
    "_host": sources("csrc/host/*.cpp"),
}
# device_info.cu is about machine code for a GPU, which this library does not have.
EMULATED = [
    source
    for source in sources("csrc/bind_emulated.cpp", "csrc/emulator/*.cpp", "csrc/cuda/*.cu")
    if not source.endswith("device_info.cu")
]


def torch_flags(cxx: list[str]) -> tuple[list[str], list[str]]:
    """How a C++ source that uses torch is compiled, and the tail of the link command."""
    torch = find_torch()
    include = ["-I", "csrc", "-isystem", str(torch / "include")]
    # libtorch.so must stay NEEDED although nothing refers to it: in a CUDA build of torch it brings libtorch_cuda.so
    # into our scope, and with it the CUDA half of the stable ABI.
    link = ["-Wl,-z,defs", f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    link += ["-ltorch_cpu", "-lc10"]
    return [*cxx, *CXX_FLAGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *include], link


def nvcc_command(nvcc: str, cxx: list[str], archs: str) -> list[str]:
    """How a CUDA source is compiled."""
    host_compiler = ["-ccbin", cxx[0]] if len(cxx) == 1 else []
    # A toolkit that replaced another at the same path makes other objects, so its version is part of the command.
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split()
    names = [f'-DSPECDEC_CUDA_ARCHS="{archs}"', f'-DSPECDEC_NVCC="{version[-1] if version else ""}"']
    return [nvcc, *NVCC_FLAGS, *host_compiler, *arch_flags(archs), *names, "-I", "csrc"]


def plan_cpu(cxx: list[str]) -> Part:
    """The CPU kernels."""
    return Part("_C_cpu", "_C_cpu.so", SOURCES["_C_cpu"], *torch_flags(cxx), cxx)


def plan_host(cxx: list[str]) -> Part | None:
    """The pybind11 module; one line of output if this machine cannot build it."""
    python_include = sysconfig.get_path("include")
    instead = "building without the C++ n-gram index (a Python one serves instead)"
    if importlib.util.find_spec("pybind11") is None:
        say(f"pybind11 is not installed: {instead}")
        return None
    if not Path(python_include, "Python.h").exists():
        say(f"Python.h was not found (Debian: python3-dev): {instead}")
        return None
    import pybind11

    include = ["-I", "csrc", "-isystem", pybind11.get_include(), "-isystem", python_include]
    include += ["-isystem", str(find_torch() / "include")]  # for one header in C, DLPack's
    filename = "_host" + sysconfig.get_config_var("EXT_SUFFIX")
    return Part("_host", filename, SOURCES["_host"], [*cxx, *CXX_FLAGS, *include], [], cxx)


def plan(editable: bool) -> list[Part]:
    """The parts this machine can build; one line for each that it cannot."""
    reduced = (
        "installing without compiled kernels; the reference backend and the Python n-gram index serve instead, "
        "10 to 1000 times slower on a CPU"
    )
    if not sys.platform.startswith("linux"):
        without_cuda(f"compiled kernels are built on Linux alone, and this is {platform.system()}", reduced)
        return []
    cxx = find_cxx()
    if cxx is None:
        without_cuda(NO_CXX, reduced)
        return []
    compile_cpu, link_torch = torch_flags(cxx)
    parts = [plan_cpu(cxx)]

    if nvcc := find_nvcc():
        if folder := cuda_library_folder(nvcc):
            archs = wanted_archs(editable, nvcc)
            compile_cuda = nvcc_command(nvcc, cxx, archs)
            compile_bind = [*compile_cpu, "-DUSE_CUDA", "-isystem", str(folder.parent / "include")]
            link_cuda = [*link_torch, f"-L{folder}", "-lcudart_static", "-lrt", "-lpthread", "-ldl"]
            variant = "-" + re.sub(r"\W+", "_", archs)
            parts.append(
                Part("_C_cuda", "_C_cuda.so", SOURCES["_C_cuda"], compile_bind, link_cuda, cxx, compile_cuda, variant)
            )

    if host := plan_host(cxx):
        parts.append(host)
    return [part for part in parts if part.sources]


# ---------------------------------------------------------------- building it


def up_to_date(out: Path, command: list[str], inputs: list[Path] | None = None) -> bool:
    """Whether `out` came from this very command and is newer than `inputs` (default: its dependency file's)."""
    record = out.with_suffix(".cmd")
    if not (out.exists() and record.exists()) or record.read_text() != shlex.join(command):
        return False
    if inputs is None:
        dependencies = out.with_suffix(".d")
        if not dependencies.exists():
            return False
        inputs = [Path(p) for p in shlex.split(dependencies.read_text().replace("\\\n", " ").split(":", 1)[1])]
    built = out.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= built for path in inputs)


@dataclass(frozen=True)
class Job:
    """One run of a compiler or linker."""

    out: Path
    command: list[str]
    inputs: list[Path] | None = None  # a linker's; a compiler's are in its dependency file
    source: str = ""


def run_jobs(jobs: list[Job], folder: Path) -> None:
    """Run what is not up to date: by ninja if it is there, with its log in `folder`, else in threads."""
    for out in {job.out.parent for job in jobs}:
        out.mkdir(parents=True, exist_ok=True)
    ninja = find_ninja()
    if not jobs:
        return
    # Each of the two ways would miss changes that only the other one has recorded.
    if ninja is None:
        (folder / ".ninja_log").unlink(missing_ok=True)
        with_threads([job for job in jobs if job.inputs is None])
        with_threads([job for job in jobs if job.inputs is not None])
        return
    for job in jobs:
        job.out.with_suffix(".cmd").unlink(missing_ok=True)
    manifest = folder / "build.ninja"
    manifest.write_text(NINJA_RULES.format(folder=folder) + "".join(map(ninja_edge, jobs)))
    status = {"NINJA_STATUS": f"{PACKAGE}: [%f of %t, %e s] "}
    command = [*ninja, "-f", str(manifest), "-j", str(max_jobs())]
    if subprocess.run(command, stdout=sys.stderr, env=os.environ | status).returncode:
        cuda = any(job.source.endswith(".cu") for job in jobs) and wanted_cuda() != "1"
        stop("the build failed, as said above" + " (SPECDEC_CUDA=0 builds without CUDA)" * cuda)


def find_ninja() -> list[str] | None:
    if os.environ.get("USE_NINJA", "1") == "0":
        return None
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    return ["ninja"] if shutil.which("ninja") else None


# A compiler's output is kept beside the object (.ci/resources.py reads nvcc's), and shown if it fails.
NINJA_RULES = """\
builddir = {folder}
rule compile
  command = $run > $log 2>&1 || {{ cat $log; exit 1; }}
  depfile = $dependencies
  description = $name
rule link
  command = $run > $log 2>&1 || {{ cat $log; exit 1; }}
  description = $name
"""


def ninja_edge(job: Job) -> str:
    def path(name: Path | str) -> str:
        return re.sub(r"([$ :])", r"$\1", str(name))

    rule, inputs = ("compile", [job.source]) if job.inputs is None else ("link", list(map(str, job.inputs)))
    variables = {
        "run": shlex.join(job.command).replace("$", "$$"), "log": shlex.quote(str(job.out.with_suffix(".log"))),
        "dependencies": path(job.out.with_suffix(".d")), "name": str(job.out.relative_to(OBJECTS)),
    }  # fmt: skip
    lines = [f"build {path(job.out)}: {rule} {' '.join(map(path, inputs))}"]
    return "\n".join([*lines, *(f"  {name} = {value}" for name, value in variables.items()), ""])


def execute(out: Path, command: list[str]) -> None:
    record = out.with_suffix(".cmd")
    record.unlink(missing_ok=True)
    started = time.time_ns()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        stop(f"this command failed:\n{shlex.join(command)}\n{result.stdout}{result.stderr}")
    out.with_suffix(".log").write_text(result.stdout + result.stderr)  # .ci/resources.py reads those of nvcc
    os.utime(out, ns=(started, started))  # a source edited while it is being compiled is newer
    record.write_text(shlex.join(command))


def max_jobs() -> int:
    wanted = os.environ.get("MAX_JOBS", "")
    if not wanted:
        return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    if not (wanted.isdecimal() and int(wanted) > 0):
        stop(f"MAX_JOBS must be a positive number, got {wanted!r}")
    return int(wanted)


@cache
def take_turns() -> TextIO | None:
    """Wait for other builds in this folder `build`; our turn ends with the process, as a wheel is packed last."""
    if sys.platform == "win32":  # it has no fcntl
        return None
    import fcntl

    (ROOT / "build").mkdir(exist_ok=True)
    lock = (ROOT / "build/.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another build of this checkout")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def with_threads(jobs: list[Job]) -> None:
    wanted = [job for job in jobs if not up_to_date(job.out, job.command, job.inputs)]
    began = time.monotonic()
    with ThreadPoolExecutor(max_jobs()) as pool:
        futures = {pool.submit(execute, job.out, job.command): job for job in wanted}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                name = futures[future].out.relative_to(OBJECTS)
                say(f"[{done} of {len(wanted)}, {time.monotonic() - began:.1f} s] {name}")
        finally:
            for future in futures:
                future.cancel()


def compilations(parts: list[Part]) -> list[Job]:
    jobs = [Job(part.object(source), part.command(source), None, source) for part in parts for source in part.sources]
    return sorted(jobs, key=lambda job: not job.source.endswith(".cu"))  # the slow ones first


def compile_and_link(parts: list[Part], destination: Path, folder: Path) -> None:
    jobs = compilations(parts)
    for part in parts:
        objects, out = [part.object(source) for source in part.sources], part.folder / part.filename
        jobs.append(Job(out, [*part.linker, "-shared", "-o", str(out), *map(str, objects), *part.link], objects))
    run_jobs(jobs, folder)
    destination.mkdir(parents=True, exist_ok=True)
    for part in parts:
        out = part.folder / part.filename
        # Replaced in one step: a process that has the old library mapped keeps it.
        temporary = destination / (part.filename + ".new")
        shutil.copy2(out, temporary)
        temporary.replace(destination / part.filename)


class BuildExt(build_ext):
    extensions: list[Extension]

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] == "_host":
            return super().get_ext_filename(fullname)
        return os.path.join(*fullname.split(".")) + ".so"  # no Python symbol inside, so no Python version in the name

    def run(self) -> None:
        os.chdir(ROOT)
        take_turns()
        parts = plan(editable=self.inplace)
        names = {f"{PACKAGE}.{part.name}" for part in parts}
        destination = Path() if self.inplace else Path(self.build_lib)
        for extension in self.extensions:
            if extension.name not in names:  # left by an earlier build: what is there is what was built
                stale = Path(*extension.name.split(".")[:-1], Path(self.get_ext_filename(extension.name)).name)
                (destination / stale).unlink(missing_ok=True)
        self.extensions = [extension for extension in self.extensions if extension.name in names]
        compile_and_link(parts, destination / PACKAGE, OBJECTS)


class OurCommand(Command):
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        os.chdir(ROOT)
        take_turns()


class BuildEmulated(OurCommand):
    description = "build the CUDA kernels as a CPU library for the tests, in build/emulated"

    def run(self) -> None:
        super().run()
        cxx = find_cxx() or stop(NO_CXX)
        compile_cpu, link_torch = torch_flags(cxx)
        compile_cpu += ["-DSPECDEC_EMULATOR", "-O2", "-Wno-unknown-pragmas"]  # "#pragma unroll" is nvcc's
        compile_kernels = [*compile_cpu, "-x", "c++"]
        part = Part("_C_emulated", "_C_emulated.so", EMULATED, compile_cpu, link_torch, cxx, compile_kernels)
        compile_and_link([part], Path("build/emulated"), part.folder)


class BuildKernels(OurCommand):
    description = "compile the CUDA kernels for every architecture, and link nothing"

    def run(self) -> None:
        super().run()
        nvcc, cxx = find_nvcc(), find_cxx()
        if nvcc is None or cxx is None:
            stop("build_kernels needs nvcc and a C++ compiler")
        kernels = [source for source in SOURCES["_C_cuda"] if source.endswith(".cu")]
        part = Part("kernels", "", kernels, [], [], cxx, nvcc_command(nvcc, cxx, RELEASE_ARCHS))
        run_jobs(compilations([part]), part.folder)


class BuildSanitized(OurCommand):
    description = "copy the package to build/sanitized, with its CPU library and host module under ASan and UBSan"

    def run(self) -> None:
        super().run()
        cxx = find_cxx()
        host = plan_host(cxx) if cxx else None
        if cxx is None or host is None:
            stop("build_sanitized needs a C++ compiler, pybind11 and Python.h")
        destination = Path("build/sanitized", PACKAGE)
        shutil.rmtree(destination, ignore_errors=True)
        shutil.copytree(PACKAGE, destination, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        parts = [
            replace(part, compile=part.compile + SANITIZERS, link=part.link + SANITIZERS, variant="-sanitized")
            for part in (plan_cpu(cxx), host)
        ]
        compile_and_link(parts, destination, OBJECTS)


class Build(build):
    def run(self) -> None:
        take_turns()
        # Otherwise a wheel would also contain whatever an earlier build left here: a deleted module, a CUDA library.
        if Path(self.build_base).resolve() in Path(self.build_lib).resolve().parents:  # not a folder of the user's
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if is_older(setuptools_version, OLDEST_SETUPTOOLS):  # it would complain about pyproject.toml, in a traceback
    needed = f"setuptools>={OLDEST_SETUPTOOLS}"
    stop(f"the build needs {needed}, found {setuptools_version}: `pip install '{needed}'`")

setup(
    ext_modules=[Extension(f"{PACKAGE}.{name}", files) for name, files in SOURCES.items()],
    cmdclass={
        "build": Build, "build_ext": BuildExt, "build_emulated": BuildEmulated, "build_kernels": BuildKernels,
        "build_sanitized": BuildSanitized,
    },
)  # fmt: skip
