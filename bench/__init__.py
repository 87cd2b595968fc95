"""Measurements that anyone can repeat. Times depend on the machine; read them as ratios within one run."""
