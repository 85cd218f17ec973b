"""accelerate with its own FSDP2 options: prepare, accumulate, clip, state dict."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from tests.fsdp2.programs.cpu_ranks import rows, take_cpu_ranks_for_accelerators, tiny_llama

warnings.simplefilter("ignore")


def main() -> None:
    take_cpu_ranks_for_accelerators()
    if "install" in sys.argv:
        from composable.fsdp2 import install  # noqa: PLC0415, one of two backends

        install()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.is_fsdp2
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(48), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.prepare_model(model) is model
    accelerator.print(f"class {type(model).__name__}")
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                accelerator.print(f"norm {norm.item():.6f}")
            optimizer.step()
            optimizer.zero_grad()
        if number == 11:
            break
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        total = sum(tensor.double().abs().sum().item() for tensor in whole.values())
        print(f"state {len(whole)} {total:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
