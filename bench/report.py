"""Tables of results, and which of the targets they reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .providers import OWN, PROVIDERS

Row = dict[str, Any]

RATIO_TARGETS = {"T=1": 8.0, "truncated": 50.0, "greedy": 8.0}  # times the best peer, cold, float32
RATE_TARGET = 9.0  # 1e9 bytes of target logits a second
SHARE_TARGETS = {1: 0.4, 8: 0.6}  # of memory's bandwidth, as torch.sum reads in the same run, by batch size
RATE_TARGETS = {("truncated", 128256): 13.0}  # exceptions to that rate
OVERHEAD_TARGET = 12.0  # microseconds per call
VARIANTS = ("eager, top-p in top-k", "eager, kept draft_probs")
"""Providers that are told beside the peers and are none: special cases, or handed more."""


def subject(rows: Sequence[Row]) -> Row | None:
    """The row of this package's best backend among the rows of one case."""
    by_provider = {row["provider"]: row for row in rows}
    return next((by_provider[name] for name in OWN if name in by_provider), None)


def cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows, grouped by case in the order measured."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["id"], []).append(row)
    return list(groups.values())


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The fastest of the providers that targets are stated against."""
    peers = [row for row in rows if PROVIDERS[row["provider"]].peer]
    return min(peers, key=lambda row: row["median_us"], default=None)


def table(rows: Sequence[Row]) -> str:
    """One case: one line per provider."""
    own = subject(rows)
    head = rows[0]["id"]
    if own is not None and own.get("tokens_per_step") is not None:
        head += f"   (tokens a step {own['tokens_per_step']:.2f})"
    ratio_name = "time / " + own["provider"] if own else "ratio"
    lines = [head]
    titles = f"  {'provider':26}{'median':>12}{'quartiles':>22}{ratio_name:>18}{'GB/s':>8}{'of memory':>11}"
    lines.append(titles + f"{'extra memory':>22}{'n':>6}")
    for row in rows:
        ratio = f"{row['median_us'] / own['median_us']:.2f}" if own else "-"
        quartiles = f"{_time(row['q25_us'])} - {_time(row['q75_us'])}"
        memory = f"{_size(row['torch_peak_bytes'])}, {_size(row['rss_peak_bytes'])}"
        lines.append(
            f"  {row['provider']:26}{_time(row['median_us']):>12}{quartiles:>22}{ratio:>18}{row['gb_per_s']:>8.2f}"
            f"{row['share_of_bandwidth']:>11.0%}{memory:>22}{row['repeats']:>6}"
        )
    return "\n".join(lines)


def targets(op: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the rows say about each target that they concern; if "reached" is None, stated for information."""
    found = []
    for group in cases(rows):
        own = subject(group)
        if own is None:
            continue
        if own["case"] == "overhead":
            what = f"{op}: overhead of a call of {own['provider']}, µs"
            found.append(at_most(what, OVERHEAD_TARGET, own["median_us"]))
        if judged(op, own):
            found += _speed(own, group)
    if op == "verify_chain":
        found += _memory(rows)
    return found


def judged(op: str, own: Row) -> bool:
    """Whether speed goals are stated for a case."""
    return op == "verify_chain" and own["cache"] == "cold" and own["dtype"] == "float32"


def ratio_goal(op: str, own: Row) -> float | None:
    """How many times this package's time the best peer should take, if a goal is stated."""
    return RATIO_TARGETS.get(own["case"]) if judged(op, own) else None


def variants(where: str, own: Row, group: Sequence[Row]) -> list[dict[str, Any]]:
    """The times of the `VARIANTS` among the rows of a case, stated for information."""
    by_name = {row["provider"]: row for row in group}
    return [
        note(f"{where}: {own['provider']} × {name}", by_name[name]["median_us"] / own["median_us"])
        for name in VARIANTS
        if name in by_name
    ]


def _speed(own: Row, group: Sequence[Row]) -> list[dict[str, Any]]:
    where = f"{own['case']} V={own['vocab']} B={own['batch']}"
    found = []
    peer = best_peer(group)
    if own["case"] in RATIO_TARGETS and peer is not None:
        goal = RATIO_TARGETS[own["case"]]
        ratio = peer["median_us"] / own["median_us"]
        found.append(at_least(f"{where}: {own['provider']} × best peer ({peer['provider']})", goal, ratio))
        by_name = {row["provider"]: row for row in group}
        stateless = by_name.get(f"{own['provider']}, no draft_stats")
        if stateless is not None:
            ratio = peer["median_us"] / stateless["median_us"]
            found.append(note(f"{where}: without draft_stats × best peer ({peer['provider']})", ratio))
        found += variants(where, own, group)
    if own["case"] in RATIO_TARGETS:
        goal = RATE_TARGETS.get((own["case"], own["vocab"]), RATE_TARGET)
        found.append(at_least(f"{where}: GB/s of target logits read", goal, own["gb_per_s"]))
        if own["batch"] in SHARE_TARGETS:
            what = f"{where}: share of the read bandwidth"
            found.append(at_least(what, SHARE_TARGETS[own["batch"]], own["share_of_bandwidth"]))
    return found


def _memory(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Torch's allocations must not grow with V, and allocations unseen by torch must stay below one row of logits."""
    subjects = [row for row in map(subject, cases(rows)) if row is not None]
    own = [row for row in subjects if row["case"] != "overhead" and row["dtype"] == "float32"]
    if not own:
        return []
    smallest, largest = min(r["vocab"] for r in own), max(r["vocab"] for r in own)
    found = []
    if largest > smallest:
        peak = {v: max(r["torch_peak_bytes"] for r in own if r["vocab"] == v) for v in (smallest, largest)}
        found.append(at_most(f"extra memory, torch's allocator, bytes at V={largest}", peak[smallest], peak[largest]))
    resident = [r["rss_peak_bytes"] for r in own if r["vocab"] == largest and r["rss_peak_bytes"] is not None]
    if resident:
        what = f"extra memory, resident, bytes at V={largest} (target: one row)"
        found.append(at_most(what, 4 * largest, max(resident)))
    return found


def targets_table(found: Sequence[dict[str, Any]]) -> str:
    """The table printed at the end of a run."""
    lines = [f"{'':72}{'target':>12}{'measured':>12}  reached"]
    for row in found:
        reached = {True: "yes", False: "NO", None: ""}[row["reached"]]
        target = "" if row["target"] is None else f"{row['sign']} {row['target']:g}"
        lines.append(f"{row['what']:72}{target:>12}{row['measured']:>12.4g}  {reached}")
    return "\n".join(lines)


def at_least(what: str, target: float, measured: float) -> dict[str, Any]:
    """A target that is reached by a value no smaller."""
    return {"what": what, "sign": ">=", "target": target, "measured": measured, "reached": measured >= target}


def at_most(what: str, target: float, measured: float) -> dict[str, Any]:
    """A target that is reached by a value no larger."""
    return {"what": what, "sign": "<=", "target": target, "measured": measured, "reached": measured <= target}


def note(what: str, measured: float) -> dict[str, Any]:
    """Stated for information."""
    return {"what": what, "sign": "", "target": None, "measured": measured, "reached": None}


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.4g} ms" if microseconds >= 1e3 else f"{microseconds:.4g} µs"


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
