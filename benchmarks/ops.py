"""All benchmarks of ops in one process: one JSON file each, equal ceilings.

python -m benchmarks.ops --device cuda --out-dir benchmarks/results --suffix _h200
"""

from pathlib import Path

import torch

from benchmarks import act_mul, decode_attention, linear, rms_norm, rotary_kv_write
from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.op_timing import bench, measure_ceilings, parse

OPS = {
    "rms_norm": rms_norm,
    "rotary_kv_write": rotary_kv_write,
    "act_mul": act_mul,
    "linear": linear,
    "decode_attention": decode_attention,
}


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--out-dir", type=Path, help="folder for one JSON file per op")
    parser.add_argument("--suffix", default="", help="of each file's name, before .json")
    parser.add_argument("--only", choices=sorted(OPS), nargs="+", default=list(OPS))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    ceilings = measure_ceilings(device)
    print(ceilings)
    for name in arguments.only:
        print(f"--- {name}")
        rows = bench(OPS[name].cases(device), device, ceilings)
        if arguments.out_dir:
            path = arguments.out_dir / f"{name}{arguments.suffix}.json"
            save(path, environment(device), rows)


if __name__ == "__main__":
    main()
