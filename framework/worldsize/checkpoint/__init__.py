"""Checkpoints: safetensors shards and JSON, verified by digests, loadable at any world size; never a pickle."""
