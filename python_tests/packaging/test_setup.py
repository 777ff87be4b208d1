"""setup.py on a small project of its own: the same script, sources that compile in a moment."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package has no setup.py")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HAS_NINJA = bool(shutil.which("ninja") or importlib.util.find_spec("ninja"))
needs_ninja = pytest.mark.skipif(not HAS_NINJA, reason="no ninja")

SOURCES = {
    "csrc/direct_ops.h": "",
    "csrc/common/answer.h": "inline int answer() { return 42; }\n",
    "csrc/bind_cpu.cpp": '#include "common/answer.h"\nint bound() { return answer(); }\n',
    "csrc/cpu/op.cpp": "int op() { return 1; }\n",
    "csrc/cpu/isa/op_avx2.cpp": "#if __x86_64__ && !__AVX2__\n#error no AVX2\n#endif\nint avx2() { return 2; }\n",
    "csrc/cpu/isa/op_default.cpp": "#ifdef __AVX2__\n#error AVX2 in the baseline\n#endif\nint base() { return 0; }\n",
    "csrc/host/host.cpp": "int host() { return 3; }\n",
    "specdec_kernels/__init__.py": "",
    "specdec_kernels/py.typed": "",
    "specdec_kernels/flat.py": "",
    "specdec_kernels/ops/arguments.py": "",
}
CONTRACT = "specdec_kernels/backends/contract.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").write_text("A small project.\n")
    for name, text in {**SOURCES, CONTRACT: (ROOT / CONTRACT).read_text()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def build(
    project: Path, *arguments: str, hide: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.py there with the modules in `hide` missing and `environment` on top of ours."""
    return subprocess.run(
        command(*arguments, hide=hide), cwd=project, env=inherited(environment), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def command(*arguments: str, hide: tuple[str, ...] = (), before: str = "", after: str = "") -> list[str]:
    """Python that runs setup.py with these arguments, and a statement before it and after."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(hide)})); sys.argv = ['setup.py', *{list(arguments)}]\n"
        f"{before}\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__name__': '__main__', '__file__': 'setup.py'})\n"
        f"{after}"
    )
    return [sys.executable, "-c", code]


def inherited(changes: dict[str, str]) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_") and k not in ("CXX", "MAX_JOBS")}
    return {**ours, "SPECDEC_CUDA": "0", **changes}


def in_place(project: Path, *, hide: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return build(project, "-q", "build_ext", "--inplace", hide=hide, **environment)


def parts(project: Path) -> set[str]:
    return {path.name.split(".")[0] for path in (project / "specdec_kernels").glob("*.so")}


def compiled(result: subprocess.CompletedProcess[str]) -> set[str]:
    """The objects and libraries that this build made."""
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^specdec_kernels: \[\d+ of \d+, [0-9.]+ s\] (\S+)$", result.stderr, re.MULTILINE)
    return {line.split("/")[-1].split(".cpython")[0] for line in lines}


@pytest.fixture(params=["1", "0"], ids=["ninja", "threads"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs the compilers."""
    if request.param == "1" and not HAS_NINJA:
        pytest.skip("no ninja")
    monkeypatch.setenv("USE_NINJA", request.param)
    return request.param


@needs_compiler
def test_builds_every_part_then_only_what_changed(project: Path, by: str) -> None:
    first = compiled(in_place(project))
    assert (project / "build/obj/build.ninja").exists() == (by == "1")
    assert {"bind_cpu.cpp.o", "cpu_op.cpp.o", "cpu_isa_op_avx2.cpp.o", "host_host.cpp.o", "_C_cpu.so"} <= first
    assert parts(project) == {"_C_cpu", "_host"}
    assert compiled(in_place(project)) == set()
    (project / "csrc/common/answer.h").write_text("inline int answer() { return 43; }\n")
    assert compiled(in_place(project)) == {"bind_cpu.cpp.o", "_C_cpu.so"}
    flags = compiled(in_place(project, SPECDEC_WERROR="1"))  # another command is another object
    assert {"bind_cpu.cpp.o", "cpu_op.cpp.o", "host_host.cpp.o"} <= flags


@needs_compiler
@needs_ninja
@pytest.mark.parametrize("first", ["0", "1"], ids=["threads first", "ninja first"])
def test_what_threads_and_ninja_made_in_turns_has_the_flags_asked_for(project: Path, first: str) -> None:
    """What is left of the first build knows nothing of the second, which had other flags."""
    other = "1" if first == "0" else "0"
    for by, strict in ((first, ""), (other, "1"), (first, "")):
        made = compiled(in_place(project, USE_NINJA=by, SPECDEC_WERROR=strict))
        assert {"bind_cpu.cpp.o", "cpu_op.cpp.o", "host_host.cpp.o"} <= made


@needs_compiler
def test_a_folder_that_is_not_the_builds_own_is_not_emptied(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "kept").write_text("of the user")
    result = build(project, "-q", "build", "--build-lib", str(theirs))
    assert result.returncode == 0, result.stderr
    assert (theirs / "kept").exists() and list(theirs.glob("specdec_kernels/*.so"))


@needs_compiler
@needs_ninja
def test_a_failed_build_of_cuda_says_how_to_do_without(project: Path) -> None:
    home = project / "cuda"
    fake_nvcc(project, f"#!/bin/sh\ncase $* in *--dryrun*) echo '#$ TOP={home}' >&2;; --version);; *) exit 1;; esac")
    for name in ("csrc/cuda/kernel.cu", "cuda/lib64/libcudart_static.a", "csrc/bind_cuda.cpp"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    for wanted, said in (("", True), ("1", False)):
        result = in_place(project, SPECDEC_CUDA=wanted, CUDA_HOME=str(home), SPECDEC_CUDA_ARCHS="90a", USE_NINJA="1")
        assert result.returncode != 0 and "the build failed, as said above" in result.stderr
        assert ("(SPECDEC_CUDA=0 builds without CUDA)" in result.stderr) == said


@pytest.mark.long
@needs_compiler
def test_as_many_compilers_run_at_once_as_asked(project: Path, by: str) -> None:
    wrapper = project / "counting"
    wrapper.write_text(
        f"#!/bin/sh\nmkdir -p {project}/running && touch {project}/running/$$\n"
        f'ls {project}/running | wc -l >> {project}/most\n{COMPILER} "$@"; status=$?\n'
        f"sleep 0.2; rm {project}/running/$$; exit $status\n"
    )
    wrapper.chmod(0o755)
    for jobs in (1, 3):
        (project / "most").write_text("")
        assert in_place(project, CXX=str(wrapper), MAX_JOBS=str(jobs), SPECDEC_WERROR=str(jobs // 3)).returncode == 0
        assert max(map(int, (project / "most").read_text().split())) == jobs


def test_a_line_is_one_write_so_that_threads_do_not_mix_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    say = runpy.run_path(str(ROOT / "setup.py"))["say"]
    writes: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", writes.append)
    say("op.o (0.1 s)")
    assert writes == ["specdec_kernels: op.o (0.1 s)\n"]


@needs_compiler
def test_a_deleted_source_leaves_the_library(project: Path, by: str) -> None:
    compiled(in_place(project))
    (project / "csrc/cpu/op.cpp").unlink()
    assert compiled(in_place(project)) == {"_C_cpu.so"}


@needs_compiler
def test_the_emulated_kernels_are_built_apart_and_again_when_a_source_changed(project: Path) -> None:
    kernel = "#ifndef SPECDEC_EMULATOR\n#error not emulated\n#endif\nint kernel() { return 1; }\n"
    for name, text in {
        "csrc/bind_emulated.cpp": "int bound() { return 1; }\n", "csrc/cuda/op.cu": kernel,
        "csrc/cuda/device_info.cu": "#error about a GPU\n", "csrc/emulator/runtime.cpp": "int run() { return 2; }\n",
    }.items():  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    first = compiled(build(project, "-q", "build_emulated"))
    assert first == {"bind_emulated.cpp.o", "cuda_op.cu.o", "emulator_runtime.cpp.o", "_C_emulated.so"}
    assert (project / "build/emulated/_C_emulated.so").exists() and parts(project) == set()
    assert compiled(build(project, "-q", "build_emulated")) == set()
    (project / "csrc/cuda/op.cu").write_text(kernel + "int more() { return 2; }\n")
    assert compiled(build(project, "-q", "build_emulated")) == {"cuda_op.cu.o", "_C_emulated.so"}


@needs_compiler
def test_warnings_can_be_errors_and_the_compiler_is_heard(project: Path, by: str) -> None:
    (project / "csrc/cpu/op.cpp").write_text("int op() { int unused_thing = 1; return 1; }\n")
    assert in_place(project, SPECDEC_WERROR="0").returncode == 0
    for library in (project / "specdec_kernels").glob("*.so"):
        library.unlink()
    result = in_place(project, SPECDEC_WERROR="1")
    assert result.returncode != 0
    assert "unused_thing" in result.stderr and "csrc/cpu/op.cpp" in result.stderr
    assert "Traceback" not in result.stderr
    assert parts(project) == set()


def test_without_a_compiler_the_python_part_installs(project: Path) -> None:
    (project / "specdec_kernels/_C_cpu.so").write_text("of an earlier build")
    result = in_place(project, hide=("torch",), PATH="/nonexistent")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("\n") == 1 and "no C++ compiler was found" in result.stderr
    assert parts(project) == set(), "a library that this build did not make must not stay"


@needs_compiler
def test_without_torch_one_sentence(project: Path) -> None:
    result = in_place(project, hide=("torch",))
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1 and "the build needs torch >= 2.11" in result.stderr


@needs_compiler
def test_without_pybind11_the_rest_is_built(project: Path) -> None:
    result = in_place(project, hide=("pybind11",))
    assert result.returncode == 0, result.stderr
    assert "pybind11 is not installed" in result.stderr
    assert parts(project) == {"_C_cpu"}


@needs_compiler
@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"SPECDEC_CUDA": "yes"}, "SPECDEC_CUDA must be auto, 0 or 1, got 'yes'"),
        ({"CXX": "no-such-compiler"}, "CXX=no-such-compiler was not found"),
        ({"CXX": "g++ 'half"}, 'CXX must be a command, got "g++ \'half": No closing quotation'),
        ({"MAX_JOBS": "0"}, "MAX_JOBS must be a positive number, got '0'"),
        ({"MAX_JOBS": "²"}, "MAX_JOBS must be a positive number, got '²'"),
    ],
    ids=lambda value: "=".join(*value.items()) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_one_sentence(project: Path, environment: dict[str, str], sentence: str) -> None:
    result = in_place(project, **environment)
    assert result.returncode != 0
    assert sentence in result.stderr and "Traceback" not in result.stderr


@needs_compiler
def test_bad_architectures_are_one_sentence(project: Path) -> None:
    # Stands in for the real one, which is not needed to read the list.
    nvcc = fake_nvcc(project, f"#!/bin/sh\necho '#$ TOP={project / 'cuda'}' >&2\n")
    (project / "cuda/lib").mkdir()
    (project / "cuda/lib/libcudart_static.a").write_text("")
    settings = {"SPECDEC_CUDA": "1", "CUDA_HOME": str(nvcc.parents[1])}
    for archs in ("90a;Hopper", ";"):
        result = in_place(project, **settings, SPECDEC_CUDA_ARCHS=archs)
        assert result.returncode != 0
        assert "SPECDEC_CUDA_ARCHS must look like" in result.stderr and "Traceback" not in result.stderr


def fake_nvcc(project: Path, script: str) -> Path:
    nvcc = project / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    return nvcc


@needs_compiler
@pytest.mark.parametrize("wanted", ["1", "auto"])
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho '#$ TOP=/nowhere' >&2\n", "has no libcudart_static.a in /nowhere/lib64, /nowhere/lib"),
        ("#!/bin/sh\necho '#$ _SPACE_= ' >&2\n", "--dryrun names no toolkit"),  # as Debian's package of it
        (
            "#!/bin/sh\necho '#$ TOP=/nowhere' >&2\n"
            "case $* in *c++20*) echo \"nvcc fatal: Value 'c++20' is not defined\" >&2; exit 1;; esac\n",
            "does not work: nvcc fatal: Value 'c++20' is not defined",
        ),
        ("#!/bin/sh\nexit 1\n", "does not work: it printed nothing"),
        ("\x7fELF of another machine", "does not work: [Errno 8] Exec format error"),
    ],
    ids=["no library", "no toolkit", "too old", "silent", "no program"],
)
def test_an_nvcc_that_cannot_serve(project: Path, wanted: str, script: str, reason: str) -> None:
    """No reason not to build for the CPU, unless CUDA is asked for."""
    home = fake_nvcc(project, script).parents[1]
    result = in_place(project, SPECDEC_CUDA=wanted, CUDA_HOME=str(home), SPECDEC_CUDA_ARCHS="90a")
    assert reason in result.stderr and "Traceback" not in result.stderr
    assert (result.returncode == 0) == (wanted == "auto"), result.stderr
    assert parts(project) == ({"_C_cpu", "_host"} if wanted == "auto" else set())
    said = "building for the CPU only" if wanted == "auto" else "specdec_kernels: SPECDEC_CUDA=1, but "
    assert said in result.stderr and "compiling CUDA kernels" not in result.stderr


@pytest.mark.parametrize(("wanted", "sentence"), [("1", "SPECDEC_CUDA=1, but no C++"), ("yes", "must be auto, 0 or 1")])
def test_cuda_is_not_forgotten_without_a_compiler(project: Path, wanted: str, sentence: str) -> None:
    result = in_place(project, PATH="/nonexistent", SPECDEC_CUDA=wanted)
    assert result.returncode != 0 and sentence in result.stderr and result.stderr.count("\n") == 1


def test_another_system_gets_the_python_part(project: Path) -> None:
    """As macOS, which has a compiler and cannot say which cores a process may use."""
    before = (
        "import os, setuptools, sysconfig, urllib.request; sysconfig.get_config_vars()  # read by platform\n"
        "sys.platform = 'darwin'; del os.sched_getaffinity"
    )
    for wanted in ("auto", "1"):
        done = subprocess.run(
            command("-q", "build_ext", "--inplace", before=before), cwd=project, capture_output=True, text=True,
            env=inherited({"SPECDEC_CUDA": wanted}),
        )  # fmt: skip
        assert (done.returncode == 0) == (wanted == "auto") and "Traceback" not in done.stderr
        assert "compiled kernels are built on Linux alone" in done.stderr and done.stderr.count("\n") == 1
        assert parts(project) == set()


def test_as_many_jobs_as_cores_where_a_process_may_use_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    max_jobs = runpy.run_path(str(ROOT / "setup.py"))["max_jobs"]
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert max_jobs() == os.cpu_count()


def test_an_old_setuptools_is_one_sentence(project: Path) -> None:
    before = "import setuptools; setuptools.__version__ = '68.1.2'"
    done = subprocess.run(
        command("-q", "build_ext", "--inplace", before=before), cwd=project, capture_output=True, text=True
    )
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "the build needs setuptools>=77, found 68.1.2" in done.stderr


@needs_compiler
@pytest.mark.parametrize("second", ["bdist_wheel", "build_ext"])
def test_builds_of_one_checkout_take_turns_until_the_process_ends(project: Path, second: str) -> None:
    """They share the folder that a wheel is packed from."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    packed = command("-q", "bdist_wheel", after="print('packed', flush=True); sys.stdin.read()")
    with subprocess.Popen(packed, cwd=project, env=inherited({}), text=True, **streams) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == "packed\n", first.stderr.read()
        (made,) = project.glob("build/lib*/specdec_kernels/flat.py")
        made.write_text("# as the first has it\n")
        other = subprocess.Popen(command("-q", second), cwd=project, env=inherited({}), text=True, **streams)  # type: ignore[call-overload]
        try:
            assert other.stderr.readline() == "specdec_kernels: waiting for another build of this checkout\n"
            assert other.poll() is None and made.read_text() == "# as the first has it\n"
            first.communicate("")
            assert other.communicate("")[1].count("waiting") == 0 and other.returncode == 0
        finally:
            other.kill()


@pytest.mark.short(cases=2)
@needs_compiler
@pytest.mark.parametrize("source", ["flat.py", "ops/arguments.py", "../csrc/direct_ops.h"])
def test_what_both_sides_read_by_place_is_in_the_command(project: Path, by: str, source: str) -> None:
    """So that compiled parts are made again, and those that are not are known to be older."""
    (project / "csrc/host/bind_host.cpp").write_text("int bound() { return 0; }\n")
    compiled(in_place(project))
    (project / "specdec_kernels" / source).write_text("// another order\n")
    assert {"bind_cpu.cpp.o", "host_bind_host.cpp.o"} <= compiled(in_place(project))


@needs_compiler
def test_wheel_holds_what_this_build_made_and_nothing_else(project: Path) -> None:
    (project / "specdec_kernels/_C_cuda.so").write_text("of an earlier editable install")
    assert in_place(project).returncode == 0
    (project / "specdec_kernels/_C_cuda.so").write_text("of an earlier editable install")
    stale = project / "build" / f"lib.{platform.system().lower()}-{platform.machine()}-{sys.implementation.cache_tag}"
    (stale / "specdec_kernels").mkdir(parents=True)
    (stale / "specdec_kernels/deleted.py").write_text("")
    result = build(project, "-q", "bdist_wheel")
    assert result.returncode == 0, result.stderr
    (wheel,) = (project / "dist").glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name
    names = {name.split(".cpython")[0] for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    made = ("__init__.py", "py.typed", "flat.py", "ops/arguments.py", "_C_cpu.so", "_host")
    assert names == {f"specdec_kernels/{name}" for name in made} | {CONTRACT}


def test_sdist_holds_the_sources(project: Path) -> None:
    more = {"csrc/cuda/op.cu", "csrc/cuda/tile.cuh", "csrc/emulator/tests/Makefile", "specdec_kernels/_host.pyi"}
    for name in more:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("\n")
    result = build(project, "-q", "sdist", hide=("torch",))
    assert result.returncode == 0, result.stderr
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= {*SOURCES, "setup.py", *more}


@pytest.mark.parametrize(
    ("asked", "gpus", "editable", "expected"),
    [  # the nvcc of this test knows 80, 90 and 120
        ("", None, True, "80+PTX"),
        ("", None, False, "80+PTX;90a"),
        ("", "9.0\n8.0\n9.0\n", False, "80;90a"),
        ("", "8.6\n12.1\n9.0\n10.3\n", False, "80+PTX;90a;90+PTX;120+PTX"),
        ("", "12.0\n", True, "120"),
        ("", "7.5\n", False, "80+PTX;90a"),
        ("", "[N/A]\n", False, "80+PTX;90a"),
        ("all", "9.0\n", False, "80+PTX;90a;100;120+PTX"),
        ("100", "9.0\n", True, "100"),
    ],
)
def test_architectures_are_those_of_the_gpu_at_hand(
    asked: str, gpus: str | None, editable: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus is not None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
        smi.chmod(0o755)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_90\\ncompute_120\\n'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if gpus is not None else str(tmp_path))
    monkeypatch.setenv("SPECDEC_CUDA_ARCHS", asked)
    monkeypatch.setattr("setuptools.setup", lambda **given: None)
    assert runpy.run_path(str(ROOT / "setup.py"))["wanted_archs"](editable, str(nvcc)) == expected
