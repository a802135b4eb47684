"""Decode with torch and jacobi_kernels alone: packed weights and prompt ids in, new token ids out.

Make the two inputs with `jacobi pack --out weights.safetensors` and `jacobi generate --prompt TEXT --json` (its
prompt_ids); the ids printed here are the `token_ids` that `jacobi generate` prints with the same settings.

    python examples/step_loop.py --weights weights.safetensors --prompt-ids 1,4093,198 --stop 2
"""

import argparse

import torch

import jacobi_kernels as jk


def decode(weights: jk.StepWeights, state: jk.DecodeState) -> list[int]:
    """One call per step until the sequence ends; everything that a step changes lies in tensors owned here."""
    k_cache, v_cache = weights.allocate_cache(state.batch, state.cache_capacity)
    size = torch.ops.jacobi.step_workspace_size(
        weights.descriptor, state.tokens.shape[0], state.batch, state.segments.shape[0]
    )
    workspace = torch.zeros(size, dtype=torch.uint8)
    while state.running:
        torch.ops.jacobi.multi_block_step(
            weights.blob,
            weights.descriptor,
            k_cache,
            v_cache,
            state.cache_seqlens,
            state.tokens,
            state.segments,
            state.cu_seqlens_q,
            state.cu_segments,
            state.text,
            state.pool,
            state.state,
            state.stop_tokens,
            workspace,
            block_size=state.block_size,
            blocks=state.blocks,
            candidates=state.candidates,
        )
    return state.generated(0)


def ids(text: str) -> list[int]:
    """Token ids from '1,2,3' or '[1, 2, 3]'."""
    return [int(part) for part in text.strip("[] \n").split(",") if part.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, metavar="FILE", help="packed weights, from `jacobi pack`")
    parser.add_argument("--prompt-ids", required=True, type=ids, metavar="IDS", help="comma-separated token ids")
    parser.add_argument("--stop", type=ids, default=[], metavar="IDS", help="token ids that end the answer")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--candidates", type=int, default=4)
    args = parser.parse_args()
    state = jk.DecodeState.allocate(
        [args.prompt_ids],
        max_new_tokens=args.max_new_tokens,
        block_size=args.block_size,
        blocks=args.blocks,
        candidates=args.candidates,
        stop_tokens=args.stop,
    )
    print(decode(jk.load_step_weights(args.weights), state))


if __name__ == "__main__":
    main()
