"""The only reader of environment variables, except for `collect_env`, which reports them.

==========================  =========================================================================================
``SPECDEC_CHECK``           1: an op raises when a status flag is set (a host synchronisation a call). Default 0
``SPECDEC_BACKEND``         reference, cpu, triton or cuda: the backend that ops take instead of choosing one.
                            Default: empty, the best one for the device
``SPECDEC_CPU_CAPABILITY``  default, avx2 or avx512: the most that the CPU kernels may use; it only ever lowers what the
                            machine has. Default: empty, no limit
``SPECDEC_CACHE``           folder of fetched models, texts and tables. Default: ``specdec_kernels`` in
                            ``$XDG_CACHE_HOME`` (``~/.cache``), without a home ``specdec_kernels-UID`` in the temporary
                            folder
``SPECDEC_VLLM``            1: vLLM samples through these ops (`integrations.vllm`). Default 0
``NO_COLOR``                not empty: commands mark tokens without colours (https://no-color.org)
``CC``                      the C compiler that Triton calls. Default: gcc or clang
==========================  =========================================================================================

They are read once, when the package is imported; a test that changes one calls `reload`. The variables of the build
are in setup.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings", "reload", "settings"]

BACKENDS = ("reference", "cpu", "triton", "cuda")
CPU_CAPABILITIES = ("default", "avx2", "avx512")
_SWITCH = {"": False, "0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; the table is in this module's docstring.

    Attributes
    ----------
    check : bool
        Raise when a status flag is set.
    cpu_capability : str or None
        The most the CPU kernels may use; None: no limit.
    backend : str or None
        The backend every op takes; None: the best one for the device.
    cache : Path
        Folder of fetched models, texts and tables; it need not exist yet.
    vllm : bool
        Patch vLLM where it loads its plug-ins.
    no_color : bool
        Print without colours.
    c_compiler : str or None
        What Triton calls as a C compiler; None: it looks for one.
    """

    check: bool
    cpu_capability: str | None
    backend: str | None
    cache: Path
    vllm: bool
    no_color: bool
    c_compiler: str | None


_settings: Settings | None = None


def settings() -> Settings:
    """The settings, read from the environment once: when the package is imported, as loading the kernels asks for them.

    Raises
    ------
    ValueError
        A variable has a value outside the table.
    """
    return reload() if _settings is None else _settings


def reload() -> Settings:
    """Read the environment again (for tests).

    The limit on the CPU kernels' instruction set is handed to the library when that is loaded, once a process.

    Raises
    ------
    ValueError
        A variable has a value outside the table.
    """
    global _settings
    _settings = Settings(
        check=_switch("SPECDEC_CHECK"),
        cpu_capability=_choice("SPECDEC_CPU_CAPABILITY", CPU_CAPABILITIES),
        backend=_choice("SPECDEC_BACKEND", BACKENDS),
        cache=_cache_folder(),
        vllm=_switch("SPECDEC_VLLM"),
        no_color=bool(_read("NO_COLOR")),
        c_compiler=os.environ.get("CC"),  # unchanged: Triton calls no compiler if it is set but empty
    )
    return _settings


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _switch(name: str) -> bool:
    value = _read(name).lower()
    if value not in _SWITCH:
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return _SWITCH[value]


def _choice(name: str, values: tuple[str, ...]) -> str | None:
    value = _read(name)
    if value and value not in values:
        raise ValueError(f"{name} must be empty or one of {', '.join(values)}, got {value!r}")
    return value or None


def _cache_folder() -> Path:
    wanted = _read("SPECDEC_CACHE")
    if wanted:
        try:
            return Path(wanted).expanduser().absolute()
        except RuntimeError:
            raise ValueError(
                f"SPECDEC_CACHE must be a folder, got {wanted!r}, whose home folder is not known"
            ) from None
    base = _read("XDG_CACHE_HOME")  # relative paths there are invalid by the XDG specification
    if Path(base).is_absolute():
        return Path(base) / "specdec_kernels"
    with contextlib.suppress(RuntimeError):  # a container's user may have no home, "/" or a missing one
        home = Path("~").expanduser()
        if home != Path("/") and os.path.isdir(home):
            return home / ".cache" / "specdec_kernels"
    name = f"specdec_kernels-{os.getuid()}"
    try:
        return Path(tempfile.gettempdir()) / name
    except OSError:  # no writable folder either: reported when something is fetched
        return Path("/tmp", name)
