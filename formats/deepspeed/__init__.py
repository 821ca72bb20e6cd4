"""The checkpoints of DeepSpeed: ZeRO of all stages, and Universal."""
