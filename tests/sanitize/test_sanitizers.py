"""The CPU step under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and how often it allocates: a
program without torch (step_driver.cpp) decodes a dumped state, and its tokens are the op's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jacobi_kernels.grouped import FORMATS
from tests.cuda.grid import Case
from tests.sanitize.drivers import ADDRESS, AVAILABLE, THREAD, build, drive, usable
from tests.sanitize.states import Decoding, arrays, decode, dump, start, step_weights

pytestmark = pytest.mark.slow

SHORT = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 332], [2], [7, 8, 7, 8, 7, 8, 7]]
LONG = [(5 * i * i + i // 7) % 333 for i in range(530)]  # keys of three spans

DECODINGS = {
    "one": Decoding("tied", SHORT[:1], Case(6, 2, 3)),
    "batch": Decoding("separate", SHORT, Case(8, 3, 2, new_tokens=14), asked=3),
    "fewer threads than asked for": Decoding("separate", SHORT, Case(8, 2, 2, new_tokens=10), asked=4, granted=2),
    "pages": Decoding("tied", SHORT, Case(4, 2, 3, chain_capacity=9, page_size=5, new_tokens=14), asked=2),
    "one token a step": Decoding("separate", SHORT, Case(page_size=64, new_tokens=6), asked=3),
    "sampled": Decoding("separate", SHORT, Case(5, 2, 1, temperature=0.9, new_tokens=12), asked=2),
    "filtered": Decoding(
        "separate", SHORT, Case(4, 1, 2, page_size=3, temperature=0.9, new_tokens=12), asked=3, filters=True
    ),
    "many rows": Decoding(
        "tied", [LONG[:130], LONG[:1], LONG[:97]], Case(65, 2, 1, new_tokens=80), asked=2, most_steps=3
    ),
    "long": Decoding("tied", [LONG], Case(4, 1, 1, chain_capacity=300, new_tokens=4), asked=4),
}
# Attention, which is what "long" is about, depends on the type of the cache only.
CASES = [(name, f) for name in DECODINGS for f in FORMATS if name != "long" or f in ("float32", "bfloat16")]
MIXED = {
    "mixed": Decoding("mixed", SHORT, Case(6, 2, 2, page_size=7, new_tokens=12), asked=4),
    "mixed, sampled": Decoding("mixed", SHORT, Case(14, 1, 1, temperature=0.8, new_tokens=16), asked=2, filters=True),
}
CASES += [(name, "int4") for name in MIXED]
RACES = [("batch", f) for f in FORMATS] + [("pages", "int8"), ("filtered", "float32"), ("long", "bfloat16")]
RACES += [("mixed", "int4")]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs with AddressSanitizer and UndefinedBehaviorSanitizer."""
    folder = tmp_path_factory.mktemp("address")
    flags = usable(folder, ADDRESS, "libasan and libubsan")
    build(folder, [*flags, "-DGUARD_ARENA"], ["step_driver", "product_driver", "rules_driver"], AVAILABLE)
    return folder


@pytest.fixture(scope="module")
def thread_sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs with ThreadSanitizer; one kernel table, as threads are the same for all."""
    folder = tmp_path_factory.mktemp("thread")
    build(folder, usable(folder, THREAD, "libtsan"), ["step_driver"], ["scalar"])
    return folder


def decoding_of(name: str) -> Decoding:
    return (DECODINGS | MIXED)[name]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_no_stray_access_and_no_allocation(sanitized: Path, tmp_path: Path, name: str, format: str) -> None:
    decoding = decoding_of(name)
    weights = step_weights(decoding.model, format)
    run = start(weights, decoding)
    state = dump(tmp_path / "state", arrays(weights, run, decoding.most_steps))
    threads = (decoding.asked, decoding.granted or decoding.asked)
    result = drive(sanitized / "step_driver", state, *(word for table in AVAILABLE for word in (table, *threads)))
    assert result.stderr == ""
    assert result.returncode == 0
    steps, texts = decode(weights, run, decoding.most_steps)
    assert steps >= 3
    for table, line in zip(AVAILABLE, result.stdout.splitlines(), strict=True):
        said = json.loads(line)
        assert (said["steps"], said["texts"]) == (steps, texts), table
        assert said["allocations"] == [0] * steps, table


@pytest.mark.parametrize(("name", "format"), RACES)
def test_the_team_has_no_races(thread_sanitized: Path, tmp_path: Path, name: str, format: str) -> None:
    decoding = decoding_of(name)
    weights = step_weights(decoding.model, format)
    run = start(weights, decoding)
    state = dump(tmp_path / "state", arrays(weights, run, decoding.most_steps))
    threads = [(2, 2), (3, 3), (4, 4), (4, 2)]
    result = drive(thread_sanitized / "step_driver", state, *(w for pair in threads for w in ("scalar", *pair)))
    assert result.stderr == ""
    assert result.returncode == 0
    steps, texts = decode(weights, run, decoding.most_steps)
    for line in result.stdout.splitlines():
        said = json.loads(line)
        assert (said["steps"], said["texts"]) == (steps, texts)


@pytest.mark.parametrize("name", ["cu_segments", "v_cache", "segments"])
def test_an_overrun_is_reported(sanitized: Path, tmp_path: Path, name: str) -> None:
    """The tests above would see one: here an array is too short, or a segment too long for the step's workspace."""
    decoding = DECODINGS["one"]
    weights = step_weights(decoding.model, "float32")
    named = arrays(weights, start(weights, decoding), 100)
    if name == "segments":
        named[name][0, 1] = named["tokens"].numel() + 1
    else:
        named[name] = named[name].view(-1)[: named[name].numel() // 2]
    result = drive(sanitized / "step_driver", dump(tmp_path / "state", named), "scalar", 1, 1)
    assert result.returncode != 0
    error = "use-after-poison" if name == "segments" else "heap-buffer-overflow"
    assert f"AddressSanitizer: {error}" in result.stderr


def test_products_of_all_formats(sanitized: Path) -> None:
    """1 to 130 rows, sizes that are no multiple of 16 or 32, arrays of exactly their size."""
    result = drive(sanitized / "product_driver", *AVAILABLE)
    assert result.stderr == ""
    assert result.returncode == 0
    assert [json.loads(line)["products"] >= 4 * 260 for line in result.stdout.splitlines()] == [True] * len(AVAILABLE)


def test_rules_on_any_state(sanitized: Path) -> None:
    """Redraft, acceptance and commit of random states, and of states with values that no step wrote."""
    result = drive(sanitized / "rules_driver", 3000)
    assert result.stderr == ""
    assert result.returncode == 0
    counts = json.loads(result.stdout)
    assert min(counts.values()) > 1000, counts
