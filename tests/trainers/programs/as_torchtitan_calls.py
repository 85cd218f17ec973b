"""The calls of torchtitan 0.3.0's `apply_fsdp_to_decoder` and of its chunked loss, in their order.
It is not installed itself: it excludes the version of `datasets` that TRL is tested with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.fsdp import FSDPModule
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from tests.trainers.programs.recording import Record, digest


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 16)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(16, 64, bias=False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, *, _skip_lm_head: bool = False) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h)
        return h if _skip_lm_head else self.lm_head(h)


def _apply_fsdp(model: Decoder, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    config: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
    }
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    fully_shard([model.norm, model.lm_head], **config, reshard_after_forward=False)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=True)
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # without it, FSDP2's divisors do not work on gloo
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    blocks = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    blocks[1].set_modules_to_forward_prefetch([model.norm, model.lm_head])
    model.lm_head.set_modules_to_backward_prefetch([blocks[1]])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])


class _Bridge(torch.autograd.Function):
    """Gives the hidden states the gradient that the chunks have left."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


def _chunked_loss(head: Any, hidden: Tensor, labels: Tensor, tokens: int) -> Tensor:
    assert isinstance(head, FSDPModule)
    requires_grad = hidden.requires_grad
    chunks = [c.detach().requires_grad_(requires_grad) for c in hidden.split(2, dim=1)]
    total = hidden.new_zeros((), dtype=torch.float32)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    gradients = []
    for number, (chunk, label) in enumerate(zip(chunks, labels.split(2, dim=1), strict=True)):
        if number == len(chunks) - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        logits = head(chunk).float().flatten(0, 1)
        loss = cross_entropy(logits, label.flatten(), reduction="sum") / tokens
        total = total + loss.detach()
        if requires_grad:
            loss.backward()
            assert chunk.grad is not None
            gradients.append(chunk.grad.float())
            chunk.grad = None
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    if not requires_grad:
        return total
    return _Bridge.apply(hidden, torch.cat(gradients, dim=1).to(hidden.dtype), total)


def run(record: Record, folder: str, *, chunked: bool, bf16: bool) -> None:
    """Shard on the meta device, initialise, train, validate; save, train on, load, train on."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with torch.device("meta"):
        model = Decoder()
    _apply_fsdp(model, bf16)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    record.note("initial", digest(model))

    def loss_of(data: Tensor) -> Tensor:
        tokens, labels = data[:, :-1], data[:, 1:]
        of_all_ranks = 2 * labels.numel()
        if chunked:
            hidden = model(tokens, _skip_lm_head=True)
            return _chunked_loss(model.lm_head, hidden, labels, of_all_ranks)
        logits = model(tokens).float().flatten(0, 1)
        return cross_entropy(logits, labels.flatten(), reduction="sum") / of_all_ranks

    def train() -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):  # micro-batches; torchtitan reduces each of them
                loss = loss_of(torch.randint(64, (2, 9), generator=generator))
                loss.backward()
                loss = loss.detach()
                dist.all_reduce(loss)
                record.note("loss", loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            record.note("norm", norm)
            optimizer.step()
        with torch.no_grad():
            model.eval()
            record.note("validated", loss_of(torch.arange(18).view(2, 9)))
            model.train()

    train()
    own, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": of_optimizer}, checkpoint_id=folder)
    train()
    record.note("trained on", digest(model))
    own, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train()
    record.note("resumed", digest(model))
