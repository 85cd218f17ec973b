"""Programs as users of trainers write them for FSDP2; none knows composable."""
