"""What the measured rows show: the targets, and the short table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..providers import OWN
from ..report import Row, at_least, at_most, best_peer, note, subject, variants

TRUNCATED_FLOORS = 3.0
FLOORS = 2.0
SINGLE_US = 12.0
MOST_LAUNCHES = 3
EARLY_EXIT_BATCH = 128


def groups(rows: Sequence[Row], cache: str, launch: str) -> list[list[Row]]:
    """The rows of each case, measured in one way."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["cache"] == cache and row["launch"] == launch:
            found.setdefault(row["id"], []).append(row)
    return list(found.values())


def where(row: Row) -> str:
    """A case in words."""
    op = "" if row["op"] == "verify_chain" else f"{row['op']} "
    return f"{op}{row['case']} V={row['vocab']} B={row['batch']} K={row['num_draft']}"


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Cold, by graph replay: times against floors, against the best peer, launches; memory over vocabularies."""
    found: list[dict[str, Any]] = []
    for group in groups(rows, "cold", "graph"):
        own = subject(group)
        if own is None:
            continue
        found += _against_floors(own)
        peer = best_peer(group)
        if peer is not None:
            found.append(at_least(f"{where(own)}: × best peer ({peer['provider']})", 1.0,
                                  peer["median_us"] / own["median_us"]))  # fmt: skip
        found += variants(where(own), own, group)
        given = next((r for r in group if r["provider"] == f"{own['provider']}, uniforms given"), None)
        if given is not None and given.get("launches") is not None:
            found.append(at_most(f"{where(own)}: launches, given uniforms", MOST_LAUNCHES, given["launches"]))
    return found + _memory(rows)


def _against_floors(own: Row) -> list[dict[str, Any]]:
    here, time, floor = where(own), own["median_us"], own["floor_us"]
    if own["batch"] == 1:
        return [at_most(f"{here}: µs", SINGLE_US, time)]
    if own["case"] == "block":
        return [note(f"{here}: × floor", time / floor)]
    times = TRUNCATED_FLOORS if own["case"] == "truncated" else FLOORS
    found = [at_most(f"{here}: × full-read floor", times, time / floor)]
    if own["batch"] >= EARLY_EXIT_BATCH and own["case"] != "truncated":
        found.append(at_most(f"{here}: µs, full-read floor (early exit)", floor, time))
    return found


def _memory(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Extra memory must not grow with the vocabulary: the same batch size and K at the smallest and largest one."""
    own = next((name for name in OWN if any(r["provider"] == name for r in rows)), None)
    peaks: dict[tuple[str, int, int], dict[int, int]] = {}
    for row in rows:
        if row["provider"] == own:
            key = row["case"], row["batch"], row["num_draft"]
            peaks.setdefault(key, {})[row["vocab"]] = row["torch_peak_bytes"]
    spread = {key: by_vocab for key, by_vocab in peaks.items() if len(by_vocab) > 1}
    if not spread:
        return []
    growth = {key: by_vocab[max(by_vocab)] - by_vocab[min(by_vocab)] for key, by_vocab in spread.items()}
    worst = max(growth, key=lambda key: growth[key])
    what = f"extra memory, bytes from the smallest to the largest V ({worst[0]} B={worst[1]} K={worst[2]})"
    return [at_most(what, 0, growth[worst])]


KEY = ("op", "case", "vocab", "batch", "num_draft", "provider")


def table(
    rows: Sequence[Row], num_draft: int | None = 5, model: Mapping[tuple[str, int, int, int], float] | None = None
) -> str:
    """One line per case of `num_draft` (None: any): our time cold, by graph and by launches; what `model` says by case,
    vocabulary, batch and draft length (`bench.gpu.model`: no measurement); the floors; the best peer.
    """
    eager = {tuple(r[k] for k in KEY): r["median_us"] for r in rows if (r["cache"], r["launch"]) == ("cold", "eager")}
    warm = {tuple(r[k] for k in KEY): r["median_us"] for r in rows if (r["cache"], r["launch"]) == ("warm", "graph")}
    names = (
        ("ours", 9),
        ("(model)", 9),
        ("floor", 8),
        ("exit", 8),
        ("× floor", 9),
        ("GB/s", 7),
        ("launched", 10),
        ("warm", 9),
    )
    lines = [f"{'µs a call, cold L2, graph replay':48}" + "".join(f"{n:>{w}}" for n, w in names) + "  best peer"]
    for group in groups(rows, "cold", "graph"):
        own = subject(group)
        if own is None or num_draft not in (None, own["num_draft"]):
            continue
        key = tuple(own[k] for k in KEY)
        peer = best_peer(group)
        beside = f"{peer['median_us']:.1f} {peer['provider']}" if peer else "-"
        said = (model or {}).get((own["case"], own["vocab"], own["batch"], own["num_draft"]))
        lines.append(
            f"{where(own):40}{own['provider']:8}{own['median_us']:9.1f}{_bracketed(said):>9}{own['floor_us']:8.1f}"
            f"{own['floor_exit_us']:8.1f}{own['median_us'] / own['floor_us']:9.2f}{own['gb_per_s']:7.0f}"
            f"{_number(eager.get(key)):>10}{_number(warm.get(key)):>9}  {beside}"
        )
    return "\n".join(lines)


def _bracketed(value: float | None) -> str:
    return "" if value is None else f"({value:.1f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def counts(found: Sequence[dict[str, Any]]) -> str:
    """How many targets are reached, by kind."""
    kinds: dict[str, list[bool]] = {}
    for target in found:
        if target["reached"] is not None:
            kind = target["what"].split(": ")[-1].split(" (")[0].split(", bytes")[0]
            kinds.setdefault(kind, []).append(target["reached"])
    return "\n".join(f"{sum(r)} of {len(r)} reached: {kind}" for kind, r in kinds.items())
