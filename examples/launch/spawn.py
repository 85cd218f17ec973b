"""Ranks from one Python process, without a launcher: for a test, or a machine of one's own.

python examples/launch/spawn.py
"""

import os

import torch.multiprocessing as mp
from train import main


def run(rank, ranks, port):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    main()


if __name__ == "__main__":
    mp.spawn(run, args=(2, int(os.environ.get("MASTER_PORT", "29500"))), nprocs=2)
