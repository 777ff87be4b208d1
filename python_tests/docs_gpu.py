"""What the docs' tables for a GPU must show."""

from __future__ import annotations

from python_tests.docs_tables import CASES, ROOT, Expected, results

GPU = ROOT / "bench/results/nvidia-h100-80gb-hbm3"


def times_of(file: str, op: str, case: str, batch: str) -> dict[str, dict[str, float]]:
    """For each provider the row of replayed graphs on a cold cache."""
    return {
        row["provider"]: row
        for row in results(file, GPU)["rows"]
        if (row["op"], row["case"], row["batch"]) == (op, CASES.get(case, case), int(batch))
        and (row["vocab"], row["num_draft"], row["cache"], row["launch"]) == (128256, 5, "cold", "graph")
    }


def compared(times: dict[str, dict[str, float]], column: str) -> Expected:
    """Ours and its floor in µs, Triton's µs, or a peer's time over ours."""
    ours = times["cuda"]
    if column.startswith("CUDA"):
        return [ours["median_us"], ours["floor_us"]]
    if column == "Triton, µs":
        return [times["triton"]["median_us"]]
    peer = times.get(column.replace("LLM", "llm") if column.startswith("vLLM") else column.lower())
    return [peer["median_us"] / ours["median_us"]] if peer else []


def goals_on_gpu(label: str, column: str) -> Expected:
    """µs for one sequence, else a call's time as a multiple of its floor; nothing if it was not measured."""
    case, vocab = label.rsplit(", ", 1)
    batch, what = column.partition(",")[0], "µs" if column.endswith("µs") else "floor"
    begins = f"{CASES[case] if case in CASES else case} V={vocab} B={batch} K=5: "
    goals = [t for t in results("verify_chain", GPU)["targets"] if t["what"].startswith(begins)]
    return [
        t["measured"] for t in goals if t["what"].removeprefix(begins) in (what, f"× {what}", f"× full-read {what}")
    ]


def on_gpu(label: str, column: str) -> Expected:
    """`verify_chain`."""
    return compared(times_of("verify_chain", "verify_chain", *label.split(", ")), column)


def samples_on_gpu(label: str, column: str) -> Expected:
    """`sample`."""
    return compared(times_of("ops", "sample", *label.split(", ")), column)
