"""Checkpoints: safetensors shards and JSON (no pickle), loadable at any world size."""
