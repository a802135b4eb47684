"""What was wanted and what came out: the table that ends a report."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
AUTO = "speed of block_size='auto' against token by token"


def targets(result: Row) -> list[Row]:
    """Rows of what, limit ('<= 0.55'), figure, first and third quartile where it is a median, rounds, and met."""
    rows = [_target(_ratio_name(r), "<=", r["target"], r["median"], r) for r in result["ratios"]]
    rows += [
        _target(f"{s['format']} step of {s['tokens']}: share of the floor", ">=", s["target"], s["median"], s)
        for s in result["floor_shares"]
    ]
    for way in result["end_to_end"]:
        if way.get("speed_against_ar"):
            speed = way["speed_against_ar"] | {"rounds": way["prompts"]}
            rows.append(_target(f"{way['format']} answers: {AUTO}", ">=", way["target"], speed["median"], speed))
            same = way["agreeing"] / way["prompts"]
            rows.append(_target(f"{way['format']} answers: equal to token by token", ">=", 1.0, same))
    if result["prefill"]:
        p = result["prefill"]
        spread = p["ratio"] | {"rounds": len(p["rounds_ms"]["jacobi"])}
        what = f"{p['format']} prompt of {p['tokens']} tokens / transformers"
        rows.append(_target(what, "<=", p["target"], spread["median"], spread))
    rows += [
        _target(f"{m['format']} MB of peak memory over torch's", "<=", m["target_mb"], m["over_torch_mb"])
        for m in result["memory"]
    ]
    return [row for row in rows if row is not None]


def _ratio_name(r: Row) -> str:
    return f"{r['format']} step of {r['tokens']} / {r['peer']} {r['peer_format']} step of {r['peer_tokens']}"


def _target(what: str, sign: str, limit: float | None, figure: float, spread: Row | None = None) -> Row | None:
    if limit is None:
        return None
    row = {"what": what, "target": f"{sign} {limit:.4g}", "figure": figure}
    row["met"] = figure <= limit if sign == "<=" else figure >= limit
    return row | {name: (spread or {}).get(name) for name in ("first_quartile", "third_quartile", "rounds")}
