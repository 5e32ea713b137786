"""Compile a model's GPU kernels ahead of time, and look into the folder that ships.

    python examples/ahead_of_time.py
    python examples/ahead_of_time.py --arch sm_90 --model B/16 --out kernels

Needs Triton, but no GPU: about a second a kernel. Prints a line for every kernel (bytes, warps,
shared memory), and with a GPU also how the model runs from the folder. Elsewhere, the environment
variable VITKERN_BINARIES names the folder, and no compiler is needed at run time.
"""

import argparse
import json
import pathlib

import torch

from vitkern import ViT
from vitkern.engines import trace
from vitkern.gpu.aot.build import build


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", default="sm_80", metavar="NAME")
    parser.add_argument("--model", default="Ti/16", metavar="NAME")
    parser.add_argument("--dtype", default="bf16", metavar="NAME")
    parser.add_argument("--out", type=pathlib.Path, default="build/kernels", metavar="FOLDER")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N kernels")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at once")
    given = parser.parse_args()

    # `vitkern aot --arch sm_80 --models Ti/16 --dtype bf16 --no-backward --out kernels` does the
    # same: first what the model would launch, found on tensors without memory, then the compiler.
    wanted = trace.variants(given.arch, (given.dtype,), (given.model,), backward=False)
    print(f"{given.model} in {given.dtype} launches {len(wanted)} different kernels")
    result = build({given.arch: wanted[: given.first]}, given.out, given.jobs)
    for failure in result.failures:
        print(f"failed: {failure.id}: {failure.reason}")

    manifest = json.loads((given.out / "manifest.json").read_text())
    print(f"{given.out} by vitkern {manifest['vitkern']} and triton {manifest['triton']}:")
    for kernel in manifest["kernels"]:
        facts = f"{kernel['bytes']:>7} bytes, {kernel['num_warps']} warps"
        print(f"  {kernel['file']:<60} {facts}, {kernel['shared']} bytes of shared memory")

    if torch.cuda.is_available():
        from vitkern.gpu.runtime import device

        device.use_binaries(given.out)
        model = ViT(given.model).cuda().bfloat16().eval()
        with torch.inference_mode():
            model(torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16))
        print(model.explain())
    return 1 if result.failures else 0


if __name__ == "__main__":  # the build's processes import this file again
    raise SystemExit(main())
