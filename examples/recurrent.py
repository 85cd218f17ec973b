"""Shard an LSTM and replicate its embedding: the two verbs in one model, under one optimizer.

torchrun --standalone --nproc-per-node=2 examples/recurrent.py
"""

import torch
import torch.distributed as dist
from torch import nn

from composable import describe, fully_shard, replicate


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, words):
        hidden, _ = self.lstm(self.embedding(words))
        return self.head(hidden)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tagger()
    replicate(model.embedding)  # small and read often: every rank keeps all of it
    # a unit of its own; the module's list of weights for cuDNN is updated, too
    fully_shard(model.lstm)
    fully_shard(model)  # what is left: the head
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(30):
        words = torch.randint(0, 64, (16, 12))
        target = words.roll(1, dims=1)  # the word before: it takes memory
        loss = nn.functional.cross_entropy(
            model(words)[:, 1:].flatten(0, 1), target[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:2}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
