"""Ranks that Slurm starts by itself, without torchrun.

srun --nodes=2 --ntasks-per-node=8 python examples/launch/slurm.py
"""

import os
import subprocess

from train import main

# what torch.distributed reads -> what srun sets
NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}


def first_host():
    nodes = os.environ["SLURM_STEP_NODELIST"]
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]


if __name__ == "__main__":
    missing = [slurms for slurms in NAMES.values() if slurms not in os.environ]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)}: not set; start this by srun, or train.py by torchrun"
        )
    os.environ |= {name: os.environ[slurms] for name, slurms in NAMES.items()}
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = first_host()
    # jobs that share a host must not share a port
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000))
    main("hybrid")  # ranks of a host are found by its name: Slurm sets no LOCAL_WORLD_SIZE
