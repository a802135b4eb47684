"""What the interpreter cannot show: compiled, both kinds of tiles of attention over the cache sum in one order.

The order of a row's sums follows from the layouts of the products' results and of what is reduced, and from which
multiplications and additions the compiler fuses. Whether a key lies below the committed length, whether splits run side
by side, and pages must change none of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jacobi_kernels.triton.multi_block_attention_with_kvcache import attention_case

found = []
for options in ({"partial": True}, {"partial": False}, {"partial": True, "page_size": 16}):
    case = attention_case("SmolLM2-135M", sys.argv[1], **options)
    names = list(case.signature)
    compiled = triton.compile(
        ASTSource(
            fn=case.kernel,
            signature=dict(case.signature),
            constexprs=dict(case.constexprs),
            attrs={(names.index(n),): [["tt.divisibility", d]] for n, d in case.attributes.items()},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    ir = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\\w+) = (.*)$", ir, re.M))
    spelled = lambda kinds: [re.sub(r"#\\w+", lambda name: layouts[name.group()], kind) for kind in kinds]
    found.append({
        "products": spelled(re.findall(r"tt\\.dot .*-> (tensor<[^>]*>)", ir)),
        "reduced": spelled(re.findall(r"\\}\\) : \\((tensor<\\d+x\\d+xf32, #\\w+>)\\) -> ", ir)),
        "fused": len(re.findall(r"fma\\.rn\\.f32 ", compiled.asm["ptx"])),
    })
print(json.dumps(found))
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tiles_pages_and_splits_share_layouts_and_fused_operations(dtype: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    split, whole, paged = json.loads(done.stdout)
    assert split == whole == paged
    scores, values, *others = split["products"]
    assert others == [scores, values], "tiles below the committed length, then tiles that reach past it"
    assert len(split["reduced"]) == 4  # maximum and sum, twice
    assert set(split["reduced"]) == {scores}
