"""Measurements that need an accelerator."""
