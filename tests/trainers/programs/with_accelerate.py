"""accelerate with its own FSDP2 options."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from tests.trainers.programs.cpu_ranks import rows, tiny_llama
from tests.trainers.programs.recording import Record, digest, exported


def run(
    record: Record,
    folder: str,
    *,
    kind: str = "SHARDED_STATE_DICT",
    precision: str = "no",
    checkpointing: bool = False,
    tied: bool = False,
) -> None:
    """Prepare, accumulate, clip; save the state, train on, load it and train on again; export."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        state_dict_type=kind,
        activation_checkpointing=checkpointing,
        cpu_ram_efficient_loading=tied,
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=precision
    )
    assert accelerator.is_fsdp2
    model = tiny_llama(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(48), batch_size=2)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert accelerator.prepare_model(model) is model

    def train() -> None:
        for batch, _ in zip(loader, range(4), strict=False):
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                record.note("loss", accelerator.reduce(loss.detach(), "mean"))
                if accelerator.sync_gradients:
                    record.note("norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    train()
    accelerator.save_state(f"{folder}/state")
    train()
    record.note("trained on", digest(model))
    accelerator.load_state(f"{folder}/state")
    train()
    record.note("resumed", digest(model))

    whole = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/model")
    bare = accelerator.unwrap_model(model)
    bare.save_pretrained(
        f"{folder}/pretrained", state_dict=whole, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        record.note("whole", digest(whole))
        record.note("exported", exported(f"{folder}/model"))
        loaded = type(bare).from_pretrained(f"{folder}/pretrained")
        record.note("loaded", digest(loaded))
    model.eval()
    with torch.no_grad():
        batch = rows(48)[:4]
        record.note("eval", accelerator.reduce(model(input_ids=batch, labels=batch).loss, "mean"))
    # ranks stop at different lengths
    start = rows(48)[accelerator.process_index][None, :4]
    tokens = bare.generate(start, max_new_tokens=2 + 2 * accelerator.process_index, do_sample=False)
    record.note("tokens", tokens)
