"""docs/memory_order.md names every file whose accesses have an order that x86 gives away and Arm does not."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "memory_order.md").read_text()
ORDERED = re.compile(
    r"memory_order(_|::)(relaxed|consume|acquire|release|acq_rel)"
    r"|__ATOMIC_(RELAXED|CONSUME|ACQUIRE|RELEASE|ACQ_REL)"
    r"|atomic_(thread|signal)_fence|_mm_[slm]fence|__sync_|\b(ld|st|atom)\.(relaxed|acquire|release)"
)


def test_every_weak_order_is_explained():
    sources = [path for folder in ("bindings", "kernels") for path in (ROOT / folder).rglob("*.*")]
    code = {str(path.relative_to(ROOT)): path.read_text() for path in sources if path.suffix in {".h", ".cpp", ".cuh"}}
    assert len(code) > 100
    named = set(re.findall(r"`((?:bindings|kernels)/[\w/]+\.\w+)`", PAGE))
    assert named == {name for name, text in code.items() if ORDERED.search(text)}
