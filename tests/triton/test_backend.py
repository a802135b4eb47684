"""How the Triton package is found: lazily, for CUDA tensors, and for CPU tensors where the environment asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CHOICES = ("JACOBI_BACKEND", "TRITON_INTERPRET")


def python(code: str, **environment: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of a fresh interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_importing_the_ops_imports_no_triton() -> None:
    ask = "import sys, jacobi_kernels; print('triton' in sys.modules, 'jacobi_kernels.triton.runtime' in sys.modules)"
    assert python(ask) == (0, "False False\n", "")


def test_every_op_is_registered_for_cuda() -> None:
    from jacobi_kernels._ops import SCHEMAS
    from jacobi_kernels.triton import OPS

    public = {op for op in SCHEMAS if not op.startswith("_")} - {"step_workspace_size"}  # which looks at CPU tensors
    assert set(OPS) == public
    for op in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"jacobi::{op}", "CUDA"), op


def test_every_module_has_its_op() -> None:
    from importlib import import_module

    from jacobi_kernels.triton import OPS

    for op in OPS:
        assert callable(getattr(import_module(f"jacobi_kernels.triton.{op}"), op)), op


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_backend_needs_the_interpreter() -> None:
    code, output, errors = python("import jacobi_kernels", JACOBI_BACKEND="triton")
    assert (code, output) == (1, "")
    assert errors.splitlines()[-1] == (
        "ImportError: JACOBI_BACKEND=triton needs a GPU, and there is none: set TRITON_INTERPRET=1 as well to run the "
        "kernels in Triton's interpreter, or unset JACOBI_BACKEND"
    )


def test_an_unknown_backend_is_named() -> None:
    code, _, errors = python("import jacobi_kernels", JACOBI_BACKEND="cutlass")
    assert code == 1
    assert errors.splitlines()[-1] == "ImportError: JACOBI_BACKEND must be unset or triton, got 'cutlass'"


def test_the_command_line_says_so_in_one_line() -> None:
    run = "from jacobi_decoding.cli import main; raise SystemExit(main(['info']))"
    code, _, errors = python(run, JACOBI_BACKEND="cutlass", PYTHONPATH="python:training")
    assert (code, errors) == (2, "jacobi: error: JACOBI_BACKEND must be unset or triton, got 'cutlass'\n")


RUN = """
import torch
from jacobi_kernels import ops, reference
from jacobi_kernels.triton.runtime import launches
from tests.kernels.helpers import chain_with_candidates, int32, make_cache, random_linear, random_tensor

def close(ours, exact):
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)

layout = chain_with_candidates(4, 1, 3)
q, k, v = (random_tensor(i, 7, heads, 16) for i, heads in ((1, 4), (2, 2), (3, 2)))
cache = make_cache(4, [70], 7, 2, 16)
twin = cache.clone()
out = ops.multi_block_attention_with_kvcache(q, k, v, cache.k, cache.v, cache.lengths, *layout)
close(out, reference.multi_block_attention_with_kvcache(q, k, v, twin.k, twin.v, cache.lengths, *layout))
assert torch.equal(cache.k.nan_to_num(), twin.k.nan_to_num())
x, weight = random_tensor(5, 3, 24), random_linear(6, 40, 24)
close(ops.packed_linear(x, weight, None, 40), reference.packed_linear(x, weight, None, 40))
close(ops.activation(x, "silu"), reference.activation(x, "silu"))
attended, _ = ops.multi_block_attention(q.requires_grad_(), k, v, *layout)
attended.sum().backward()
assert q.grad is not None
torch.library.opcheck(
    torch.ops.jacobi.multi_block_attention_with_kvcache.default,
    (q.detach(), k, v, cache.k.nan_to_num(), cache.v.nan_to_num(), cache.lengths, *layout),
)
print(sorted(launches))
try:
    ops.activation(x.bfloat16(), "silu")
except RuntimeError as error:
    print(error)
"""


def test_cpu_tensors_go_through_the_interpreter_where_asked_for() -> None:
    code, output, errors = python(RUN, JACOBI_BACKEND="triton", TRITON_INTERPRET="1")
    assert (code, errors) == (0, "")
    counted, refused = output.splitlines()
    for op in (
        "multi_block_attention_with_kvcache",
        "packed_linear",
        "activation",
        "multi_block_attention",
        "multi_block_attention_backward",
    ):
        assert repr(op) in counted, counted
    assert refused == "activation: Triton's interpreter computes float32 only: use float32 tensors"


def test_cpu_tensors_keep_their_kernels_otherwise() -> None:
    ask = """
import sys, torch
from jacobi_kernels import ops
ops.activation(torch.ones(3), "relu")
print("triton" in sys.modules)
"""
    assert python(ask, TRITON_INTERPRET="1") == (0, "False\n", "")
