"""The trainer: DeepSpeed ZeRO-3 ranks that turn scored rows into one optimiser step."""
