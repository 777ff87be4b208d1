"""A plug-in for vLLM: its rejection samplers, and its sampler of steps without drafts, through these ops.

vLLM calls `register` in each of its processes, by the entry point ``vllm.general_plugins``; nothing is patched unless
``SPECDEC_VLLM=1``. `v1` serves the V1 model runner and `v2` the V2 model runner. Importing this imports no vLLM.
"""

from __future__ import annotations

import logging
import re

from ...config import settings

__all__ = ["register"]

OLDEST, NEWEST = (0, 32), (0, 33)
_log = logging.getLogger("vllm.specdec_kernels")  # vLLM shows what is logged below its own name


def register() -> None:
    """Patch vLLM, if ``SPECDEC_VLLM`` says so; calling it again changes nothing.

    Raises
    ------
    RuntimeError
        A version of vLLM that this plug-in does not know.
    ValueError
        ``SPECDEC_VLLM`` is neither 0 nor 1.
    """
    if not settings().vllm:
        return
    import vllm

    check_version(vllm.__version__)
    from . import v1, v2

    v1.patch()
    v2.patch()
    _log.info("specdec_kernels verifies drafts in vLLM %s", vllm.__version__)


def check_version(version: str) -> None:
    """RuntimeError unless `version` is one whose samplers this plug-in was written against: a pre-release of the newest
    one may be of its next patch, and hold anything that came since.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    unreleased = re.search(r"(a|b|rc|dev)\d+", version.partition("+")[0])
    if not OLDEST <= found <= NEWEST or (unreleased and found == NEWEST):
        first, last = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
        built = " (a checkout without tags, perhaps)" if version.startswith("0.1.dev") else ""
        last += f" (no pre-release of {last})" if found == NEWEST else ""
        raise RuntimeError(
            f"specdec_kernels: SPECDEC_VLLM=1 serves vLLM {first} to {last}, got {version}{built}; "
            "unset it for vLLM as it is"
        )
