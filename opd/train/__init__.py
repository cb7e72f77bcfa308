"""The trainer: DeepSpeed ZeRO-3 ranks that take scored rows and take one optimiser step."""
