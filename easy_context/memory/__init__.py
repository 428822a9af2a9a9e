"""What a long sequence fills memory with, one file each: logits (`tiled_loss`), checkpoints (`offload`)."""
